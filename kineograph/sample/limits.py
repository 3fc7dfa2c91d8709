"""Which clips a task can draw, and how many given frames it can continue."""

from __future__ import annotations

from dataclasses import dataclass

from kineograph.core.batch import Shape
from kineograph.core.capabilities import (
    HasLatentShape,
    SupportsContinuation,
    SupportsUpscaling,
    can_continue,
    can_upscale,
)
from kineograph.core.config import Config
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import Task


@dataclass(frozen=True)
class ClipLimits:
    task: Task
    name: str
    shape: Shape  # as trained

    def check_shape(self, frames: int, size: tuple[int, int] | None = None) -> None:
        """Raise the codec's error for a clip that it cannot encode; it names the shapes that fit."""
        height, width = size or (self.shape.height, self.shape.width)
        for part in (self.task, self.task.stages.get("codec")):
            if isinstance(part, HasLatentShape):
                part.shape_for(frames, height, width)

    def valid_lengths(self, most: int, size: tuple[int, int] | None = None) -> list[int]:
        """Numbers of frames up to `most` that the codec can encode."""
        return [frames for frames in range(1, most + 1) if self._fits(frames, size)]

    def _fits(self, frames: int, size: tuple[int, int] | None) -> bool:
        try:
            self.check_shape(frames, size)
        except ConfigError:
            return False
        return True

    def max_prime(self, frames: int) -> int:
        """The most frames that a window can continue: all of them must be visible, and at least one new."""
        return min(frames, self.shape.frames) - 1

    def default_overlap(self, frames: int, options: Config | None) -> int:
        """The stage's own `sample.overlap`; without one, as much as fits in half a clip."""
        overlap = self.task.usual_overlap(options) if isinstance(self.task, SupportsContinuation) else None
        if overlap is not None:
            return overlap
        return max(self.valid_lengths(max(1, min(frames, self.shape.frames) // 2)), default=1)

    def check_overlap(self, overlap: int, frames: int, key: str) -> None:
        """`key` is the flag or option that the overlap comes from."""
        lengths = self.valid_lengths(self.max_prime(frames))
        if not lengths:
            raise InputError(f"a story: {self.explain_too_short(frames)}")
        if overlap not in lengths:
            remedy = "" if key.startswith("--") else " with --overlap"
            window = f", drawn {self.shape.frames} at a time" if frames > self.shape.frames else ""
            raise InputError(
                f"{key}={overlap} does not fit scenes of {frames} frames{window}: use {format_lengths(lengths)}{remedy}"
            )

    def explain_too_short(self, frames: int) -> str:
        count = min(frames, self.shape.frames)
        remedy = "raise --frames" if count < self.shape.frames else "use a stage trained on longer clips (--stage)"
        return f"{self.name} draws {count} frame{'s' * (count > 1)} at a time, too few to continue a clip: {remedy}"

    def check_continues(self, feature: str) -> None:
        if not can_continue(self.task):
            raise InputError(
                f"{feature} needs a generator that continues clips, and {self.name} does not: use a run "
                "(or with --stage a stage) that does, such as one of phenaki"
            )

    @property
    def enlarges(self) -> bool:
        """Whether `prime` is a picture to enlarge: for super-resolution, or a critic that steers it."""
        parts = (self.task, *self.task.stages.values())
        return not can_continue(self.task) and any(map(can_upscale, parts))

    def prime_size(self, options: Config | None) -> tuple[int, int] | None:
        """Height and width of a picture to enlarge; None: those of the result."""
        parts = (self.task, *self.task.stages.values())
        sizes = (part.prime_size(options) for part in parts if isinstance(part, SupportsUpscaling))
        return next((size for size in sizes if size is not None), None)


def format_lengths(lengths: list[int]) -> str:
    """At most eight of them."""
    shown = lengths if len(lengths) <= 8 else [*lengths[:7], "…", lengths[-1]]
    return ", ".join(map(str, shown))
