"""KID: the kernel distance between features of generated and of real images. It is unbiased, so few samples are enough."""

from __future__ import annotations

from typing import ClassVar

from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result
from kineograph.evaluate.statistics import FeatureRows, kernel_distance


class Kid:
    name: ClassVar[str] = "kid"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "generated"})

    def __init__(self, extractor: Extractor, context: EvalContext) -> None:
        self.extractor, self.label, self.frames = extractor, extractor.label, context.shape.frames
        width = extractor.width(context.shape)
        self.real, self.fake = FeatureRows(width, context.device), FeatureRows(width, context.device)

    @classmethod
    def open(cls, context: EvalContext) -> Kid:
        return cls(context.extractors.open(cls.name, "inception-v3", "images"), context)

    def update(self, batch: EvalBatch) -> None:
        self.real.add(batch.features("real", self.extractor))
        self.fake.add(batch.features("generated", self.extractor))

    def compute(self) -> Result:
        real, fake = self.real.gather(), self.fake.gather()
        values, labels = kernel_distance(real, fake)
        labels = {"extractor": self.label, "count": len(fake), "real": len(real), **labels}
        return Result(values, labels | ({"of": "frames"} if self.frames > 1 else {}))


METRIC = Kid
