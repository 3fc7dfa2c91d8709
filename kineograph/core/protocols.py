"""What a text encoder, a CLIP and a data source promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from kineograph.core.batch import Sample


class TextEncoder(nn.Module):
    """Captions → embeddings, with an explicit null for classifier-free guidance."""

    # Channels of an embedding.
    width: int
    # Tokens a caption.
    length: int
    # Trained with the model, so that embeddings cannot be computed beforehand.
    trained: bool
    # False: embeddings come with the data only.
    reads_captions: bool

    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """→ embeddings B L D, mask B L (True = a real token), on the encoder's device."""
        raise NotImplementedError

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the rows where `dropped` (B, bool) by the null text."""
        raise NotImplementedError

    def assets(self) -> dict[str, str]:
        """Text that a rebuild needs beside the weights, such as a learned vocabulary."""
        return {}

    def compile_targets(self) -> list[nn.Module]:
        """Modules that run in every training step and are worth compiling."""
        return []

    def release(self) -> None:
        """Free the memory of weights that can be loaded again."""


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
