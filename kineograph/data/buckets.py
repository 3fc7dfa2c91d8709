"""Buckets: clips of several shapes in one run, each batch of one shape and with about the same number of tokens.

Every item goes to the bucket (frames × height × width) that shows most of it. The bucket and items of a step follow from (seed, step)
alone, as in order.py. After epoch e, bucket b of N items in batches of n has filled ⌈(e + 1) N / n⌉ batches: every item was seen e + 1 times,
and the last batch of a round is filled from the bucket's next round.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator

from kineograph.core.batch import Sample
from kineograph.core.config import Config
from kineograph.core.errors import ConfigError
from kineograph.core.noise import key_of
from kineograph.core.protocols import MixShare, Source
from kineograph.data.order import ItemOrder, permute

_SHARE_TOLERANCE = 0.05  # visible shares within this of the best count as equal: then the resolution decides
_MIN_SCALE = 0.95  # an image counts as large enough down to this share of the bucket's size

Positive = Annotated[int, Field(ge=1)]


class Bucket(NamedTuple):
    """The shape of a clip, in frames and pixels."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames} × {self.height} × {self.width}"


class MediaInfo(NamedTuple):
    """Size and length of an image or clip, upright."""

    width: int
    height: int
    frames: int = 1
    seconds: float = 0.0  # 0: a still image

    def frames_at(self, fps: float | None) -> int:
        """Number of frames when sampled at this rate."""
        if not self.seconds or fps is None:
            return self.frames
        return max(1, math.ceil(self.seconds * fps - 1e-3))


