"""FVD: the Fréchet distance between I3D features of generated and of real clips. Unlike FID of frames, it sees motion."""

from __future__ import annotations

from typing import ClassVar, Literal

from kineograph.evaluate.extractor.i3d import SHORTEST
from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric.fid import compute_with_labels
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result
from kineograph.evaluate.statistics import FrechetDistance


class Fvd:
    name: ClassVar[str] = "fvd"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "generated", "clips"})

    def __init__(self, extractor: Extractor, context: EvalContext) -> None:
        self.extractor, self.label, self.frames = extractor, extractor.label, context.shape.frames
        self.distance = FrechetDistance(extractor.width(context.shape, clips=True), context.device)

    @classmethod
    def open(cls, context: EvalContext) -> Fvd:
        if context.shape.frames < SHORTEST:
            raise MetricSkipped(
                f"clips have {context.shape.frames} frames, and FVD is defined for {SHORTEST} or more: train on longer clips, or "
                "use fid for single frames (repeating frames would measure the repetition)"
            )
        return cls(context.extractors.open(cls.name, "i3d-kinetics400", "clips"), context)

    def update(self, batch: EvalBatch) -> None:
        self._add(batch, "real")
        self._add(batch, "generated")

    def _add(self, batch: EvalBatch, kind: Literal["real", "generated"]) -> None:
        """Add clips without their padding, one length at a time; clips that are too short are not counted."""
        clips = batch.clips(kind)
        lengths = batch.mask(kind).sum(1).cpu()
        for length in sorted(set(lengths.tolist())):
            if length >= SHORTEST:
                selected = clips[(lengths == length).to(clips.device), :length]
                self.distance.update(self.extractor.features(selected), real=kind == "real")

    def compute(self) -> Result:
        value, labels = compute_with_labels(self.distance, self.label)
        return Result({"fvd": value}, {**labels, "of": f"clips of {self.frames} frames"})


METRIC = Fvd
