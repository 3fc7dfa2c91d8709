"""The content addresses of a cache: a key for each item, for how items are encoded, and for a whole set of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from kineograph.cache.pack import KEY_BYTES
from kineograph.core.protocols import Source
from kineograph.data.buckets import Bucket, Buckets

# Keys of data.* that choose the items and their batches, or where they lie, not how one item is read. Its bucket is part of its own key.
_SET_OPTIONS = (
    "validation",
    "test",
    "max_unreadable",
    "limits",
    "folder",
    "buckets",
    "shards",
    "start_shard",
    "end_shard",
    "shard_width",
    "split_seed",
    "shuffle",
    "uncaptioned",
    "weight",
    "repeats",
)
# Keys that came later: their defaults are left out, so that the rows of an older cache are found.
_LATER = {
    "array_name": None,
    "caption": None,
    "shuffle_tags": False,
    "caption_lines": "one",
    "start": 0.0,
    "end": None,
    "skip_frames": 0,
    "cut": None,
    "sample_rate": None,
}


def recipe_key(data: dict[str, Any], facts: dict[str, Any]) -> str:
    """The key of how items are encoded: the data config, and `facts` about the encoders, their weights and precision."""
    data = _drop_set_options(data)
    if "mix" in data:
        data["mix"] = {name: _drop_set_options(part) for name, part in data["mix"].items()}
    return _digest([json.dumps({**facts, "data": data, "format": 3}, sort_keys=True).encode()], 8).hex()


def _drop_set_options(data: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in data.items()
        if name not in _SET_OPTIONS and not (name in _LATER and value == _LATER[name])
    }


def item_keys(source: Source, buckets: Buckets | None, usual: Bucket) -> np.ndarray:
    """The key of each item: its state (name, file, caption) and the clip shape that it is read as, without buckets `usual`."""
    states = source.item_states()
    if states is None:  # items are a function of their index, as moving digits are
        states = [f"{index}\0{source.identity(index)}" for index in range(len(source))]
    keys = bytearray()
    for index, state in enumerate(states):
        shape = buckets.shape(index) if buckets is not None else usual
        keys += _digest([f"{shape}\0{state}".encode("utf-8", "surrogatepass")])
    return np.frombuffer(bytes(keys), f"S{KEY_BYTES}")


def set_key(recipe: str, keys: np.ndarray, buckets: Buckets | None) -> str:
    """The key of a set of items in their order, with the options of its buckets."""
    options = buckets.config.model_dump_json() if buckets is not None else ""
    return _digest([recipe.encode(), options.encode(), keys.tobytes()], 8).hex()


def stand_in_keys(keys: np.ndarray, set_key: str) -> np.ndarray:
    """The keys of rows that hold another item because their own cannot be read. Which item stands in depends on the whole set."""
    return np.array([_digest([set_key.encode(), to_bytes(key)]) for key in keys], f"S{KEY_BYTES}")


def to_bytes(key: bytes) -> bytes:
    """A key at its full length: NumPy drops zeros at the end of a byte string."""
    return bytes(key).ljust(KEY_BYTES, b"\0")


def _digest(parts: Iterable[bytes], size: int = KEY_BYTES) -> bytes:
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part)
    return digest.digest()
