"""Use of the codebook over the whole evaluated set. A mean over batches would underrate both numbers."""

from __future__ import annotations

from typing import ClassVar

import torch

from kineograph.core import distributed
from kineograph.core.task import Codec
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result
from kineograph.nn.codebook_use import codebook_histogram, codebook_usage


class Codebook:
    name: ClassVar[str] = "codebook"
    needs: ClassVar[frozenset[Kind]] = frozenset({"tokens"})

    def __init__(self, codes: int, device: torch.device | str = "cpu") -> None:
        self.histogram = torch.zeros(codes, dtype=torch.int64, device=device)

    @classmethod
    def open(cls, context: EvalContext) -> Codebook:
        assert isinstance(context.task, Codec) and context.task.vocabulary is not None
        return cls(context.task.vocabulary, context.device)

    def update(self, batch: EvalBatch) -> None:
        assert batch.tokens is not None
        tokens = batch.tokens if batch.token_mask is None else batch.tokens[batch.token_mask]
        self.histogram += codebook_histogram(tokens, len(self.histogram))

    def compute(self) -> Result:
        histogram = distributed.all_reduce_(self.histogram.clone())
        measured = codebook_usage(histogram)
        values = {"codebook_use": float(measured["use"]), "codebook_perplexity": float(measured["perplexity"])}
        return Result(values, {"codes": len(histogram), "tokens": int(histogram.sum())})


METRIC = Codebook
