"""How a codec uses its codes over the whole evaluated set (a mean over batches would underrate both numbers)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kineograph.evaluate.evidence import Evidence, Kind, Result, Subject
from kineograph.nn.quantizers import codebook_histogram, usage


class Codebook:
    name: ClassVar[str] = "codebook"
    needs: ClassVar[frozenset[Kind]] = frozenset({"tokens"})

    def __init__(self, codes: int) -> None:
        self.histogram = torch.zeros(codes, dtype=torch.int64)

    @classmethod
    def open(cls, subject: Subject) -> Codebook:
        return cls(int(subject.task.vocabulary))  # type: ignore[arg-type]

    def update(self, evidence: Evidence) -> None:
        tokens = evidence.tokens
        assert isinstance(tokens, Tensor)
        self.histogram += codebook_histogram(tokens, len(self.histogram)).cpu()

    def compute(self) -> Result:
        found = usage(self.histogram)
        values = {"codebook_use": float(found["use"]), "codebook_perplexity": float(found["perplexity"])}
        return Result(values, {"codes": len(self.histogram), "tokens": int(self.histogram.sum())})


METRIC = Codebook