class BucketsConfig(Config):
    """Clips of several shapes in one run. A batch has one shape; its number of clips follows from the token budget."""

    sizes: tuple[tuple[Positive, Positive], ...] | None = Field(None, min_length=1)
    """Heights and widths, as [[480, 720], [720, 480]]; null: made from `resolutions` and `aspects`."""
    resolutions: tuple[Positive, ...] | None = Field(None, min_length=1)
    """Sides of squares with the same area as the buckets; null: that of data.size."""
    aspects: tuple[str, ...] = Field(("16:9", "4:3", "1:1", "3:4", "9:16"), min_length=1)
    """Width : height of the buckets at each resolution."""
    multiple: int = Field(16, ge=1)
    """Sides made from `resolutions` and `aspects` are multiples of this."""
    frames: tuple[Positive, ...] | None = Field(None, min_length=1)
    """Lengths; a clip goes to the longest that it fills, and images go to 1; null: data.frames only."""
    patch: tuple[Positive, Positive, Positive] = (1, 1, 1)
    """Frames, height and width that one token of the model covers; [1, 1, 1] counts pixels."""
    budget: int | None = Field(None, ge=1)
    """Tokens per global batch, instead of train.batch_size; null: those of train.batch_size clips of data.frames × data.size."""
    least: int = Field(1, ge=1)
    """A bucket with fewer items is closed, and its items go to the next best."""

    @field_validator("aspects")
    @classmethod
    def _check_aspects(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for aspect in value:
            _parse_aspect(aspect)
        return value

    @model_validator(mode="after")
    def _check_sizes(self) -> BucketsConfig:
        # By value: a saved config names every key.
        unused = [
            name
            for name in ("resolutions", "aspects", "multiple")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if self.sizes is not None and unused:
            raise ValueError(
                f"sizes cannot be combined with {' and '.join(unused)}: it already lists every shape; remove one"
            )
        return self

    def shapes(self, base: Bucket) -> list[Bucket]:
        """All buckets; `base` is data.frames × data.size."""
        sizes = self.sizes or [
            self._size(resolution, _parse_aspect(aspect))
            for resolution in self.resolutions or (round(math.sqrt(base.height * base.width)),)
            for aspect in self.aspects
        ]
        return sorted({Bucket(frames, *size) for frames in self.frames or (base.frames,) for size in sizes})

    def _size(self, resolution: int, aspect: float) -> tuple[int, int]:
        sides = resolution / math.sqrt(aspect), resolution * math.sqrt(aspect)  # height, width of the same area
        height, width = (max(1, round(side / self.multiple)) * self.multiple for side in sides)
        return height, width

    def tokens(self, bucket: Bucket) -> int:
        """Tokens of one clip: the first frame alone, then groups of `patch` frames, as in causal codecs."""
        frames, height, width = self.patch
        times = 1 + math.ceil((bucket.frames - 1) / frames)
        return times * math.ceil(bucket.height / height) * math.ceil(bucket.width / width)


def _parse_aspect(aspect: str) -> float:
    try:
        width, height = map(float, aspect.split(":"))
        if min(width, height) > 0:
            return width / height
    except ValueError:
        pass
    raise ValueError(f"{aspect!r} is not an aspect: write width:height, as 16:9")


# Assignment -------------------------------------------------------------------------------------------------------


class BucketFit(NamedTuple):
    """An item in its bucket."""

    bucket: int
    kept: float  # share of the image that remains after cropping
    enlarged: bool
    padded: bool  # too short for any bucket: its last frame is repeated


def visible_share(info: MediaInfo, bucket: Bucket) -> float:
    """Share of an image that remains when it is scaled to cover the bucket and cropped."""
    ratio = info.width / info.height * bucket.height / bucket.width
    return min(ratio, 1 / ratio)


def choose_bucket(info: MediaInfo, shapes: Sequence[Bucket], fps: float | None) -> BucketFit:
    """Choose the longest length that the item fills; then the shapes that show most of the image; of these the largest that needs no
    enlarging, or else the smallest."""
    available = info.frames_at(fps)
    lengths = sorted({shape.frames for shape in shapes})
    frames = max((length for length in lengths if length <= available), default=lengths[0])
    shares = {i: visible_share(info, shape) for i, shape in enumerate(shapes) if shape.frames == frames}
    candidates = [i for i, share in shares.items() if share >= max(shares.values()) - _SHARE_TOLERANCE]

    def area(i: int) -> int:
        return shapes[i].height * shapes[i].width

    large_enough = [
        i for i in candidates if min(info.height / shapes[i].height, info.width / shapes[i].width) >= _MIN_SCALE
    ]
    if large_enough:
        best = max(large_enough, key=lambda i: (area(i), shares[i]))
    else:
        best = min(candidates, key=lambda i: (area(i), -shares[i]))
    return BucketFit(best, shares[best], not large_enough, frames > available)


def assign_buckets(infos: Sequence[MediaInfo], config: BucketsConfig, base: Bucket, fps: float | None) -> Buckets:
    """Assign every item to a bucket. Buckets with fewer than `least` items are closed one by one, the emptiest first."""
    shapes = config.shapes(base)
    while True:
        fits = [choose_bucket(info, shapes, fps) for info in infos]
        counts = np.bincount([fit.bucket for fit in fits], minlength=len(shapes))
        emptiest = min(np.flatnonzero(counts), key=lambda i: counts[i], default=None)
        if emptiest is None or counts[emptiest] >= config.least or np.count_nonzero(counts) == 1:
            return Buckets(shapes, fits, config, base)
        shapes = [shape for i, shape in enumerate(shapes) if i != emptiest]


@dataclass
class Buckets:
    """The bucket of each item of a source."""

    shapes: list[Bucket]
    fits: list[BucketFit]  # one per item
    config: BucketsConfig
    base: Bucket
    """data.frames × data.size: the shape in which samples are shown."""

    @cached_property
    def item_buckets(self) -> np.ndarray:
        """The number of each item's bucket."""
        return np.array([fit.bucket for fit in self.fits], np.int64)

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The items of each bucket, in their order."""
        return [np.flatnonzero(self.item_buckets == i) for i in range(len(self.shapes))]

    def shape(self, item: int) -> Bucket:
        return self.shapes[self.item_buckets[item]]

    def subset(self, items: Sequence[int] | np.ndarray) -> Buckets:
        """The same buckets for some of the items."""
        return Buckets(self.shapes, [self.fits[item] for item in items], self.config, self.base)

    def budget(self, batch_size: int) -> int:
        """Tokens per batch."""
        return self.config.budget or batch_size * self.config.tokens(self.base)

    def batch_sizes(self, batch_size: int) -> list[int]:
        """Clips per batch of each bucket; 0 for an empty one. Refuses a clip that exceeds the budget alone."""
        budget, tokens = self.budget(batch_size), self.config.tokens
        filled = [shape for shape, members in zip(self.shapes, self.members, strict=True) if len(members)]
        largest = max(filled, key=tokens, default=None)
        if largest is not None and (needed := tokens(largest)) > budget:
            limit = f"data.buckets.budget={self.config.budget}" if self.config.budget else f"{budget:,} tokens"
            origin = "" if self.config.budget else f" (train.batch_size={batch_size} clips of {self.base})"
            raise ConfigError(
                f"one clip of bucket {largest} has {needed:,} tokens, but a batch may hold {limit}{origin}: raise data.buckets.budget to {needed} "
                "or more, or remove such sizes from data.buckets"
            )
        return [
            budget // tokens(shape) if len(members) else 0
            for shape, members in zip(self.shapes, self.members, strict=True)
        ]

    def table(self, batch_size: int | None = None) -> list[dict[str, Any]]:
        """A JSON row per filled bucket. Without a batch size, batches are left out."""
        batch_sizes = self.batch_sizes(batch_size) if batch_size is not None else None
        table = []
        for i, (shape, members) in enumerate(zip(self.shapes, self.members, strict=True)):
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
            if batch_sizes is not None:
                row |= {"rows": batch_sizes[i], "batches_an_epoch": round(len(members) / batch_sizes[i], 2)}
            table.append(row)
        return table

    def lines(self, batch_size: int | None = None) -> list[str]:
        """The table as text."""
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
            text += f", {row['kept']:.0%} of the image kept"
            text += f", {row['enlarged']:,} enlarged" if row["enlarged"] else ""
            text += f", {row['padded']:,} too short and padded" if row["padded"] else ""
            lines.append(text)
        return lines


class BucketedSource(Source):
    """A source that can assign its items to buckets."""

    buckets: Buckets | None = None
    can_reshape: bool = True
    """Any item can be read in any shape; False for encoded items."""

    @abstractmethod
    def read_as(self, index: int, shape: Bucket, rng: np.random.Generator) -> Sample:
        """Read an item as a clip of this shape, whatever its bucket is. Raises Unreadable."""


def buckets_of(source: Source) -> Buckets | None:
    return source.buckets if isinstance(source, BucketedSource) else None


# Order ------------------------------------------------------------------------------------------------------------


class BucketOrder:
    """Step → bucket and items, as a pure function of (seed, step)."""

    def __init__(
        self,
        buckets: Buckets,
        seed: int,
        batch_size: int,
        resample: bool = False,
        shuffle: bool = True,
        shares: tuple[MixShare, ...] = (),
    ) -> None:
        self.buckets, self.seed, self.shuffle = buckets, seed, shuffle
        self.batch_sizes = buckets.batch_sizes(batch_size)
        self._filled = [i for i, members in enumerate(buckets.members) if len(members)]
        self._orders = {
            i: ItemOrder(
                len(buckets.members[i]),
                key_of(seed, "bucket", *buckets.shapes[i]),
                resample,
                shuffle,
                _shares_of(buckets.members[i], shares),
            )
            for i in self._filled
        }

    def _batches_after(self, epochs: int) -> list[int]:
        """Batches of each filled bucket in this many epochs."""
        return [-(-epochs * self._orders[i].epoch // self.batch_sizes[i]) for i in self._filled]

    def count_steps(self, epochs: float) -> int:
        """Batches in this many epochs."""
        whole = int(epochs)
        before, after = sum(self._batches_after(whole)), sum(self._batches_after(whole + 1))
        return before + math.ceil((epochs - whole) * (after - before))

    def epoch_of(self, step: int) -> int:
        """The last epoch that begins at or before a step."""
        high = 1
        while sum(self._batches_after(high)) <= step:
            high *= 2
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sum(self._batches_after(middle)) <= step else (low, middle)
        return low

    def batch_at(self, step: int) -> tuple[Bucket, np.ndarray]:
        """The step's bucket, and the items of its batch."""
        epoch = self.epoch_of(step)
        before, after = self._batches_after(epoch), self._batches_after(epoch + 1)
        position = step - sum(before)
        if self.shuffle:
            key = key_of(self.seed, "buckets", epoch)
            position = int(permute(np.array([position]), sum(after) - sum(before), key)[0])
        ends = np.cumsum(np.subtract(after, before))  # the epoch's batches, bucket by bucket
        which = int(np.searchsorted(ends, position, side="right"))
        bucket, batch = self._filled[which], after[which] - int(ends[which]) + position
        shape, members = self.buckets.shapes[bucket], self.buckets.members[bucket]
        positions = batch * self.batch_sizes[bucket] + np.arange(self.batch_sizes[bucket])
        return shape, members[self._orders[bucket].pick(positions)]


def _shares_of(members: np.ndarray, shares: tuple[MixShare, ...]) -> tuple[MixShare, ...]:
    """The part of a mix that lies in one bucket."""
    ends = np.cumsum([share.items for share in shares])
    counts = np.bincount(np.searchsorted(ends, members, side="right"), minlength=len(shares)).tolist() if shares else []
    return tuple(
        MixShare(count, -(-share.draws * count // share.items))
        for share, count in zip(shares, counts, strict=True)
        if count
    )
