"""FID: how far the features of made pictures lie from those of real ones, each taken as a Gaussian. Clips count as their frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result
from kineograph.evaluate.statistics import FrechetDistance


@dataclass(frozen=True)
class PictureDistance:
    """FID of what a stage draws, or (rFID) of what a codec gives back."""

    name: str
    made: Literal["generated", "reconstruction"]

    @property
    def needs(self) -> frozenset[Kind]:
        return frozenset({"real", self.made})

    def open(self, subject: EvalContext) -> RunningDistance:
        extractor = subject.extractors.open(self.name, "inception-v3", "pictures")
        sums = FrechetDistance(extractor.width(subject.shape), subject.device)
        return RunningDistance(self.name, self.needs, self.made, extractor, sums, subject.shape.frames)


class RunningDistance:
    def __init__(
        self,
        name: str,
        needs: frozenset[Kind],
        made: Literal["generated", "reconstruction"],
        extractor: Extractor,
        sums: FrechetDistance,
        frames: int,
    ) -> None:
        self.name, self.needs, self.made = name, needs, made
        self.extractor, self.sums, self.frames = extractor, sums, frames

    def update(self, evidence: EvalBatch) -> None:
        self.sums.update(evidence.features("real", self.extractor), real=True)
        self.sums.update(evidence.features(self.made, self.extractor), real=False)

    def compute(self) -> Result:
        distance, real, made = self.sums.joined()
        return Result(
            {self.name: distance}, distance_labels(self.extractor.label, real, made, self.sums.width, self.frames)
        )


def distance_labels(extractor: str, real: int, made: int, width: int, frames: int) -> dict[str, Any]:
    labels: dict[str, Any] = {"extractor": extractor, "count": made, "real": real}
    if frames > 1:
        labels["of"] = "frames"
    if min(real, made) <= width:
        labels["caution"] = (
            f"no more samples than features ({width}): the distance is too large by a lot; compare equal counts only"
        )
    return labels


METRIC = PictureDistance("fid", "generated")
