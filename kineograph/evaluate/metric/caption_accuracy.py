"""Caption accuracy of generated clips, with the reader's own accuracy on real ones of the same captions as its ceiling."""

from __future__ import annotations

import hashlib
from typing import ClassVar

import torch

from kineograph.core.errors import InputError
from kineograph.data.digit_captions import Facts
from kineograph.evaluate.caption_accuracy import ATTRIBUTES, Tally, facts_of
from kineograph.evaluate.digit_reader import WEIGHTS, Reader
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result


class CaptionAccuracy:
    name: ClassVar[str] = "caption_accuracy"
    needs: ClassVar[frozenset[Kind]] = frozenset({"captions", "generated", "real"})

    def __init__(self, reader: Reader, device: torch.device | str = "cpu") -> None:
        self.reader, self.device = reader, device
        self.drawn, self.real = Tally(), Tally()

    @classmethod
    def open(cls, subject: EvalContext) -> CaptionAccuracy:
        _wanted(subject.captions or [])
        return cls(Reader.load(WEIGHTS, subject.device), subject.device)

    def update(self, evidence: EvalBatch) -> list[str]:
        assert evidence.captions is not None
        assert evidence.generated is not None
        assert evidence.real is not None
        wanted = _wanted(evidence.captions)
        drawn = self.reader.read(evidence.generated)
        right = self.drawn.add(wanted, drawn)
        self.real.add(wanted, self.reader.read(evidence.real))
        return ["✓" if ok else f"✗ {_told(facts)}" for ok, facts in zip(right, drawn, strict=True)]

    def compute(self) -> Result:
        found, ceiling = self.drawn.joined(self.device), self.real.joined(self.device)
        values = {"caption_accuracy": found.accuracy, "number": found.number}
        values |= {name: found.rates[name] for name in ATTRIBUTES if name in found.rates}
        labels = {"ceiling": ceiling.accuracy, "count": found.count, "extractor": f"reader {_digest()[:12]}"}
        return Result(values, labels)


def _wanted(captions: list[str]) -> list[Facts]:
    try:
        return [facts_of(caption) for caption in captions]
    except InputError as error:
        raise MetricSkipped(str(error)) from None


def _told(facts: Facts) -> str:
    """`red 3 left`, as short as it can be told."""
    return ", ".join(
        " ".join(str(part) for part in (f.colour, f.digit, f.direction or f.place) if part is not None) for f in facts
    )


def _digest() -> str:
    return hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()


METRIC = CaptionAccuracy
