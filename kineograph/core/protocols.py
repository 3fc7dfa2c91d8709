"""The interfaces of a text encoder and of a data source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor, nn

from kineograph.core.batch import Sample
from kineograph.core.caption_format import Captioning
from kineograph.core.config import Config as BaseConfig


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

    def count_cut(self, captions: list[str]) -> int | None:
        """How many captions have more tokens than `length`; None if nothing can tell."""
        return None

    def assets(self) -> dict[str, str]:
        """Text that a rebuild needs beside the weights, such as a learned vocabulary."""
        return {}

    def compile_targets(self) -> list[nn.Module]:
        """Modules that run in every training step and are worth compiling."""
        return []

    def release(self) -> None:
        """Free the memory of weights that can be loaded again."""


class MixShare(NamedTuple):
    """One part of a mix, whose items follow those of the part before it."""

    items: int
    draws: int
    """Samples of it in an epoch of the mix."""


class Source(ABC):
    """Maps an index to a sample. `read` is a pure function of (index, the state of rng), so any process can read any item.

    A source extends this class; attributes and methods with a default are optional. To be opened by name it also has a class method
    `open(config, split, seed)`, where `config` is of its class `Config`.
    """

    Config: ClassVar[type[BaseConfig]]
    fields: frozenset[str] = frozenset({"pixels"})
    """Fields that every sample has besides its caption."""
    skipped: Mapping[str, str] = MappingProxyType({})
    """Items that were found unusable when the source was opened: identity → reason."""
    note: str | None = None
    """A line for the log."""
    resample: bool = False
    """Draw items with replacement instead of each once per epoch."""
    shuffle: bool = True
    """Train on the items in a new random order in every epoch; False: in their own order."""
    parts: Mapping[str, Source] = MappingProxyType({})
    """The sources of a mix by name, whose items follow each other; empty: not a mix."""
    shares: tuple[MixShare, ...] = ()
    """How often a mix draws from each of its parts; empty: every item comes once per epoch."""
    pad_to_frames: int = 0
    """Pad every batch to at least this many frames, where items differ in length."""
    is_user_dataset: bool = False
    """Wraps a user's own object: forked workers inherit it, and nothing detects that its content has changed."""
    captioning: Captioning = Captioning()
    """How samples get their captions from the texts of their items."""
    has_loss_masks: bool = False
    """Samples say which part of them counts in the loss."""
    caption_help: str = (
        "put a .txt beside each, or list them in metadata.jsonl (file_name, text), labels/ or prompts.txt + videos.txt; "
        "kineo data check shows what was found"
    )
    """How to add missing captions, for an error message."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of items in this split; large for an endless source."""

    @abstractmethod
    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Decode one item; `rng` drives random crops and starts. Raises Unreadable."""

    @abstractmethod
    def caption(self, index: int) -> str | None:
        """The item's caption (the first of several), without decoding the item."""

    def captions(self, index: int) -> Sequence[str]:
        """All captions of the item, the one of `caption` first; empty if it has none."""
        text = self.caption(index)
        return (text,) if text else ()

    def has_several_captions(self) -> bool:
        """Whether some items have several captions, of which training draws one each time. May read all captions."""
        return any(len(self.captions(index)) > 1 for index in range(len(self)))

    def formatted_captions(self, index: int) -> list[str]:
        """Every caption that training may give the item, with tags in the order of the data."""
        form, texts = self.captioning.at(index), self.captions(index)
        captions = [form.format(text) for text in texts or (None,)]
        return [caption for caption in captions if caption]

    @abstractmethod
    def identity(self, index: int) -> str:
        """A stable name (path, shard:key, digits-17): splits hash it and skipped.jsonl lists it."""

    def list_missing_captions(self) -> list[str]:
        """Identities of the items without a caption."""
        return []

    def fingerprint(self) -> str | None:
        """A digest that changes when the files or the way to read them change; None if nothing can tell."""
        return None

    def items_digest(self) -> str | None:
        """A digest of the items' names and sizes, the same wherever their files lie; None if nothing can tell."""
        return None

    def item_states(self) -> list[str] | None:
        """Per item, a text that changes when its file or caption changes; None if nothing can tell."""
        return None


class Stream(Source):
    """A source whose items can only be read one after another, without end: the loader calls `records` instead of `read`."""

    @abstractmethod
    def records(
        self, seed: int, reader: int, readers: int, first_shard: int, skipped: dict[str, str]
    ) -> Iterator[tuple[int, Any]]:
        """Yield (shard number, encoded sample) for reader `reader` of `readers`, from its shard number `first_shard` on.

        Unreadable items are added to `skipped`: identity → reason.
        """

    @abstractmethod
    def decode(self, record: Any, rng: np.random.Generator) -> Sample:
        """Decode one record. Raises Unreadable."""
