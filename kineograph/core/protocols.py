"""Protocols between the parts: what a codec, a text encoder and a data source promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from kineograph.core.batch import Sample


class Codec(Protocol):
    """Pixels ⇄ tokens or latents. A generator derives its vocabulary and sequence shape from its codec."""

    vocabulary: int | None  # number of codes; None for continuous latents

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → B t h w, int64 tokens (or float latents B t c h w)."""

    def decode(self, tokens: Tensor) -> Tensor:
        """B t h w → B T C H W, clamped to [0, 1]."""

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        """B T → B t: which tokens' times hold a real frame, for clips that end before the batch's longest."""

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Tokens (t, h, w) of a clip; a ConfigError says which sizes fit when this one does not."""


class TextEncoder(Protocol):
    """Captions → embeddings, with an explicit null for classifier-free guidance."""

    width: int
    length: int

    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """→ embeddings B L D, mask B L (True = a real token), on the encoder's device."""

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the rows where `dropped` (B, bool) by the null text."""


class Source(Protocol):
    """index → sample. `read` is a pure function of (index, the state of rng), so any process can read any item."""

    def __len__(self) -> int:
        """Items of this split. An endless source answers a large number."""

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Decode one item; `rng` drives random crops and starts. Raises Unreadable."""

    def caption(self, index: int) -> str | None:
        """Its caption, without decoding."""

    def identity(self, index: int) -> str:
        """A stable name (path, shard:key, digits-17): what splits are hashed from and skipped.jsonl lists."""


class Stream(Protocol):
    """What a source has besides, when its items can only be read one after another: the loader then asks for records in place of
    numbered items. It is as long as anyone wants."""

    def records(
        self, seed: int, reader: int, readers: int, begun: int, skipped: dict[str, str]
    ) -> Iterator[tuple[int, Any]]:
        """Reader `reader` of `readers`: (number of its shard, encoded sample), from its shard number `begun` on. What cannot be
        read goes into `skipped`: name → reason."""

    def decode(self, record: Any, rng: np.random.Generator) -> Sample:
        """Raises Unreadable."""
