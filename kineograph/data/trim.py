"""Which part of a video is read: without its beginning and end (`data.start`, `data.end`, `data.skip_frames`), cut into clips (`data.cut`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field, model_validator

from kineograph.core.config import Config
from kineograph.core.errors import Unreadable
from kineograph.data.buckets import MediaInfo
from kineograph.data.transforms import TOLERANCE

Span = tuple[float, float]  # seconds


MIN_STRIDE = 0.02  # seconds: a frame of 50 per second


class CutConfig(Config):
    """Cut every video into clips of equal length, each an item of its own."""

    seconds: float = Field(gt=0)
    """Length of a clip."""
    overlap: float = Field(0.0, ge=0)
    """Seconds that a clip shares with the one before it."""

    @model_validator(mode="after")
    def _check_overlap(self) -> CutConfig:
        if self.overlap >= self.seconds:
            raise ValueError(f"overlap={self.overlap:g} must be less than seconds={self.seconds:g}")
        if self.seconds - self.overlap < MIN_STRIDE:
            raise ValueError(
                f"seconds={self.seconds:g} with overlap={self.overlap:g} begins a clip every {self.seconds - self.overlap:.2g} s: "
                f"leave at least {MIN_STRIDE:g} s between the beginnings of two clips"
            )
        return self

    def spans(self, begin: float, end: float) -> list[Span]:
        """The clips between two times; one that is shorter than `seconds` stays whole. What is left at the end is left out."""
        stride = self.seconds - self.overlap
        count = math.floor((end - begin - self.seconds + TOLERANCE) / stride) + 1
        if count < 1:
            return [(begin, end)]
        starts = [begin + number * stride for number in range(count)]
        return [(round(start, 3), round(start + self.seconds, 3)) for start in starts]


@dataclass(frozen=True)
class Trim:
    """What is left out at both ends of a video."""

    start: float = 0.0  # seconds
    end: float | None = None  # seconds; negative: from the end of the video
    skip_frames: int = 0  # at the beginning and at the end

    def __bool__(self) -> bool:
        return self != Trim()

    def __str__(self) -> str:
        values = {"start": self.start, "end": self.end, "skip_frames": self.skip_frames}
        return ", ".join(f"data.{key}={value:g}" for key, value in values.items() if value)

    def span(self, seconds: float, rate: float, inside: Span | None = None) -> Span:
        """The part that is read of a video, or of a captioned part of it. Raises Unreadable if nothing is left."""
        skipped = self.skip_frames / rate
        end = seconds if self.end is None else min(self.end, seconds) if self.end > 0 else seconds + self.end
        begin, end = self.start + skipped, end - skipped
        if inside is not None:
            begin, end = max(begin, inside[0]), min(end, inside[1])
        if end - begin <= TOLERANCE:
            raise Unreadable("", f"nothing is left of its {seconds:.3g} s with {self}")
        return begin, end

    def measure(self, info: MediaInfo, inside: Span | None = None) -> MediaInfo:
        """Size and length of what is read; a still picture stays. Raises Unreadable if nothing is left."""
        if not info.seconds or not (self or inside):
            return info
        if inside is not None and inside[0] >= info.seconds - TOLERANCE:
            raise Unreadable("", f"its clip begins at {inside[0]:g} s, but it lasts {info.seconds:.3g} s")
        begin, end = self.span(info.seconds, info.frames / info.seconds, inside)
        return info._replace(frames=max(1, round(info.frames * (end - begin) / info.seconds)), seconds=end - begin)


UNTRIMMED = Trim()
