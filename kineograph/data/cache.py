"""Tokens, latents or image embeddings (and text embeddings) made once and read in place: what a generator trains on without its codec.

A cache is a folder: cache.json (the header), tokens.npy, latents.npy or image_embed.npy, captions.jsonl ({identity, caption} a line), and
where they were given text_embed.npy, text_embeds.npy, text_mask.npy, frame_mask.npy and fps.npy. Or a folder of such folders, one a split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from kineograph.core.batch import Sample
from kineograph.core.config import Config
from kineograph.core.errors import InputError, Unreadable
from kineograph.data.arrays import Array, find_array, lines_beside
from kineograph.data.config import DataConfig, Split
from kineograph.data.split import Part, select

HEADER = "cache.json"
KINDS = ("tokens", "latents", "image_embed")  # the one that an item is made of
EXTRA = ("image_embed", "text_embed")  # go into Sample.extra
FIELDS = ("tokens", "latents", *EXTRA, "text_embeds", "text_mask", "frame_mask", "fps")


class Header(Config):
    """What cache.json says."""

    kind: Literal["tokens", "latents", "image_embed"]
    count: int = Field(ge=1)
    """Items that belong in it."""
    done: int = 0
    """Items that are in it."""
    shape: tuple[int, ...]
    """Of one item's tokens (t, h, w), latents or image embedding."""
    vocabulary: int | None = None
    key: str = ""
    """Hash of content, preprocessing and codec: a cache with another key is another cache."""
    codec: str = ""
    """Hash of the codec's weights."""
    split: Split | None = None
    """null: items of all splits, told apart by their identities."""
    arrays: dict[str, str] = Field(default_factory=dict)
    """Fields and their types on disk."""

    @property
    def complete(self) -> bool:
        return self.done == self.count


def smallest_integer(vocabulary: int) -> str:
    """The smallest unsigned type that holds 0 … vocabulary − 1."""
    return next(
        kind for kind in ("uint8", "uint16", "uint32", "uint64") if vocabulary <= 2 ** (8 * np.dtype(kind).itemsize)
    )


def read_header(folder: Path) -> Header | None:
    """None where there is no cache."""
    try:
        tree = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        return Header.model_validate({name: value for name, value in tree.items() if name != "complete"})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise InputError(
            f"{folder / HEADER} is not a cache header: {error}; remove the folder to build it anew"
        ) from None


# Reading ----------------------------------------------------------------------------------------------------------


class CacheConfig(DataConfig):
    source: str = "cache"
    folder: str
    """A cache's folder; or someone else's array of codebook ids (.npy or raw) with `vocabulary` and `tokens_shape`."""
    vocabulary: int | None = Field(None, ge=1)
    """Number of codes in a foreign array."""
    tokens_shape: tuple[int, int, int] | None = None
    """t, h, w of one item in a foreign array; an item may be stored flat."""
    array_shape: tuple[int, ...] | None = None
    """Of a raw foreign file: items first."""
    array_dtype: str = "int64"
    """Of a raw foreign file."""


