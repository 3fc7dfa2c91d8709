"""FVD: the Fréchet distance between I3D features of generated and of real clips. Unlike FID of frames, it sees motion."""

from __future__ import annotations

from typing import Any, ClassVar

from kineograph.core import distributed
from kineograph.evaluate.extractor.i3d import SHORTEST
from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric.fid import TwoSides
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result, Side
from kineograph.evaluate.saved_statistics import SavedStatistics


class Fvd:
    name: ClassVar[str] = "fvd"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "generated", "clips"})

    def __init__(self, extractor: Extractor, context: EvalContext) -> None:
        self.extractor, self.label, self.device = extractor, extractor.label, context.device
        self.first = context.options.fvd_frames  # None: all frames
        self.held_out = not context.reference
        protocol = {**extractor.protocol, "frames": self.first or "all"}
        population = extractor.network.mode == "pytorch"  # cd-fvd divides by the number of clips
        self.sides = TwoSides("fvd", extractor.width(context.shape, clips=True), protocol, context, population)
        self.lengths: dict[str, dict[int, int]] = {"real": {}, "generated": {}}  # frames of a clip → clips
        self.short = {"real": 0, "generated": 0}  # clips that were not counted

    @classmethod
    def open(cls, context: EvalContext) -> Fvd:
        frames, needed = context.shape.frames, context.options.fvd_frames or SHORTEST
        if frames < needed:
            asked = f"fvd_frames={needed}" if context.options.fvd_frames else f"FVD is defined for {SHORTEST} or more"
            raise MetricSkipped(
                f"clips have {frames} frames, and {asked}: train on longer clips, or use fid for single frames (repeating "
                "frames would measure the repetition)"
            )
        return cls(context.extractors.open(cls.name, "i3d-kinetics400", "clips"), context)

    def update(self, batch: EvalBatch) -> None:
        if self.held_out:
            self.add(batch, "real")
        self.add(batch, "generated")

    def add(self, batch: EvalBatch, side: Side) -> None:
        """Add clips without their padding, one length at a time; clips that are too short are not counted."""
        clips = batch.clips(side)
        lengths = batch.mask(side).sum(1).cpu()
        if self.first is not None:
            lengths = lengths.clamp(max=self.first)
        for length in sorted(set(lengths.tolist())):
            chosen = lengths == length
            if length < (self.first or SHORTEST):
                self.short[side] += int(chosen.sum())
                continue
            self.lengths[side][length] = self.lengths[side].get(length, 0) + int(chosen.sum())
            self.sides.add(side, self.extractor.features(clips[chosen.to(clips.device), :length]))

    def load(self, side: Side, saved: SavedStatistics) -> None:
        self.sides.load(side, saved)

    def save(self, side: Side, saved: SavedStatistics) -> None:
        self.sides.save(side, saved)

    def compute(self) -> Result:
        counted = distributed.data_all_gather_object([self.lengths, self.short], self.device)
        short = sum(sum(part.values()) for _, part in counted)
        try:
            value, labels = self.sides.compute()
        except MetricSkipped as reason:
            needed = f"; {short} clips have fewer than {self.first or SHORTEST} frames" if short else ""
            raise MetricSkipped(f"{reason}{needed}") from None
        return Result({"fvd": value}, labels | self._describe_frames(counted))

    def _describe_frames(self, counted: list[Any]) -> dict[str, Any]:
        """Frames that were counted, and clips that were not."""
        labels: dict[str, Any] = {}
        lengths = {side: {int(n) for part, _ in counted for n in part[side]} for side in ("real", "generated")}
        for side, name in (("generated", "frames"), ("real", "real frames")):
            if lengths[side] and (name == "frames" or lengths["real"] != lengths["generated"]):
                low, high = min(lengths[side]), max(lengths[side])
                labels[name] = low if low == high else f"{low} to {high}"
        if short := {side: sum(part[side] for _, part in counted) for side in ("real", "generated")}:
            text = ", ".join(f"{count} {side}" for side, count in short.items() if count)
            labels |= {"too short": text} if text else {}
        if "frames" in labels:
            labels["of"] = f"clips of {labels['frames']} frames"
        return labels


METRIC = Fvd
