"""Caption accuracy of a codec's reconstructions: the most that a generator can reach whose samples it decodes."""

from __future__ import annotations

from typing import ClassVar

import torch

from kineograph.evaluate.digit_reader import WEIGHTS, Reader
from kineograph.evaluate.metric.caption_accuracy import Tally, parse_prompts
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result


class ReconstructedCaptions:
    name: ClassVar[str] = "reconstructed_captions"
    needs: ClassVar[frozenset[Kind]] = frozenset({"captions", "reconstruction"})

    def __init__(self, reader: Reader, device: torch.device | str) -> None:
        self.reader, self.device, self.tally = reader, device, Tally()

    @classmethod
    def open(cls, context: EvalContext) -> ReconstructedCaptions:
        parse_prompts(context.captions or [])
        return cls(Reader.load(WEIGHTS, context.device), context.device)

    def update(self, batch: EvalBatch) -> None:
        self.tally.add(parse_prompts(batch.captions or []), self.reader.read(batch.clips("reconstruction")))

    def compute(self) -> Result:
        tally = self.tally.all_reduce(self.device)
        return Result({"reconstructed_captions": tally.accuracy}, {"count": tally.count})


METRIC = ReconstructedCaptions
