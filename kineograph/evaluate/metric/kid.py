"""KID: the kernel distance between features of generated and of real images. It is unbiased, so few samples are enough."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result, Side
from kineograph.evaluate.saved_statistics import SavedStatistics
from kineograph.evaluate.statistics import FeatureRows, kernel_distance


class Kid:
    name: ClassVar[str] = "kid"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "generated"})

    def __init__(self, extractor: Extractor, context: EvalContext) -> None:
        self.extractor, self.label, self.frames = extractor, extractor.label, context.shape.frames
        self.options, self.held_out = context.options, not context.reference
        self.width = extractor.width(context.shape)
        self.rows = {side: FeatureRows(self.width, context.device) for side in ("real", "generated")}
        self.loaded: dict[str, tuple[Tensor, str]] = {}  # side → features, label

    @classmethod
    def open(cls, context: EvalContext) -> Kid:
        return cls(context.extractors.open(cls.name, "inception-v3", "images"), context)

    def update(self, batch: EvalBatch) -> None:
        if self.held_out:
            self.add(batch, "real")
        self.add(batch, "generated")

    def add(self, batch: EvalBatch, side: Side) -> None:
        self.rows[side].add(batch.features(side, self.extractor))

    def load(self, side: Side, saved: SavedStatistics) -> None:
        self.loaded[side] = saved.rows(self.name, self.width, self.extractor.protocol), saved.label("fid")

    def save(self, side: Side, saved: SavedStatistics) -> None:
        saved.features = self._gather(side)
        saved.protocol.setdefault("fid", {**self.extractor.protocol, "count": len(saved.features)})

    def _gather(self, side: Side) -> Tensor:
        return self.loaded[side][0] if side in self.loaded else self.rows[side].gather()

    def compute(self) -> Result:
        real, fake = self._gather("real"), self._gather("generated")
        values, labels = kernel_distance(real, fake, self.options.kid_subsets, self.options.kid_subset_size)
        labels = {**self.extractor.protocol, "count": len(fake), "real": len(real), **labels}
        for side, name in (("real", "reference"), ("generated", "drawn")):
            if side in self.loaded:
                labels[name] = self.loaded[side][1]
        of: dict[str, Any] = {"of": "frames"} if self.frames > 1 else {}
        return Result(values, labels | of)


METRIC = Kid
