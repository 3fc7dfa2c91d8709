"""FID: the Fréchet distance between features of generated and of real images. A clip counts as its frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, PixelKind, Result, Side
from kineograph.evaluate.saved_statistics import SavedStatistics
from kineograph.evaluate.statistics import Gaussian, Moments, frechet_distance


@dataclass(frozen=True)
class FidMetric:
    """FID of samples, or (rFID) of reconstructions."""

    name: str
    fake: Literal["generated", "reconstruction"]

    @property
    def needs(self) -> frozenset[Kind]:
        return frozenset({"real", self.fake})

    def open(self, context: EvalContext) -> Fid:
        return Fid(self, context.extractors.open(self.name, "inception-v3", "images"), context)


class Fid:
    def __init__(self, metric: FidMetric, extractor: Extractor, context: EvalContext) -> None:
        self.name, self.needs, self.fake = metric.name, metric.needs, metric.fake
        self.extractor, self.label, self.frames = extractor, extractor.label, context.shape.frames
        self.held_out = not context.reference or self.fake == "reconstruction"
        self.sides = TwoSides("fid", extractor.width(context.shape), extractor.protocol, context)

    def update(self, batch: EvalBatch) -> None:
        if self.held_out:
            self._add(batch, "real", "real")
        self._add(batch, self.fake, "generated")

    def _add(self, batch: EvalBatch, kind: PixelKind, side: Side) -> None:
        self.sides.add(side, batch.features(kind, self.extractor))

    def add(self, batch: EvalBatch, side: Side) -> None:
        self._add(batch, side, side)

    def load(self, side: Side, saved: SavedStatistics) -> None:
        self.sides.load(side, saved)

    def save(self, side: Side, saved: SavedStatistics) -> None:
        self.sides.save(side, saved)

    def compute(self) -> Result:
        value, labels = self.sides.compute()
        return Result({self.name: value}, labels | ({"of": "frames"} if self.frames > 1 else {}))


class TwoSides:
    """Mean and covariance of real and of generated features, each from sums or from saved statistics."""

    def __init__(
        self, metric: str, width: int, protocol: dict[str, Any], context: EvalContext, population: bool = False
    ) -> None:
        self.metric, self.width, self.protocol = metric, width, protocol
        self.moments = {side: Moments(width, context.device, population) for side in ("real", "generated")}
        self.loaded: dict[str, tuple[Gaussian, str]] = {}  # side → statistics, label

    def add(self, side: Side, features: Tensor) -> None:
        self.moments[side].add(features)

    def load(self, side: Side, saved: SavedStatistics) -> None:
        self.loaded[side] = saved.gaussian(self.metric, self.width, self.protocol), saved.label(self.metric)

    def save(self, side: Side, saved: SavedStatistics) -> None:
        gaussian = self.gaussian(side)
        saved.gaussians[self.metric] = gaussian
        saved.protocol[self.metric] = {**self.protocol, "count": gaussian.count}

    def gaussian(self, side: Side) -> Gaussian:
        return self.loaded[side][0] if side in self.loaded else self.moments[side].compute()

    def compute(self) -> tuple[float, dict[str, Any]]:
        """→ the distance, and labels that say how far to trust it"""
        real, fake = self.gaussian("real"), self.gaussian("generated")
        value = frechet_distance(real, fake)
        labels = {**self.protocol, "count": fake.count or "not stated", "real": real.count or "not stated"}
        for side, name in (("real", "reference"), ("generated", "drawn")):
            if side in self.loaded:
                labels[name] = self.loaded[side][1]
        if min(count for count in (real.count, fake.count, self.width + 1) if count is not None) <= self.width:
            labels["caution"] = (
                f"no more samples than features ({self.width}): the distance is far too large; compare equal counts only"
            )
        return value, labels


METRIC = FidMetric("fid", "generated")
