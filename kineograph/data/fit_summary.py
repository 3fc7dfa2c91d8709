"""What the config makes of the files: the shares of items that are padded, cropped, enlarged or turned gray, and the keys that change it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from kineograph.core.errors import Unreadable
from kineograph.core.protocols import Source
from kineograph.data.buckets import Bucket, MediaInfo, buckets_of
from kineograph.data.media_config import MediaConfig
from kineograph.data.mix import MixConfig
from kineograph.data.open_source import DataConfig

_SAMPLE, _COLOUR_SAMPLE = 256, 32  # items
_SECONDS = 5.0  # for each of both samples
_THREADS = 8
_CUT = 0.2  # share of the picture's area outside the crop
T = TypeVar("T")


class MeasuresItems(ABC):
    """A source of files or arrays, whose items can be compared with what is read of them."""

    @abstractmethod
    def measure(self, index: int) -> MediaInfo:
        """Size and length of an item as it is stored. Raises Unreadable."""

    @abstractmethod
    def is_coloured(self, index: int) -> bool:
        """Whether an item has colours. Raises Unreadable."""


def has_colour(pixels: np.ndarray) -> bool:
    """Whether more than 1 in 1,000 pixels of … 3 are not gray; compression changes gray by a few levels."""
    return bool((np.ptp(pixels.astype(np.int16), axis=-1) > 24).mean() > 1e-3)


def measure_sample(source: Source) -> list[tuple[int, MediaInfo]]:
    """Number and size of up to 256 evenly spaced items, as many as a few seconds allow; without those that cannot be read."""
    if not isinstance(source, MeasuresItems) or not len(source):
        return []
    return _map_readable(source.measure, _sample_indices(len(source), _SAMPLE))


def summarise_fit(source: Source, config: DataConfig) -> list[str]:
    """Lines about what a sample of the items loses; none if it loses nothing, or if the items cannot be measured."""
    if source.parts and isinstance(config, MixConfig):
        configs = config.part_configs()
        return [f"{name}: {line}" for name, part in source.parts.items() for line in summarise_fit(part, configs[name])]
    measured = measure_sample(source)
    if not measured or not isinstance(source, MeasuresItems) or "pixels" not in source.fields:
        return []
    indices = _sample_indices(len(source), _SAMPLE)
    buckets = buckets_of(source)
    base = Bucket(config.frames, *config.size)
    losses = [_find_losses(info, buckets.shape(index) if buckets else base, config) for index, info in measured]
    lines = [
        f"  {_percent(sum(key in found for found in losses), len(losses))} {text}"
        for key, text in _describe_losses(config).items()
        if any(key in found for found in losses)
    ]
    if config.channels <= 2:
        coloured = [
            found for _, found in _map_readable(source.is_coloured, indices[:: -(-len(indices) // _COLOUR_SAMPLE)])
        ]
        if any(coloured):
            lines.append(
                f"  {_percent(sum(coloured), len(coloured))} turned gray: in colour, and data.channels={config.channels}; "
                f"set data.channels={config.channels + 2}"
            )
    count = f"{len(measured)} of {len(source)} items" if len(measured) < len(source) else f"{len(source)} items"
    return [f"what data.* makes of the items ({count} measured):", *lines] if lines else []


def _find_losses(info: MediaInfo, shape: Bucket, config: DataConfig) -> set[str]:
    losses = set()
    if shape.frames > 1 and not info.seconds:
        losses.add("still")
    elif config.frames == 1 and info.frames > 1:
        losses.add("clip")
    elif info.frames_at(config.fps) < shape.frames:
        losses.add("padded")
    resize, crop = (config.resize, config.crop) if isinstance(config, MediaConfig) else ("cover", "center")
    scales = shape.width / info.width, shape.height / info.height
    if resize == "cover" and crop == "center" and min(scales) / max(scales) < 1 - _CUT:
        losses.add("cropped")
    if (min(scales) if resize == "contain" else max(scales)) > 1:
        losses.add("enlarged")
    return losses


def _describe_losses(config: DataConfig) -> dict[str, str]:
    """Loss → its line: what happens, and the key that changes it."""
    size = f"data.size={config.size[0]} × {config.size[1]}"
    keeps = (
        "data.resize=contain, another data.size or data.buckets"
        if isinstance(config, MediaConfig)
        else "another data.size"
    )
    rate, remedy = "", "lower data.frames"
    if config.fps is not None:
        rate, remedy = f" at data.fps={config.fps:g}", "lower data.frames, or raise data.fps"
    return {
        "padded": f"padded: shorter than data.frames={config.frames}{rate}; {remedy}",
        "still": f"single pictures: one real frame of data.frames={config.frames}; set data.frames=1, or give clips",
        "clip": "clips, of which one frame at a time is used: data.frames=1; a generator of clips needs more",
        "cropped": f"cropped: more than {_CUT:.0%} of the picture lies outside {size}; {keeps} keeps more of it",
        "enlarged": f"enlarged: smaller than {size}; lower data.size",
    }


def _sample_indices(count: int, limit: int) -> list[int]:
    """Up to `limit` indices, evenly spaced."""
    return sorted({int(index) for index in np.linspace(0, count - 1, min(count, limit))})


def _map_readable(function: Callable[[int], T], indices: Sequence[int]) -> list[tuple[int, T]]:
    """(index, result) of the items that can be read, as many as the time allows."""
    end = time.monotonic() + _SECONDS

    def try_item(index: int) -> list[tuple[int, T]]:
        if time.monotonic() > end:
            return []
        try:
            return [(index, function(index))]
        except Unreadable:  # counted elsewhere
            return []

    with ThreadPoolExecutor(_THREADS) as pool:
        return [pair for found in pool.map(try_item, indices) for pair in found]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if part * 100 >= whole else "under 1%"
