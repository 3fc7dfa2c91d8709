"""Epoch order as a pure function of (seed, position): a keyed permutation, so nothing is shuffled or stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kineograph.core.noise import key_of
from kineograph.core.protocols import MixShare, Source

_ROUNDS = 6
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def pick_shuffled(seed: int, positions: np.ndarray, count: int) -> np.ndarray:
    """The item at each position of the endless sequence: every epoch holds each of `count` items once, in its own order."""
    positions = np.asarray(positions, np.int64)
    epochs = positions // count
    result = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():  # one or two per batch
        mask = epochs == epoch
        result[mask] = permute(positions[mask] - epoch * count, count, key_of(seed, "order", epoch))
    return result


def pick_in_order(positions: np.ndarray, count: int) -> np.ndarray:
    """The item at each position of the endless sequence 0 … count − 1, 0 … count − 1, …"""
    return np.asarray(positions, np.int64) % count


def pick_mixed(seed: int, positions: np.ndarray, shares: Sequence[MixShare], shuffle: bool = True) -> np.ndarray:
    """The item at each position of the endless sequence of a mix.

    An epoch holds `draws` samples of each part, in random order. A part's items come in an order of its own, each once before any
    comes again, also across epochs.
    """
    positions = np.asarray(positions, np.int64)
    draws = np.array([share.draws for share in shares], np.int64)
    ends, first_item = np.cumsum(draws), np.cumsum([0, *(share.items for share in shares)])
    epochs = positions // ends[-1]
    slots = positions - epochs * ends[-1]
    if shuffle:
        slots = pick_shuffled(seed, positions, int(ends[-1]))
    parts = np.searchsorted(ends, slots, side="right")
    numbers = epochs * draws[parts] + slots - (ends - draws)[parts]  # of the sample among those of its part
    result = np.empty_like(positions)
    for part in np.unique(parts).tolist():
        mask, count = parts == part, shares[part].items
        own = key_of(seed, "part", part)
        picked = pick_shuffled(own, numbers[mask], count) if shuffle else pick_in_order(numbers[mask], count)
        result[mask] = first_item[part] + picked
    return result


def pick_resampled(seed: int, positions: np.ndarray, count: int) -> np.ndarray:
    """A random item of `count` at each position, with replacement."""
    base = np.uint64(key_of(seed, "drawn"))
    with np.errstate(over="ignore"):
        mixed = (np.asarray(positions, np.uint64) + base) * _MIX
        for shift in (np.uint64(30), np.uint64(27), np.uint64(31)):
            mixed = (mixed ^ (mixed >> shift)) * _MIX
    return (mixed % np.uint64(count)).astype(np.int64)


def permute(values: np.ndarray, count: int, key: int) -> np.ndarray:
    """A bijection of 0 … count − 1: a Feistel network over the next power of four, with cycle walking: values outside the range are
    permuted again until they fall inside (fewer than four times on average)."""
    half = max(((count - 1).bit_length() + 1) // 2, 1)
    keys = [np.uint64(key_of(key, "round", index)) for index in range(_ROUNDS)]
    result = _feistel(np.asarray(values, np.uint64), half, keys)
    outside = result >= count
    while outside.any():
        result[outside] = _feistel(result[outside], half, keys)
        outside = result >= count
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    mask, width = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> width, values & mask
    with np.errstate(over="ignore"):
        for key in keys:
            mixed = (right + key) * _MIX
            mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << width) | right


def pick_replacement(seed: int, index: int, attempt: int, count: int) -> int:
    """The item that replaces an unreadable one; `attempt` counts up when the replacement is unreadable too."""
    return key_of(seed, "replacement", index, attempt) % count


class ItemOrder:
    """The endless sequence in which training takes a number of items."""

    def __init__(self, count: int, seed: int, resample: bool, shuffle: bool, shares: tuple[MixShare, ...] = ()) -> None:
        self.count, self.seed, self.resample, self.shuffle = count, seed, resample, shuffle
        self.shares = tuple(share for share in shares if share.items)

    @staticmethod
    def of(source: Source, seed: int) -> ItemOrder:
        return ItemOrder(len(source), seed, source.resample, source.shuffle, source.shares)

    @property
    def epoch(self) -> int:
        """Samples in an epoch."""
        return sum(share.draws for share in self.shares) if self.shares else self.count

    def pick(self, positions: np.ndarray) -> np.ndarray:
        """The item at each position."""
        if self.shares:
            return pick_mixed(self.seed, positions, self.shares, self.shuffle)
        if self.resample:
            return pick_resampled(self.seed, positions, self.count)
        return pick_shuffled(self.seed, positions, self.count) if self.shuffle else pick_in_order(positions, self.count)


class Share(NamedTuple):
    """A rank's part of a batch."""

    indices: np.ndarray
    spare: bool  # repeated from another rank, because the batch has fewer items than there are ranks


def split_batches(count: int, batch_size: int, world: int) -> list[list[Share]]:
    """[batch][rank] → indices into `count` items: batches of `batch_size` (at least `world`) items, the same for every
    number of ranks; each item once, and every rank in every batch, so that no rank waits for another in a reduction."""
    batches = []
    size = max(batch_size, world)
    for start in range(0, count, size):
        items = np.arange(start, min(start + size, count))
        shares = [Share(part, spare=False) for part in np.array_split(items, min(world, len(items)))]
        batches.append([shares[rank] if rank < len(shares) else Share(items[:1], spare=True) for rank in range(world)])
    return batches
