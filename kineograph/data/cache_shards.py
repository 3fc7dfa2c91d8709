"""A cache in shards: folders of arrays, each with items of one shape, that several processes fill side by side.

shards.json says what the cache is made of, and with buckets.npy which item lies where; both follow from the data alone, so that every process
writes the same. A shard belongs to whoever holds its lock: the kernel gives it back when that process dies, and the next one goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from pydantic import Field

from kineograph.core.config import Config
from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_atomic
from kineograph.data.buckets import Bucket, Buckets, BucketsConfig, Fit
from kineograph.data.config import Split

SHARDS = "shards.json"
_PLACES = "buckets.npy"


class ShardList(Config):
    """What shards.json says."""

    key: str
    """Hash of content, preprocessing and codec."""
    count: int = Field(ge=1)
    """Items of all shards."""
    each: int = Field(ge=1)
    """Items a shard, at most."""
    split: Split = "train"
    shapes: tuple[tuple[int, int, int], ...] = ()
    """Of the buckets: frames, height, width. Empty: all items are alike."""
    usual: tuple[int, int, int] | None = None
    buckets: BucketsConfig | None = None


@dataclass(frozen=True)
class Shard:
    name: str  # of its folder
    items: np.ndarray  # their numbers in the source
    shape: Bucket | None  # that they are read as; None: all are alike


class Layout:
    """Which items lie in which shard."""

    def __init__(self, listed: ShardList, of: np.ndarray | None) -> None:
        self.listed, self._of = listed, of
        self.shards: list[Shard] = []
        groups = (
            [np.arange(listed.count)] if of is None else [np.flatnonzero(of == b) for b in range(len(listed.shapes))]
        )
        for place, items in enumerate(groups):
            shape = Bucket(*listed.shapes[place]) if of is not None else None
            for start in range(0, len(items), listed.each):
                self.shards.append(Shard(f"shard-{len(self.shards):05d}", items[start : start + listed.each], shape))

    @property
    def buckets(self) -> Buckets | None:
        listed = self.listed
        if self._of is None or listed.usual is None or listed.buckets is None:
            return None
        fits = [Fit(int(bucket), 1.0, False, False) for bucket in self._of]
        return Buckets([Bucket(*shape) for shape in listed.shapes], fits, listed.buckets, Bucket(*listed.usual))

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Shard and row of each item."""
        shards, rows = np.empty(self.listed.count, np.int64), np.empty(self.listed.count, np.int64)
        for number, shard in enumerate(self.shards):
            shards[shard.items], rows[shard.items] = number, np.arange(len(shard.items))
        return shards, rows


def read_layout(folder: Path) -> Layout | None:
    """None where there is no cache in shards."""
    try:
        listed = ShardList.model_validate(json.loads((folder / SHARDS).read_text(encoding="utf-8")))
        of = np.load(folder / _PLACES, allow_pickle=False) if listed.shapes else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise InputError(f"{folder / SHARDS} cannot be read: {error}; remove the folder to build it anew") from None
    return Layout(listed, of)


def lay_out(folder: Path, listed: ShardList, buckets: Buckets | None) -> Layout:
    """Begin a cache, or go on with one. Whoever comes first writes the list; it would be the same from any process."""
    found = read_layout(folder)
    if found is not None:
        if found.listed != listed:
            raise InputError(f"{folder} holds another cache: choose another folder or remove it")
        return found
    folder.mkdir(parents=True, exist_ok=True)
    if buckets is not None:
        temporary = folder / f".{_PLACES}.{os.getpid()}.npy"
        np.save(temporary, buckets.of.astype(np.int16))
        os.replace(temporary, folder / _PLACES)
    write_atomic(folder / SHARDS, listed.model_dump_json(indent=1))
    return Layout(listed, buckets.of if buckets is not None else None)


def hold(folder: Path, alone: bool = False) -> IO[bytes] | None:
    """Keep a cache in shards from being removed for as long as the file is open; `alone`: no one else holds it either. None where that cannot be."""
    try:
        file = open(folder / SHARDS, "r+b" if alone else "rb")  # noqa: SIM115 (whoever asked closes it)
    except OSError:
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether this process has the shard to itself until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a record lock: forked workers do not keep it
        except OSError:
            yield False
            return
        yield True
