"""What a cache's items were when they were encoded, so that a later cache takes over those that stayed as they were.

facts.json says what an encoded item depends on besides itself; items.npy holds a digest of each item (its name, the state of its file, its caption
and the shape that it is read as). Both are written before shards.json: a cache that has that file has these.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_atomic
from kineograph.data.arrays import Array
from kineograph.data.buckets import Bucket
from kineograph.data.cache import Block, read_header
from kineograph.data.cache_shards import Layout, read_layout
from kineograph.data.cache_writer import STAND_IN, StoredRow

FACTS = "facts.json"
ITEMS = "items.npy"
_BYTES = 16  # a digest
_OPEN = 32  # shards of earlier caches that are held open


def digests_of(states: Sequence[str], shapes: Sequence[Bucket]) -> np.ndarray:
    """N 16, uint8: of each item, its state and the shape that it is read as."""
    found = np.empty((len(states), _BYTES), np.uint8)
    for place, (state, shape) in enumerate(zip(states, shapes, strict=True)):
        text = f"{shape}\0{state}".encode("utf-8", "surrogatepass")
        found[place] = np.frombuffer(hashlib.blake2b(text, digest_size=_BYTES).digest(), np.uint8)
    return found


def write_items(folder: Path, facts: dict[str, Any], digests: np.ndarray) -> None:
    """Of a cache that begins here. Any process would write the same."""
    kept = io.BytesIO()
    np.save(kept, digests)
    write_atomic(folder / ITEMS, kept.getvalue())
    write_atomic(folder / FACTS, json.dumps(facts, sort_keys=True, indent=1))


def _read_items(folder: Path) -> tuple[Any, np.ndarray] | None:
    """None where nothing tells, as in caches of earlier versions."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        digests = np.load(folder / ITEMS, allow_pickle=False)
    except (OSError, EOFError, ValueError):
        return None
    fits = digests.dtype == np.uint8 and digests.ndim == 2 and digests.shape[1] == _BYTES
    return (facts, digests) if fits else None


class Earlier:
    """Rows of the other caches in a folder that were made under the same facts, finished or not."""

    def __init__(self, folder: Path, facts: dict[str, Any], digests: np.ndarray) -> None:
        """`folder` is the new cache's, and `digests` are those of its items."""
        self.folder, self.facts, self.digests = folder, facts, _keys(digests)

    @cached_property
    def _caches(self) -> list[_Cache]:
        found = []
        facts = json.loads(json.dumps(self.facts))  # as files have it
        for other in sorted(self.folder.parent.iterdir()):
            if other.name == self.folder.name or other.name.startswith(".") or not other.is_dir():
                continue
            known = _read_items(other)
            if known is None or known[0] != facts:
                continue
            try:
                layout = read_layout(other)
            except InputError:  # damaged: nothing is taken from it
                continue
            if layout is not None and layout.listed.count == len(known[1]):
                found.append(_Cache(other, layout, known[1]))
        return found

    @cached_property
    def unknown(self) -> int:
        """Items that no earlier cache has heard of."""
        known = np.zeros(len(self.digests), bool)
        for cache in self._caches:
            known |= cache.find(self.digests) >= 0
        return int((~known).sum())

    def rows(self, items: np.ndarray) -> list[StoredRow | None]:
        """Where each of these items lies; None: nowhere. All rows are kept alike."""
        found: list[StoredRow | None] = [None] * len(items)
        like: Block | None = None
        for cache in self._caches:
            for place, position in enumerate(cache.find(self.digests[items]).tolist()):
                if position < 0 or found[place] is not None:
                    continue
                row = cache.row(position)
                if row is not None and (like is None or _alike(row.block, like)):
                    like, found[place] = row.block, row
        return found


class _Cache:
    """An earlier cache."""

    def __init__(self, folder: Path, layout: Layout, digests: np.ndarray) -> None:
        self.folder, self.layout, self.digests = folder, layout, _keys(digests)
        self._order = np.argsort(self.digests)
        self._shards, self._rows = layout.places()
        self._open: OrderedDict[int, tuple[Block, list[bytes]] | None] = OrderedDict()

    def find(self, digests: np.ndarray) -> np.ndarray:
        """The item that each digest is of; −1: none."""
        places = np.searchsorted(self.digests, digests, sorter=self._order).clip(max=len(self.digests) - 1)
        items = self._order[places]
        return np.where(self.digests[items] == digests, items, -1)

    def row(self, item: int) -> StoredRow | None:
        """None where it is not encoded yet, or another one stands in for it: what that was may have changed."""
        shard, row = int(self._shards[item]), int(self._rows[item])
        if shard not in self._open:
            self._open[shard] = _open_shard(self.folder / self.layout.shards[shard].name)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        opened = self._open[shard]
        if opened is None or row >= min(opened[0].header.done, len(opened[1])):
            return None
        line = opened[1][row]
        try:
            stands_in = json.loads(line).get(STAND_IN)
        except ValueError:  # damaged, or just being written
            return None
        return None if stands_in else StoredRow(opened[0], row, line)


def _open_shard(folder: Path) -> tuple[Block, list[bytes]] | None:
    try:
        header = read_header(folder)
        if header is None or not header.done:
            return None
        arrays = {name: Array.npy(folder / f"{name}.npy") for name in header.arrays}
        lines = (folder / "captions.jsonl").read_bytes().splitlines(keepends=True)[: header.done]
    except (InputError, OSError):  # damaged, or not begun: nothing is taken from it
        return None
    whole = all(len(array.shape) and array.shape[0] >= header.done for array in arrays.values())
    return (Block(header, arrays), lines) if whole else None


def _alike(one: Block, other: Block) -> bool:
    def kept(block: Block) -> tuple[Any, ...]:
        inner = {name: array.shape[1:] for name, array in block.arrays.items()}
        return block.header.kind, block.header.shape, block.header.vocabulary, block.header.arrays, inner

    return one is other or kept(one) == kept(other)


def _keys(digests: np.ndarray) -> np.ndarray:
    """N 16 → N, as something that sorts."""
    return np.ascontiguousarray(digests).view(f"S{_BYTES}").reshape(-1)