class Cache:
    Config = CacheConfig

    def __init__(
        self, config: CacheConfig, header: Header, arrays: dict[str, Array], rows: list[tuple[str, str]], part: Part
    ) -> None:
        self.config, self.header, self.arrays, self._rows = config, header, arrays, rows
        self.indices, self.note = part
        self.gives = frozenset(arrays)

    @classmethod
    def open(cls, config: CacheConfig, split: Split, seed: int) -> Cache:
        folder = Path(config.folder).expanduser()
        by_split = folder / ("train" if split == "validation" and not (folder / split / HEADER).exists() else split)
        if not (folder / HEADER).exists() and (by_split / HEADER).exists():
            folder = by_split
        header = read_header(folder)
        if header is None:
            return cls._foreign(config, split)
        if not header.complete:
            raise InputError(
                f"the cache {folder} is unfinished ({header.done} of {header.count} items): run the command that made it again"
            )
        arrays = {name: Array.npy(folder / f"{name}.npy") for name in header.arrays}
        for array in arrays.values():
            if array.shape[0] != header.count:
                raise InputError(
                    f"{array.path} has {array.shape[0]} items and {folder / HEADER} says {header.count}: remove {folder} to build it anew"
                )
        rows = _read_rows(folder / "captions.jsonl")
        if len(rows) != header.count:
            raise InputError(
                f"{folder / 'captions.jsonl'} has {len(rows)} lines and {folder / HEADER} says {header.count}: remove {folder} to build it anew"
            )
        if header.split is None:
            part = select([identity for identity, _ in rows], split, config)
        elif header.split == split:
            part = Part(np.arange(header.count))
        elif split == "validation" and header.split == "train":
            part = Part(np.arange(header.count), f"validating on training data: {folder} caches no validation split")
        else:
            raise InputError(f"the cache {folder} holds the {header.split} split, and {split} is asked for")
        return cls(config, header, arrays, rows, part)

    @classmethod
    def _foreign(cls, config: CacheConfig, split: Split) -> Cache:
        array = find_array(
            config.folder, ("tokens", "indices", "video_codebook_ids"), config.array_shape, config.array_dtype
        )
        if config.vocabulary is None or config.tokens_shape is None:
            raise InputError(
                f"{array.path} is not a cache of ours (no {HEADER} beside it): set data.vocabulary and data.tokens_shape=[t, h, w] to read it as codebook ids"
            )
        if array.dtype.kind not in "iu":
            raise InputError(f"{array.path} holds {array.dtype}: codebook ids are integers")
        count, each, needed = array.shape[0], int(np.prod(array.shape[1:])), int(np.prod(config.tokens_shape))
        if each != needed:
            raise InputError(
                f"{array.path} has {each} ids an item (shape {array.shape}), and data.tokens_shape={list(config.tokens_shape)} needs {needed}"
            )
        for rows in (slice(0, 256), slice(max(count - 256, 0), count)):  # the rest is looked at when it is read
            low, high = int(array.values[rows].min()), int(array.values[rows].max())
            if low < 0 or high >= config.vocabulary:
                raise InputError(
                    f"{array.path} holds ids from {low} to {high}, and data.vocabulary={config.vocabulary} allows 0 to {config.vocabulary - 1}"
                )
        captions = lines_beside(array.path)
        if captions is not None and len(captions) != count:
            raise InputError(f"{array.path} has {count} items and there are {len(captions)} captions beside it")
        header = Header(
            kind="tokens",
            count=count,
            done=count,
            shape=config.tokens_shape,
            vocabulary=config.vocabulary,
            arrays={"tokens": str(array.dtype)},
        )
        names = [f"{array.path.name}:{number}" for number in range(count)]
        return cls(
            config,
            header,
            {"tokens": array},
            list(zip(names, captions or [""] * count, strict=True)),
            select(names, split, config),
        )

    def expect(
        self, vocabulary: int | None = None, shape: tuple[int, ...] | None = None, key: str | None = None
    ) -> None:
        """Refuse a cache that was made by another codec or for another clip."""
        header = self.header
        if vocabulary is not None and header.vocabulary != vocabulary:
            self._refuse(f"holds ids of {header.vocabulary} codes, and the codec has {vocabulary}")
        if shape is not None and header.shape != tuple(shape):
            self._refuse(
                f"holds items of shape {header.shape}, and {tuple(shape)} is needed: data.frames or data.size changed"
            )
        if key is not None and header.key and header.key != key:
            self._refuse("was made from other data, preprocessing or codec weights")

    def _refuse(self, why: str) -> None:
        raise InputError(f"the cache {self.config.folder} {why}; build it anew with kineo cache")

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        number = int(self.indices[index])
        values = {name: np.asarray(array.values[number]) for name, array in self.arrays.items()}
        sample = Sample(
            caption=self.caption(index), fps=float(values.pop("fps")) if "fps" in values else self.config.shape.fps
        )
        for name, value in values.items():
            if name == "tokens":
                value = value.reshape(self.header.shape).astype(np.int64)
                if value.min() < 0 or value.max() >= (self.header.vocabulary or 0):
                    raise Unreadable(
                        self.identity(index),
                        f"ids from {value.min()} to {value.max()} in a vocabulary of {self.header.vocabulary}",
                    )
            elif value.dtype != bool:
                value = value.astype(np.float32)
            read = torch.from_numpy(value.copy() if not value.flags.writeable else value)
            if name in EXTRA:
                sample.extra[name] = read
            else:
                setattr(sample, name, read)
        return sample

    def caption(self, index: int) -> str | None:
        return self._rows[self.indices[index]][1] or None

    def identity(self, index: int) -> str:
        return self._rows[self.indices[index]][0]

    def missing_captions(self) -> list[str]:
        if "text_embeds" in self.arrays or "text_embed" in self.arrays:
            return []
        return [self.identity(index) for index in range(len(self)) if self.caption(index) is None]


def _read_rows(path: Path) -> list[tuple[str, str]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(row["identity"], row.get("caption") or "") for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


SOURCE = Cache
