"""FVD: the Fréchet distance between I3D's features of made and of real clips. It sees motion, which FID of frames does not."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kineograph.evaluate.extractor.i3d import SHORTEST
from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric.fid import distance_labels
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result
from kineograph.evaluate.statistics import FrechetDistance


class Fvd:
    name: ClassVar[str] = "fvd"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "generated", "clips"})

    def __init__(self, extractor: Extractor, subject: EvalContext) -> None:
        self.extractor, self.frames = extractor, subject.shape.frames
        self.sums = FrechetDistance(extractor.width(subject.shape), subject.device)

    @classmethod
    def open(cls, subject: EvalContext) -> Fvd:
        if subject.shape.frames < SHORTEST:
            raise MetricSkipped(
                f"clips have {subject.shape.frames} frames, and FVD is defined for {SHORTEST} or more: train with longer ones; "
                "repeating frames would measure the repetition (fid judges the frames one by one)"
            )
        return cls(subject.extractors.open(cls.name, "i3d-kinetics400", "clips"), subject)

    def update(self, evidence: EvalBatch) -> None:
        assert evidence.real is not None
        assert evidence.generated is not None
        self._add(evidence.real, evidence.frame_mask, real=True)
        self._add(evidence.generated, None, real=False)

    def _add(self, clips: Tensor, mask: Tensor | None, real: bool) -> None:
        """Clips of one length at a time; those that are too short without their padding are not counted."""
        lengths = mask.sum(1).cpu() if mask is not None else torch.full((len(clips),), clips.shape[1])
        for length in sorted(set(lengths.tolist())):
            if length < SHORTEST:
                continue
            self.sums.update(self.extractor.features(clips[(lengths == length).to(clips.device), :length]), real)

    def compute(self) -> Result:
        distance, real, made = self.sums.joined()
        labels = distance_labels(self.extractor.label, real, made, self.sums.width, frames=1)
        return Result({"fvd": distance}, {**labels, "of": f"clips of {self.frames} frames"})


METRIC = Fvd
