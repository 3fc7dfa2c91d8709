"""How a codec uses its codes over the whole evaluated set (a mean over batches would underrate both numbers)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result
from kineograph.nn.codebook_use import codebook_histogram, codebook_usage


class Codebook:
    name: ClassVar[str] = "codebook"
    needs: ClassVar[frozenset[Kind]] = frozenset({"tokens"})

    def __init__(self, codes: int, device: torch.device | str = "cpu") -> None:
        self.histogram = torch.zeros(codes, dtype=torch.int64, device=device)

    @classmethod
    def open(cls, subject: EvalContext) -> Codebook:
        return cls(int(subject.task.vocabulary), subject.device)  # type: ignore[arg-type]

    def update(self, evidence: EvalBatch) -> None:
        tokens = evidence.tokens
        assert isinstance(tokens, Tensor)
        self.histogram += codebook_histogram(tokens, len(self.histogram))

    def compute(self) -> Result:
        histogram = distributed.all_reduce_(self.histogram.clone())
        found = codebook_usage(histogram)
        values = {"codebook_use": float(found["use"]), "codebook_perplexity": float(found["perplexity"])}
        return Result(values, {"codes": len(histogram), "tokens": int(histogram.sum())})


METRIC = Codebook
