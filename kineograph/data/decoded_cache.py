"""Decoded items kept in memory: a small set is read hundreds of times, and decoding would take as long as the model's steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kineograph.core.errors import Unreadable
from kineograph.core.memory import main_memory
from kineograph.core.protocols import Source
from kineograph.data.decode import Clip, LoadedMedia, decode_media, load_media
from kineograph.data.media_config import DecodeOptions

_SHARE = 0.25  # of the free memory, over all processes of a machine
_MAX_FRAMES = 20_000  # of a set: whole clips are decoded, of which a step may need a few frames


class DecodedSize(NamedTuple):
    """What all items of a source take when they are decoded."""

    bytes: int
    frames: int


class KeepsDecoded(ABC):
    """A source that can keep its decoded items in memory."""

    @abstractmethod
    def estimate_decoded(self, limit: int) -> DecodedSize | None:
        """From the headers of a sample; None if it cannot be measured, or takes more than `limit` bytes anyway."""

    @abstractmethod
    def keep_decoded(self, limit: int) -> None:
        """Keep items from now on, up to this many bytes in each process that reads."""


def keep_if_small(source: Source, readers: int) -> str | None:
    """Let a source keep its items if all fit into a quarter of the free memory. → a line for the log; None: they are not kept."""
    if not isinstance(source, KeepsDecoded):
        return None
    limit = int(main_memory().available * _SHARE) // max(readers, 1)
    size = source.estimate_decoded(limit)
    if size is None or size.bytes > limit or size.frames > _MAX_FRAMES:
        return None
    source.keep_decoded(limit)
    each = f" in each of {readers} processes" if readers > 1 else ""
    return (
        f"{len(source):,} items are kept decoded in memory, about {max(size.bytes / 2**20, 1):,.0f} MB{each}; "
        "train.keep_decoded=false decodes them in every epoch"
    )


class DecodedCache:
    """Files by path and options. Each process has its own: a copy in another process begins empty."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._kept: dict[tuple, LoadedMedia | None] = {}

    def decode(self, path: Path, name: str, options: DecodeOptions, rng: np.random.Generator) -> Clip:
        """As `decode_media`, from memory after the first time. Raises Unreadable."""
        key = (str(path), options.resize_crop.size, options.frames, options.channels, options.span, options.trim)
        if key not in self._kept:
            self._kept[key] = self._load(path, name, options)
        media = self._kept[key]
        if media is None:
            return decode_media(path, path.suffix, name, options, rng)
        return media.draw(options, rng)

    def _load(self, path: Path, name: str, options: DecodeOptions) -> LoadedMedia | None:
        if self.used >= self.limit:
            return None
        try:
            media = load_media(path, path.suffix, name, options, self.limit - self.used)
        except Unreadable:  # it does not fit, or a part of it may still be readable
            return None
        self.used += media.nbytes
        return media

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "used": 0, "_kept": {}}
