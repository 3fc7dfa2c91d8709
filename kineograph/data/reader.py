"""What data workers run: a micro-batch of numbered items → samples read and put side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from kineograph.core.batch import Batch, Sample
from kineograph.core.errors import InputError, KineoError, RunFailed, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source
from kineograph.data.buckets import Bucket
from kineograph.data.order import replacement

_TRIES = 100  # unreadable replacements in a row


@dataclass
class Read:
    """What a worker sends back."""

    batch: Batch | None = None
    skipped: dict[str, str] = field(default_factory=dict)  # identity → reason
    error: KineoError | None = None
    begun: tuple[int, int] | None = None  # of a stream: which worker, and at which of its shards it is
    replaced: set[int] = field(default_factory=set)  # items that another one stands in for

    def pin_memory(self) -> Read:
        return Read(self.batch and self.batch.pin_memory(), self.skipped, self.error, self.begun, self.replaced)


@dataclass(frozen=True)
class Work:
    """One micro-batch of one rank."""

    key: tuple[int | str, ...]  # of the samples' randomness, before the slot
    slots: np.ndarray
    items: np.ndarray
    shape: Bucket | None = None  # that they are read as; None: as the source has them


class Reader(Dataset):
    """Runs in the workers: work → batch."""

    def __init__(self, source: Source, seed: int, rank: int = 0, world: int = 1, begun: int = 0) -> None:
        self.source, self.seed = source, seed
        self.rank, self.world, self.begun = rank, world, begun
        self._records: Iterator[tuple[int, Any]] | None = None  # of a stream
        self._met: dict[str, str] = {}  # what the stream could not read since the last batch
        self.frames: int = getattr(source, "frames", 0)  # of every batch, where items differ in length

    def __getitem__(self, work: Work) -> Read:
        read = Read()
        try:
            if streams(self.source):
                samples = [self._next(work.key, int(slot), read) for slot in work.slots]
            else:
                samples = [
                    self._sample(int(item), work, int(slot), read)
                    for item, slot in zip(work.items, work.slots, strict=True)
                ]
            read.batch = _lengthened(_collate(samples, work.slots.tolist()), self.frames)
        except KineoError as error:
            read.error = error
        return read

    def _sample(self, item: int, work: Work, slot: int, read: Read) -> Sample:
        """The item, or what stands in for it: (seed, item) decides, so every process agrees without asking."""
        index = item
        for attempt in range(_TRIES):
            rng = numpy_rng(self.seed, *work.key, slot, "data")
            try:
                if work.shape is not None:  # any item can stand in, since it is read as the batch's shape
                    return self.source.read_as(index, work.shape, rng)  # type: ignore[attr-defined]
                return self.source.read(index, rng)
            except Unreadable as error:
                read.skipped[error.path] = error.reason
                read.replaced.add(item)
                index = replacement(self.seed, item, attempt, len(self.source))
        path, reason = next(reversed(read.skipped.items()))
        raise RunFailed(f"{_TRIES} items in a row could not be read, the last one {path}: {reason}")

    def _next(self, key: tuple, slot: int, read: Read) -> Sample:
        """The stream's next sample that can be read. Workers take turns at batches, so each has its share of the shards."""
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self._records is None:
            readers = self.world * workers
            self._records = self.source.records(  # type: ignore[attr-defined]
                self.seed, worker * self.world + self.rank, readers, self.begun // readers, self._met
            )
        for _ in range(_TRIES):
            turn, record = next(self._records)
            read.begun = (worker, turn * self.world * workers)
            read.skipped.update(self._met)
            self._met.clear()
            try:
                return self.source.decode(record, numpy_rng(self.seed, *key, slot, "data"))  # type: ignore[attr-defined]
            except Unreadable as error:
                read.skipped[error.path] = error.reason
        path, reason = next(reversed(read.skipped.items()))
        raise RunFailed(f"{_TRIES} samples in a row could not be read, the last one {path}: {reason}")


def streams(source: Source) -> bool:
    """Whether its items come one after another only."""
    return hasattr(source, "records")


def _collate(samples: list[Sample], slots: list[int]) -> Batch:
    try:
        return Batch.collate(samples, slots)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"items of different shapes or fields cannot share a batch: {_unlike(samples) or error}"
        ) from None


def _unlike(samples: list[Sample]) -> str | None:
    """The first field that is not alike in all, and what can be done."""
    for name, remedy in (
        ("pixels", "give all the same height, width and channels"),
        ("tokens", "give all the same rows and columns"),
        ("latents", "give all the same shape"),
        ("text_embeds", "pad them with zeros to one length, which are read as no text"),
        ("text_mask", "make it as long as text_embeds are in all"),
    ):
        found = [getattr(sample, name) for sample in samples]
        skip = name == "pixels"  # clips of different lengths are padded
        shapes = dict.fromkeys(None if value is None else tuple(value.shape)[skip:] for value in found)
        if len(shapes) > 1:
            told = " and ".join("none" if shape is None else str(shape) for shape in list(shapes)[:2])
            return f"{name} are of shape {told}: {remedy}"
    return None


def _lengthened(batch: Batch, frames: int) -> Batch:
    """A batch of stills alone gets the frames of any other, so that compiled networks and caches see one shape."""
    if batch.pixels is None or batch.pixels.shape[1] >= frames:
        return batch
    rows, length = batch.pixels.shape[:2]

    def longer(clip: torch.Tensor) -> torch.Tensor:
        return torch.cat([clip, clip[:, -1:].expand(-1, frames - length, -1, -1, -1)], dim=1)

    mask = batch.frame_mask if batch.frame_mask is not None else torch.ones(rows, length, dtype=torch.bool)
    batch.pixels = longer(batch.pixels)
    for name, value in batch.extra.items():
        if value.ndim == 5 and value.shape[1] == length:  # what goes with the frames: a sketch
            batch.extra[name] = longer(value)
    batch.frame_mask = torch.nn.functional.pad(mask, (0, frames - length))
    return batch
