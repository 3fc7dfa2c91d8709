"""Runs in the data workers: reads the numbered items of a micro-batch and collates them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from kineograph.core.batch import Batch, Sample
from kineograph.core.errors import InputError, KineoError, RunFailed, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source, Stream
from kineograph.data.buckets import Bucket, BucketedSource
from kineograph.data.order import pick_replacement

_MAX_TRIES = 100  # unreadable items in a row
_SHARED_RESERVE = 16 * 2**20  # bytes of shared memory left to others, such as NCCL


def free_shared_memory() -> int | None:
    """Bytes free in /dev/shm, which Docker limits to 64 MB; None where there is no such folder."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


@dataclass
class ReadResult:
    """A worker's answer."""

    batch: Batch | None = None
    skipped: dict[str, str] = field(default_factory=dict)  # identity → reason
    error: KineoError | None = None
    stream_position: tuple[int, int] | None = None  # the worker, and the shards begun before its current one
    replaced: set[int] = field(default_factory=set)  # unreadable items that were replaced by others
    inline: bool = False  # the batch goes through the pipe, since shared memory has no room for it

    def share_memory(self) -> None:
        """Put the batch into shared memory, where there is room. torch would do so later, in a thread whose errors are lost."""
        if self.batch is None:
            return
        needed = sum(tensor.nbytes for tensor in self.batch.tensors())
        free = free_shared_memory()
        self.inline = free is not None and free < needed + _SHARED_RESERVE
        if not self.inline:
            try:
                for tensor in self.batch.tensors():
                    tensor.share_memory_()
            except RuntimeError:  # another process was faster
                self.inline = True

    def __getstate__(self) -> dict[str, Any]:
        # Pickled by itself, the batch is copied; a queue of torch.multiprocessing would share its tensors.
        return vars(self) | ({"batch": pickle.dumps(self.batch)} if self.inline else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.inline:
            self.batch = pickle.loads(state["batch"])

    def pin_memory(self) -> ReadResult:
        return replace(self, batch=self.batch and self.batch.pin_memory())


@dataclass(frozen=True)
class ReadRequest:
    """One micro-batch of one rank."""

    key: tuple[int | str, ...]  # of the samples' randomness, before the slot
    slots: np.ndarray
    items: np.ndarray
    shape: Bucket | None = None  # shape to read the items in; None: the source's own


class Reader(Dataset):
    """ReadRequest → ReadResult."""

    def __init__(self, source: Source, seed: int, rank: int = 0, world: int = 1, first_shard: int = 0) -> None:
        self.source, self.seed = source, seed
        self.rank, self.world, self.first_shard = rank, world, first_shard
        self._records: Iterator[tuple[int, Any]] | None = None  # of a stream
        self._stream_skipped: dict[str, str] = {}  # since the last sample

    def __getitem__(self, request: ReadRequest) -> ReadResult:
        result = ReadResult()
        try:
            if isinstance(self.source, Stream):
                samples = [self._next(self.source, request.key, slot, result) for slot in request.slots.tolist()]
            else:
                pairs = zip(request.items.tolist(), request.slots.tolist(), strict=True)
                samples = [self._read(item, request, slot, result) for item, slot in pairs]
            result.batch = _pad_batch(_collate(samples, request.slots.tolist()), self.source.pad_to_frames)
        except KineoError as error:
            result.error = error
        if torch.utils.data.get_worker_info() is not None:
            result.share_memory()
        return result

    def _read(self, item: int, request: ReadRequest, slot: int, result: ReadResult) -> Sample:
        """The item, or its replacement, which depends on (seed, item) only, so that all processes agree."""
        index = item
        for attempt in range(_MAX_TRIES):
            rng = numpy_rng(self.seed, *request.key, slot, "data")
            try:
                if request.shape is not None:  # any item can be the replacement, since it is read in the batch's shape
                    assert isinstance(self.source, BucketedSource)
                    sample = self.source.read_as(index, request.shape, rng)
                else:
                    sample = self.source.read(index, rng)
                return self._add_caption(sample, index, request.key, slot)
            except Unreadable as error:
                result.skipped[error.path] = error.reason
                result.replaced.add(item)
                index = pick_replacement(self.seed, item, attempt, len(self.source))
        raise _too_many_unreadable("items", result)

    def _add_caption(self, sample: Sample, index: int, key: tuple, slot: int) -> Sample:
        """Make the caption from the item's texts, with randomness of its own: a cached item gets the same."""
        form = self.source.captioning.at(index)
        texts = sample.texts or ((sample.caption,) if sample.caption else ())
        if form.is_plain(texts):
            return sample
        caption = form.draw(texts, lambda: numpy_rng(self.seed, *key, slot, "caption"))
        return replace(sample, caption=sample.caption if caption is None else caption, texts=texts)

    def _next(self, stream: Stream, key: tuple, slot: int, result: ReadResult) -> Sample:
        """The stream's next readable sample. Workers alternate in giving batches, so each gets its share of the shards."""
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        readers = self.world * workers
        if self._records is None:
            reader = worker * self.world + self.rank
            self._records = stream.records(
                self.seed, reader, readers, self.first_shard // readers, self._stream_skipped
            )
        for _ in range(_MAX_TRIES):
            turn, record = next(self._records)
            result.stream_position = (worker, turn * readers)
            result.skipped.update(self._stream_skipped)
            self._stream_skipped.clear()
            try:
                sample = stream.decode(record, numpy_rng(self.seed, *key, slot, "data"))
                return self._add_caption(sample, 0, key, slot)
            except Unreadable as error:
                result.skipped[error.path] = error.reason
        raise _too_many_unreadable("samples", result)


def _too_many_unreadable(kind: str, result: ReadResult) -> RunFailed:
    path, reason = next(reversed(result.skipped.items()))
    return RunFailed(f"{_MAX_TRIES} {kind} in a row could not be read, the last one {path}: {reason}")


def _collate(samples: list[Sample], slots: list[int]) -> Batch:
    try:
        return Batch.collate(samples, slots)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        reason = _find_mismatch(samples) or error
        raise InputError(f"items of different shapes or fields cannot share a batch: {reason}") from None


def _find_mismatch(samples: list[Sample]) -> str | None:
    """The first field whose shape differs, and a remedy."""
    for name, remedy in (
        ("pixels", "give all the same height, width and channels"),
        ("tokens", "give all the same rows and columns"),
        ("latents", "give all the same shape"),
        ("text_embeds", "pad them with zeros to one length, which are read as no text"),
        ("text_mask", "make it as long as text_embeds"),
    ):
        values = [getattr(sample, name) for sample in samples]
        first_axis = 1 if name == "pixels" else 0  # clips of different lengths are padded
        shapes = dict.fromkeys(None if value is None else tuple(value.shape)[first_axis:] for value in values)
        if len(shapes) > 1:
            shown = " and ".join("none" if shape is None else str(shape) for shape in list(shapes)[:2])
            return f"{name} are of shape {shown}: {remedy}"
    return None


def _pad_batch(batch: Batch, frames: int) -> Batch:
    """Pad a batch of still images to `frames`, so that compiled networks and caches see one shape."""
    if batch.pixels is None or batch.pixels.shape[1] >= frames:
        return batch
    rows, length = batch.pixels.shape[:2]

    def repeat_last(clip: torch.Tensor) -> torch.Tensor:
        return torch.cat([clip, clip[:, -1:].expand(-1, frames - length, *clip.shape[2:])], dim=1)

    mask = batch.frame_mask if batch.frame_mask is not None else torch.ones(rows, length, dtype=torch.bool)
    batch.pixels = repeat_last(batch.pixels)
    for name, value in batch.extra.items():
        if (value.ndim == 5 or name == "audio") and value.shape[1] == length:  # fields per frame, such as a sketch
            batch.extra[name] = repeat_last(value)
    batch.frame_mask = torch.nn.functional.pad(mask, (0, frames - length))
    return batch
