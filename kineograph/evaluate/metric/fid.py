"""FID: the Fréchet distance between features of generated and of real images. A clip counts as its frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result
from kineograph.evaluate.statistics import FrechetDistance


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
        self.distance = FrechetDistance(extractor.width(context.shape), context.device)

    def update(self, batch: EvalBatch) -> None:
        self.distance.update(batch.features("real", self.extractor), real=True)
        self.distance.update(batch.features(self.fake, self.extractor), real=False)

    def compute(self) -> Result:
        value, labels = compute_with_labels(self.distance, self.label)
        return Result({self.name: value}, labels | ({"of": "frames"} if self.frames > 1 else {}))


def compute_with_labels(distance: FrechetDistance, extractor: str) -> tuple[float, dict[str, Any]]:
    """→ the distance, and labels that say how far to trust it"""
    value, real, fake = distance.compute()
    labels: dict[str, Any] = {"extractor": extractor, "count": fake, "real": real}
    if min(real, fake) <= distance.width:
        labels["caution"] = (
            f"no more samples than features ({distance.width}): the distance is far too large; compare equal counts only"
        )
    return value, labels


METRIC = FidMetric("fid", "generated")
