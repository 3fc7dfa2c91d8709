"""Tokens, latents or image embeddings (and text embeddings) made once and read in place: what a generator trains on without its codec.

A cache is a folder: cache.json (the header), tokens.npy, latents.npy or image_embed.npy, captions.jsonl ({identity, caption} a line), and
where they were given text_embed.npy, text_embeds.npy, text_mask.npy, first_frame.npy, frame_mask.npy and fps.npy. Or a folder of such folders: shards of one
cache (cache_shards.py), or one for each split.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from kineograph.core.batch import Sample
from kineograph.core.config import Config
from kineograph.core.errors import InputError, Unreadable
from kineograph.data.arrays import Array, find_array, lines_beside
from kineograph.data.buckets import Bucket
from kineograph.data.cache_shards import SHARDS, Layout, hold, read_layout
from kineograph.data.config import DataConfig, Split
from kineograph.data.split import Part, select

HEADER = "cache.json"
BF16 = "bfloat16"  # kept as uint16, since NumPy has no such type
_OPEN_BLOCKS = 64  # folders of arrays that are held open
KINDS = ("tokens", "latents", "image_embed")  # the one that an item is made of
EXTRA = ("image_embed", "text_embed", "first_frame")  # go into Sample.extra
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
    """Hash of the weights of the codec that made its tokens or latents."""
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


@dataclass
class Block:
    """One folder of arrays: a whole cache, or a shard of one."""

    header: Header
    arrays: dict[str, Array]

    @staticmethod
    def open(folder: Path) -> tuple[Block, list[tuple[str, str]]]:
        """And the identity and caption of each item."""
        header = read_header(folder)
        if header is None or not header.complete:
            done = f"{header.done} of {header.count} items" if header is not None else "not begun"
            raise InputError(f"the cache {folder} is unfinished ({done}): run the command that made it again")
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
        return Block(header, arrays), rows

    def read(self, row: int, identity: str) -> dict[str, Tensor]:
        """The fields of one item, raising Unreadable for ids that no code has."""
        found = {}
        for name, array in self.arrays.items():
            value = np.array(array.values[row])  # a copy
            if name == "tokens":
                value = value.reshape(self.header.shape).astype(np.int64)
                if value.min() < 0 or value.max() >= (self.header.vocabulary or 0):
                    raise Unreadable(
                        identity, f"ids from {value.min()} to {value.max()} in a vocabulary of {self.header.vocabulary}"
                    )
            elif self.header.arrays[name] == BF16:
                found[name] = torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).float()
                continue
            elif name != "first_frame" and value.dtype != bool:
                value = value.astype(np.float32)
            found[name] = torch.from_numpy(value)
        return found

    def close(self) -> None:
        for array in self.arrays.values():
            array.close()


class Cache:
    Config = CacheConfig

    def __init__(
        self,
        config: CacheConfig,
        blocks: list[Block],
        rows: list[tuple[str, str]],
        part: Part,
        layout: Layout | None = None,
    ) -> None:
        """`rows` are identities and captions, in the order of the items; without a layout there is one block, in that order."""
        self.config, self.blocks, self._rows = config, blocks, rows
        self.indices, self.note = part
        self.gives = frozenset(blocks[0].arrays)
        self._places = layout.places() if layout is not None else None
        self._shapes = [shard.shape for shard in layout.shards] if layout is not None else [None]
        buckets = layout.buckets if layout is not None else None
        self.buckets = buckets.only(self.indices) if buckets is not None else None
        self.reshapes = False  # an item has the shape that it was encoded in
        self._reading: IO[bytes] | None = None  # held, so that nobody removes what is read
        self._open: OrderedDict[int, None] = OrderedDict()  # blocks whose files are open, the one used last at the end

    @property
    def header(self) -> Header:
        return self.blocks[0].header

    @classmethod
    def open(cls, config: CacheConfig, split: Split, seed: int) -> Cache:
        folder = Path(config.folder).expanduser()
        by_split = folder / ("train" if split == "validation" and not _is_cache(folder / split) else split)
        if not _is_cache(folder) and _is_cache(by_split):
            folder = by_split
        layout = read_layout(folder)
        if layout is None and read_header(folder) is None:
            return cls._foreign(config, split)
        blocks, rows, there = cls._opened(folder, layout)
        if there is None:
            part = select([identity for identity, _ in rows], split, config)
        elif there == split:
            part = Part(np.arange(len(rows)))
        elif split == "validation" and there == "train":
            part = Part(np.arange(len(rows)), f"validating on training data: {folder} caches no validation split")
        else:
            raise InputError(f"the cache {folder} holds the {there} split, and {split} is asked for")
        source = cls(config, blocks, rows, part, layout)
        source._reading = hold(folder)
        return source

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reading": None}  # workers end before the process that they read for

    @staticmethod
    def _opened(folder: Path, layout: Layout | None) -> tuple[list[Block], list[tuple[str, str]], Split | None]:
        """Blocks, all items' identities and captions, and the split that they are of."""
        if layout is None:
            block, rows = Block.open(folder)
            return [block], rows, block.header.split
        rows = [("", "")] * layout.listed.count
        blocks = []
        for shard in layout.shards:
            block, own = Block.open(folder / shard.name)
            if len(own) != len(shard.items):
                raise InputError(
                    f"{folder / shard.name} has {len(own)} items where {len(shard.items)} belong: remove it to build it anew"
                )
            blocks.append(block)
            for item, row in zip(shard.items.tolist(), own, strict=True):
                rows[item] = row
        return blocks, rows, layout.listed.split

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
            [Block(header, {"tokens": array})],
            list(zip(names, captions or [""] * count, strict=True)),
            select(names, split, config),
        )

    def expect(
        self,
        vocabulary: int | None = None,
        shape: tuple[int, ...] | None = None,
        key: str | None = None,
        codec: tuple[str, str] | None = None,
    ) -> None:
        """Refuse a cache that was made by another codec (`codec`: where it lies, and the hash of its weights) or for another clip."""
        for block in self.blocks:
            header = block.header
            if vocabulary is not None and header.vocabulary != vocabulary:
                self._refuse(f"holds ids of {header.vocabulary} codes, and the codec has {vocabulary}")
            if shape is not None and header.shape != tuple(shape):
                self._refuse(
                    f"holds items of shape {header.shape}, and {tuple(shape)} is needed: data.frames or data.size changed"
                )
            if key is not None and header.key and header.key != key:
                self._refuse("was made from other data, preprocessing or codec weights")
            if codec is not None and header.codec and header.codec != codec[1]:
                self._refuse(
                    f"was encoded by other weights ({header.codec[:12]}) than the codec {codec[0]} has ({codec[1][:12]}), "
                    "for which its numbers mean something else: name the codec that made it, or"
                )

    def expect_grid(self, shape_for: Callable[[int, int, int], tuple[int, int, int]]) -> None:
        """Refuse tokens or latents whose t h w are not what a codec makes of their clips: `shape_for` says what it makes."""
        for block, shape in zip(self.blocks, self._shapes, strict=True):
            clip = shape or (self.config.frames, *self.config.size)
            if not _holds(block.header.shape, shape_for(*clip)):
                self._refuse(
                    f"holds items of shape {block.header.shape}, and the codec makes t h w = {shape_for(*clip)} of {' × '.join(map(str, clip))}"
                )

    def _refuse(self, why: str) -> None:
        raise InputError(
            f"the cache {self.config.folder} {why}{'' if why.endswith(' or') else ';'} build it anew with kineo cache"
        )

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        item = int(self.indices[index])
        number, row = (0, item) if self._places is None else (int(self._places[0][item]), int(self._places[1][item]))
        values = self._block(number).read(row, self.identity(index))
        sample = Sample(
            caption=self.caption(index), fps=float(values.pop("fps")) if "fps" in values else self.config.shape.fps
        )
        for name, value in values.items():
            if name in EXTRA:
                sample.extra[name] = value
            else:
                setattr(sample, name, value)
        return sample

    def read_as(self, index: int, shape: Bucket, rng: np.random.Generator) -> Sample:
        if self.buckets is not None and self.buckets.shape(index) != shape:
            raise Unreadable(self.identity(index), f"encoded as {self.buckets.shape(index)}, not as {shape}")
        return self.read(index, rng)

    def _block(self, number: int) -> Block:
        """Its files are open; those of the block used longest ago are closed where there are many."""
        self._open[number] = None
        self._open.move_to_end(number)
        if len(self._open) > _OPEN_BLOCKS:
            self.blocks[self._open.popitem(last=False)[0]].close()
        return self.blocks[number]

    def caption(self, index: int) -> str | None:
        return self._rows[self.indices[index]][1] or None

    def identity(self, index: int) -> str:
        return self._rows[self.indices[index]][0]

    def missing_captions(self) -> list[str]:
        if self.gives & {"text_embeds", "text_embed"}:
            return []
        return [self.identity(index) for index in range(len(self)) if self.caption(index) is None]


def _is_cache(folder: Path) -> bool:
    return (folder / HEADER).exists() or (folder / SHARDS).exists()


def _holds(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether an item's axes are those of the grid, in order, wherever its channels stand."""
    axes = iter(shape)
    return all(side in axes for side in grid)


def _read_rows(path: Path) -> list[tuple[str, str]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(row["identity"], row.get("caption") or "") for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


SOURCE = Cache
