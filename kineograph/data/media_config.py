"""How sources of files read images and clips: the config of it, and the options of one decode; which files are media."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, model_validator

from kineograph.core.safe_media import MediaLimits
from kineograph.data.buckets import Bucket, BucketsConfig
from kineograph.data.captions import Lines
from kineograph.data.open_source import DataConfig, Split
from kineograph.data.transforms import Crop, Resize, ResizeCrop
from kineograph.data.trim import UNTRIMMED, Trim

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".jp2")
VIDEOS = (".mp4", ".webm", ".mov", ".avi", ".mkv", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".3gp", ".wmv", ".ogv")
CLIPS = (".gif", *VIDEOS)


def media_kind(name: str) -> Literal["image", "clip"] | None:
    """By the file's suffix."""
    suffix = os.path.splitext(name)[1].lower()  # far faster than Path, for listings of a million files
    return "image" if suffix in IMAGES else "clip" if suffix in CLIPS else None


_LIMITS = MediaLimits()


@dataclass(frozen=True)
class DecodeOptions:
    """Which frames of a file to decode, and how."""

    resize_crop: ResizeCrop
    frames: int = 1
    fps: float | None = None
    channels: int = 3
    background: Literal["white", "black"] = "white"
    truncated: bool = False
    span: tuple[float, float] | None = None  # only frames shown between these seconds
    trim: Trim = UNTRIMMED  # left out at both ends of a clip
    limits: MediaLimits = _LIMITS

    def apply_trim(self, seconds: float, rate: float) -> DecodeOptions:
        """The options with the span that `trim` leaves of a clip of this length. Raises Unreadable."""
        return replace(self, span=self.trim.span(seconds, rate, self.span), trim=UNTRIMMED) if self.trim else self

    def with_shape(self, shape: Bucket) -> DecodeOptions:
        resize_crop = replace(self.resize_crop, size=(shape.height, shape.width))
        return replace(self, resize_crop=resize_crop, frames=shape.frames)


class MediaConfig(DataConfig):
    """How sources of files read images and clips."""

    resize: Resize = "cover"
    """cover: scale until `size` is covered, then crop; stretch: ignore the aspect; contain: the whole image, with bars of `background`."""
    crop: Crop = "center"
    """center; random: a random position; resized: a random part of random size (training only; validation takes the centre)."""
    crop_area: tuple[float, float] = (0.75, 1.0)
    """With crop=resized: smallest and largest share of the image's area."""
    crop_aspect: tuple[float, float] = (1.0, 1.0)
    """With crop=resized: smallest and largest aspect of the crop, relative to that of `size`; the crop is stretched accordingly."""
    flip: float = Field(0.0, ge=0, le=1)
    """Probability of a horizontal flip (training only). Training warns if captions say left or right."""
    rotate: bool = False
    """Rotate by a random multiple of 90° (training only)."""
    background: Literal["white", "black"] = "white"
    """Colour behind transparent images when `channels` has no alpha."""
    truncated: bool = False
    """Accept images that end too early; the missing part stays gray or black."""
    start: float = Field(0.0, ge=0)
    """Seconds left out at the beginning of every clip."""
    end: float | None = None
    """Second at which clips end; negative: counted from their end, so that -2 leaves out the last two; null: all of them."""
    skip_frames: int = Field(0, ge=0)
    """Frames left out at the beginning and at the end of every clip, by its average rate."""
    caption_lines: Lines = "one"
    """Lines of a text file beside an item: one caption, or several, each a caption of its own, of which training draws one each time."""
    limits: MediaLimits = MediaLimits()
    """What one file may take; a larger one is unreadable."""
    buckets: BucketsConfig | None = None
    """Train on clips of several shapes, one per batch: `{}` for five aspects of `size`'s area; null: all are `frames` × `size`."""

    @model_validator(mode="after")
    def _check_crop(self) -> MediaConfig:
        for name, (low, high), limit in (
            ("crop_area", self.crop_area, 1.0),
            ("crop_aspect", self.crop_aspect, math.inf),
        ):
            if not 0 < low <= high <= limit:
                upper = " and at most 1" if limit == 1 else ""
                raise ValueError(f"{name}=[{low:g}, {high:g}]: give smallest, largest, above 0{upper}")
        if self.resize != "cover" and self.crop != "center":
            raise ValueError(
                f"crop={self.crop} has no effect with resize={self.resize}, which shows the whole image: use resize=cover, or remove crop"
            )
        return self

    @model_validator(mode="after")
    def _check_trim(self) -> MediaConfig:
        if self.end is not None and (self.end == 0 or 0 < self.end <= self.start):
            raise ValueError(
                f"end={self.end:g} with start={self.start:g} leaves nothing: give a later second, a negative one to count from the end, or null"
            )
        return self

    @property
    def trim(self) -> Trim:
        return Trim(self.start, self.end, self.skip_frames)

    @property
    def base_shape(self) -> Bucket:
        """data.frames × data.size."""
        return Bucket(self.frames, *self.size)

    @property
    def resize_crop(self) -> ResizeCrop:
        bars = 255 if self.background == "white" else 0
        return ResizeCrop(
            self.size, self.crop, self.flip, self.rotate, self.resize, self.crop_area, self.crop_aspect, bars
        )

    def decode_options(self, split: Split) -> DecodeOptions:
        resize_crop = self.resize_crop if split == "train" else self.resize_crop.deterministic
        return DecodeOptions(
            resize_crop,
            self.frames,
            self.fps,
            self.channels,
            self.background,
            self.truncated,
            trim=self.trim,
            limits=self.limits,
        )
