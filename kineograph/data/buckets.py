"""Buckets: clips of several shapes in one run, each batch of one shape and of about as many tokens as any other.

Every item goes to the bucket (frames × height × width) that shows most of it. Which bucket a step takes, and which of its items, follows
from (seed, step) alone, as in order.py. Bucket b of N items in batches of n has made ⌈(e + 1) N / n⌉ batches when epoch e ends: every item was
then seen e + 1 times, a batch at the end of a bucket is filled up from its next round, and no bucket comes more often than its size asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator

from kineograph.core.config import Config
from kineograph.core.errors import ConfigError
from kineograph.core.noise import key_of
from kineograph.data.order import drawn, items, permute

_ALIKE = 0.05  # shares of a picture that differ by less than this are alike: then the resolution decides
_SHRUNK = 0.95  # a picture may be enlarged by this little and count as large enough

Positive = Annotated[int, Field(ge=1)]


class Bucket(NamedTuple):
    """The shape of a clip, in frames and pixels."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames} × {self.height} × {self.width}"


class Extent(NamedTuple):
    """How large and long a file is, upright."""

    width: int
    height: int
    frames: int = 1
    seconds: float = 0.0  # 0: a still

    def taken(self, fps: float | None) -> int:
        """Frames that can be taken at a rate, from its first moment on."""
        if not self.seconds or fps is None:
            return self.frames
        return max(1, math.ceil(self.seconds * fps - 1e-3))


