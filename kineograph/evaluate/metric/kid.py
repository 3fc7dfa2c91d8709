"""KID: the kernel distance between features of made and of real pictures. Unbiased, so it can be told of few samples too."""

from __future__ import annotations

from typing import ClassVar

from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result
from kineograph.evaluate.statistics import FeatureRows, kernel_distance


class Kid:
    name: ClassVar[str] = "kid"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "generated"})

    def __init__(self, extractor: Extractor, subject: EvalContext) -> None:
        self.extractor, self.frames = extractor, subject.shape.frames
        self.real, self.made = FeatureRows(subject.device), FeatureRows(subject.device)
        self.width = extractor.width(subject.shape)

    @classmethod
    def open(cls, subject: EvalContext) -> Kid:
        return cls(subject.extractors.open(cls.name, "inception-v3", "pictures"), subject)

    def update(self, evidence: EvalBatch) -> None:
        self.real.add(evidence.features("real", self.extractor))
        self.made.add(evidence.features("generated", self.extractor))

    def compute(self) -> Result:
        real, made = self.real.joined(self.width), self.made.joined(self.width)
        values, told = kernel_distance(real, made)
        labels = {"extractor": self.extractor.label, "count": len(made), "real": len(real), **told}
        return Result(values, labels | ({"of": "frames"} if self.frames > 1 else {}))


METRIC = Kid