class BucketsConfig(Config):
    """Clips of several shapes in one run. A batch has one shape; its number of clips follows from the budget."""

    sizes: tuple[tuple[Positive, Positive], ...] | None = Field(None, min_length=1)
    """Heights and widths, as [[480, 720], [720, 480]]; null: made of `resolutions` and `aspects`."""
    resolutions: tuple[Positive, ...] | None = Field(None, min_length=1)
    """Sides of squares of the same area, one for each resolution; null: that of data.size."""
    aspects: tuple[str, ...] = Field(("16:9", "4:3", "1:1", "3:4", "9:16"), min_length=1)
    """Width : height of the shapes at each resolution."""
    multiple: int = Field(16, ge=1)
    """Sides that are made of `resolutions` and `aspects` are multiples of this."""
    frames: tuple[Positive, ...] | None = Field(None, min_length=1)
    """Lengths; a clip goes to the longest that it fills, and 1 takes pictures; null: data.frames alone."""
    patch: tuple[Positive, Positive, Positive] = (1, 1, 1)
    """Frames, height and width that one token of the model covers; [1, 1, 1] counts pixels."""
    budget: int | None = Field(None, ge=1)
    """Tokens a batch over all processes, in place of train.batch_size; null: those of train.batch_size clips of data.frames × data.size."""
    least: int = Field(1, ge=1)
    """A bucket with fewer items than this is closed, and its items go to the next best."""

    @field_validator("aspects")
    @classmethod
    def _ratios(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for aspect in value:
            _ratio(aspect)
        return value

    @model_validator(mode="after")
    def _one_way(self) -> BucketsConfig:
        # By value: a saved config names every key.
        unread = [
            name
            for name in ("resolutions", "aspects", "multiple")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if self.sizes is not None and unread:
            one = len(unread) == 1
            raise ValueError(
                f"sizes says every shape, so {' and '.join(unread)} {'changes' if one else 'change'} nothing: leave out sizes or {'it' if one else 'them'}"
            )
        return self

    def shapes(self, usual: Bucket) -> list[Bucket]:
        """All buckets; `usual` is the shape of data.frames and data.size."""
        sizes = self.sizes or [
            self._size(resolution, _ratio(aspect))
            for resolution in self.resolutions or (round(math.sqrt(usual.height * usual.width)),)
            for aspect in self.aspects
        ]
        return sorted({Bucket(frames, *size) for frames in self.frames or (usual.frames,) for size in sizes})

    def _size(self, resolution: int, aspect: float) -> tuple[int, int]:
        sides = resolution / math.sqrt(aspect), resolution * math.sqrt(aspect)  # height, width of the same area
        height, width = (max(1, round(side / self.multiple)) * self.multiple for side in sides)
        return height, width

    def tokens(self, bucket: Bucket) -> int:
        """Of one clip: the first frame alone, then groups of `patch` frames, as causal codecs have it."""
        times, high, wide = self.patch
        return (
            (1 + -(-(bucket.frames - 1) // times)) * -(-bucket.height // high) * -(-bucket.width // wide)
        )  # fmt: skip


def _ratio(aspect: str) -> float:
    try:
        width, height = map(float, aspect.split(":"))
        return width / height if min(width, height) > 0 else _refuse_ratio(aspect)
    except ValueError:
        return _refuse_ratio(aspect)


def _refuse_ratio(aspect: str) -> float:
    raise ValueError(f"{aspect!r} is not an aspect: write width:height, as 16:9")


# What goes where --------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """An item in its bucket."""

    bucket: int
    kept: float  # share of the picture that is left after cropping
    enlarged: bool
    padded: bool  # too short for any bucket: its last frame is repeated


def shown_share(extent: Extent, bucket: Bucket) -> float:
    """Of a picture that is scaled until it covers the bucket, and cropped."""
    ratio = extent.width / extent.height * bucket.height / bucket.width
    return min(ratio, 1 / ratio)


def choose(extent: Extent, shapes: Sequence[Bucket], fps: float | None) -> Fit:
    """The longest length that the item fills; of its shapes those that show most of the picture; of these the largest that needs no
    enlarging, or else the smallest."""
    there = extent.taken(fps)
    lengths = sorted({shape.frames for shape in shapes})
    frames = max((length for length in lengths if length <= there), default=lengths[0])
    fitting = [place for place, shape in enumerate(shapes) if shape.frames == frames]
    shares = {place: shown_share(extent, shapes[place]) for place in fitting}
    alike = [place for place in fitting if shares[place] >= max(shares.values()) - _ALIKE]

    def shrinks(place: int) -> bool:
        return min(extent.height / shapes[place].height, extent.width / shapes[place].width) >= _SHRUNK

    def area(place: int) -> int:
        return shapes[place].height * shapes[place].width

    enough = [place for place in alike if shrinks(place)]
    best = (
        max(enough, key=lambda place: (area(place), shares[place]))
        if enough
        else min(alike, key=lambda place: (area(place), -shares[place]))
    )
    return Fit(best, shares[best], not enough, frames > there)


def assign(extents: Sequence[Extent], config: BucketsConfig, usual: Bucket, fps: float | None) -> Buckets:
    """Every item to a bucket. Those with fewer than `least` items are closed one after another, the emptiest first."""
    shapes = config.shapes(usual)
    fits = [choose(extent, shapes, fps) for extent in extents]
    while True:
        counts = np.bincount([fit.bucket for fit in fits], minlength=len(shapes))
        emptiest = min(np.flatnonzero(counts), key=lambda place: counts[place], default=None)
        if emptiest is None or counts[emptiest] >= config.least or np.count_nonzero(counts) == 1:
            return Buckets(shapes, fits, config, usual)
        shapes = [shape for place, shape in enumerate(shapes) if place != emptiest]
        fits = [choose(extent, shapes, fps) for extent in extents]


@dataclass
class Buckets:
    """Which bucket each item of a source belongs to."""

    shapes: list[Bucket]
    fits: list[Fit]  # of each item
    config: BucketsConfig
    usual: Bucket
    """The shape of data.frames and data.size: what pictures for people are read as."""

    @cached_property
    def of(self) -> np.ndarray:
        """The bucket of each item."""
        return np.array([fit.bucket for fit in self.fits], np.int64)

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The items of each bucket, in their order."""
        return [np.flatnonzero(self.of == place) for place in range(len(self.shapes))]

    def shape(self, item: int) -> Bucket:
        return self.shapes[self.of[item]]

    def only(self, chosen: Sequence[int] | np.ndarray) -> Buckets:
        """The same buckets for some of the items."""
        return Buckets(self.shapes, [self.fits[item] for item in chosen], self.config, self.usual)

    def budget(self, batch_size: int) -> int:
        """Tokens a batch."""
        return self.config.budget or batch_size * self.config.tokens(self.usual)

    def rows(self, batch_size: int) -> list[int]:
        """Clips a batch of each bucket; 0 for an empty one. A clip that is beyond the budget alone is refused."""
        budget, tokens = self.budget(batch_size), self.config.tokens
        filled = [shape for shape, members in zip(self.shapes, self.members, strict=True) if len(members)]
        largest = max(filled, key=tokens, default=None)
        if largest is not None and (each := tokens(largest)) > budget:
            given = f"data.buckets.budget={self.config.budget}" if self.config.budget else f"{budget:,} tokens"
            source = "" if self.config.budget else f", which train.batch_size={batch_size} clips of {self.usual} have"
            raise ConfigError(
                f"one clip of bucket {largest} has {each:,} tokens, and a batch may hold {given}{source}: raise data.buckets.budget to {each} "
                "or more, or leave such sizes out of data.buckets"
            )
        return [
            budget // tokens(shape) if len(members) else 0
            for shape, members in zip(self.shapes, self.members, strict=True)
        ]

    # for people ---------------------------------------------------------------------------------------------------

    def table(self, batch_size: int | None = None) -> list[dict[str, Any]]:
        """A row for each bucket that holds anything, as JSON has it. Without a batch size, batches are left out."""
        rows = self.rows(batch_size) if batch_size is not None else None
        table = []
        for place, (shape, members) in enumerate(zip(self.shapes, self.members, strict=True)):
            if not len(members):
                continue
            fits = [self.fits[item] for item in members]
            row: dict[str, Any] = {
                "frames": shape.frames,
                "height": shape.height,
                "width": shape.width,
                "items": len(members),
                "tokens": self.config.tokens(shape),
                "kept": round(float(np.mean([fit.kept for fit in fits])), 4),
                "enlarged": sum(fit.enlarged for fit in fits),
                "padded": sum(fit.padded for fit in fits),
            }
            if rows is not None:
                row |= {"rows": rows[place], "batches_an_epoch": round(len(members) / rows[place], 2)}
            table.append(row)
        return table

    def lines(self, batch_size: int | None = None) -> list[str]:
        """What goes where."""
        table = self.table(batch_size)
        lines = [
            f"buckets: {len(self.fits):,} items in {len(table)} of {len(self.shapes)} shapes (frames × height × width)"
        ]
        if batch_size is not None:
            lines[0] += f", up to {self.budget(batch_size):,} tokens a batch"
        for row in table:
            shape = Bucket(row["frames"], row["height"], row["width"])
            text = f"  {shape!s:<17} {row['items']:>8,} items, {row['tokens']:,} tokens each"
            if batch_size is not None:
                text += f", {row['rows']} a batch, {row['batches_an_epoch']:,.6g} batches an epoch"
            text += f", {row['kept']:.0%} of the picture kept"
            text += f", {row['enlarged']:,} enlarged" if row["enlarged"] else ""
            text += f", {row['padded']:,} too short and padded" if row["padded"] else ""
            lines.append(text)
        return lines


# Order ------------------------------------------------------------------------------------------------------------


class BucketOrder:
    """Step → bucket and items, as a pure function of (seed, step)."""

    def __init__(self, buckets: Buckets, seed: int, batch_size: int, resample: bool = False) -> None:
        self.buckets, self.seed, self.resample = buckets, seed, resample
        self.rows = buckets.rows(batch_size)
        self._open = [place for place, members in enumerate(buckets.members) if len(members)]
        self._counts = [len(buckets.members[place]) for place in self._open]

    def _made(self, epochs: int) -> list[int]:
        """Batches of each bucket in so many epochs."""
        return [-(-epochs * count // self.rows[place]) for place, count in zip(self._open, self._counts, strict=True)]

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to: the last one that begins at or before it."""
        high = 1
        while sum(self._made(high)) <= step:
            high *= 2
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sum(self._made(middle)) <= step else (low, middle)
        return low

    def at(self, step: int) -> tuple[Bucket, np.ndarray]:
        """The step's bucket, and the items of its batch."""
        epoch = self.epoch(step)
        before, after = self._made(epoch), self._made(epoch + 1)
        inside = np.array([step - sum(before)])
        place = int(permute(inside, sum(after) - sum(before), key_of(self.seed, "buckets", epoch))[0])
        ends = np.cumsum(np.subtract(after, before))  # the epoch's batches, bucket by bucket
        among = int(np.searchsorted(ends, place, side="right"))
        bucket, batch = self._open[among], after[among] - int(ends[among]) + place
        shape, members = self.buckets.shapes[bucket], self.buckets.members[bucket]
        positions = batch * self.rows[bucket] + np.arange(self.rows[bucket])
        order = drawn if self.resample else items
        return shape, members[order(key_of(self.seed, "bucket", *shape), positions, len(members))]
