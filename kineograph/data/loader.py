"""Batches for the trainer. Position in the data is the step: item, augmentation and slot follow from (seed, step, slot) alone,

so that any number of workers or processes sees the same batches, and a resumed run starts where it stopped without reading
what came before.
"""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kineograph.core.batch import Batch, Sample
from kineograph.core.errors import ConfigError, InputError, KineoError, RunFailed, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.seams import Source
from kineograph.data.order import drawn, items, permute, replacement, spread

_POLL = 2.0  # seconds between looks at whether the workers are alive
_TRIES = 100  # unreadable replacements in a row
_KEEP = 256 * 2**20  # bytes of validation batches kept in memory


@dataclass
class _Read:
    """What a worker sends back."""

    batch: Batch | None = None
    skipped: dict[str, str] = field(default_factory=dict)  # identity → reason
    error: KineoError | None = None
    begun: tuple[int, int] | None = None  # of a stream: which worker, and at which of its shards it is

    def pin_memory(self) -> _Read:
        return _Read(self.batch and self.batch.pin_memory(), self.skipped, self.error, self.begun)


@dataclass(frozen=True)
class _Work:
    """One micro-batch of one rank."""

    key: tuple[int | str, ...]  # of the samples' randomness, before the slot
    slots: np.ndarray
    items: np.ndarray


class _Reader(Dataset):
    """Runs in the workers: work → batch."""

    def __init__(self, source: Source, seed: int, rank: int = 0, world: int = 1, begun: int = 0) -> None:
        self.source, self.seed = source, seed
        self.rank, self.world, self.begun = rank, world, begun
        self._records: Iterator[tuple[int, Any]] | None = None  # of a stream
        self._met: dict[str, str] = {}  # what the stream could not read since the last batch
        self.frames: int = getattr(source, "frames", 0)  # of every batch, where items differ in length

    def __getitem__(self, work: _Work) -> _Read:
        read = _Read()
        try:
            if streams(self.source):
                samples = [self._next(work.key, int(slot), read) for slot in work.slots]
            else:
                samples = [
                    self._sample(int(item), work.key, int(slot), read.skipped)
                    for item, slot in zip(work.items, work.slots, strict=True)
                ]
            read.batch = _lengthened(_collate(samples, work.slots.tolist()), self.frames)
        except KineoError as error:
            read.error = error
        return read

    def _sample(self, item: int, key: tuple, slot: int, skipped: dict[str, str]) -> Sample:
        """The item, or what stands in for it: (seed, item) decides, so every process agrees without asking."""
        index = item
        for attempt in range(_TRIES):
            try:
                return self.source.read(index, numpy_rng(self.seed, *key, slot, "data"))
            except Unreadable as error:
                skipped[error.path] = error.reason
                index = replacement(self.seed, item, attempt, len(self.source))
        path, reason = next(reversed(skipped.items()))
        raise RunFailed(f"{_TRIES} items in a row could not be read, the last one {path}: {reason}")

    def _next(self, key: tuple, slot: int, read: _Read) -> Sample:
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
        raise InputError(f"items of different shapes or fields cannot share a batch: {error}") from None


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


class _Plan(Sampler):
    def __init__(self, work: Any, count: int) -> None:
        self.work, self.count = work, count

    def __iter__(self) -> Iterator[_Work]:
        return iter(self.work())

    def __len__(self) -> int:
        return self.count


def _as_is(read: Any) -> Any:
    return read


def _prepare_worker(worker: int) -> None:
    """The main process decides when to stop; a Ctrl-C for the whole group must not take the workers first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """New processes would import the script that was started, and run it again where it lacks a main guard. Ours never need it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Loader:
    """Micro-batches of each step for one rank, read ahead by worker processes.

    `batch_size` is global: over `world` processes and `accumulate` micro-batches. `skipped` gathers what could not be read.
    """

    def __init__(
        self,
        source: Source,
        seed: int,
        batch_size: int,
        accumulate: int = 1,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
        timeout: float = 600.0,
        prefetch: int = 4,
        max_unreadable: float = 1.0,
    ) -> None:
        if batch_size % (world * accumulate):
            parts = f"{world} processes × {accumulate} micro-batches" if world > 1 else f"train.accumulate={accumulate}"
            near = -(-batch_size // (world * accumulate)) * world * accumulate
            raise ConfigError(f"train.batch_size={batch_size} does not divide into {parts}: use {near}")
        if not len(source):
            raise InputError("the data source has no items")
        self.source, self.seed, self.batch_size, self.accumulate = source, seed, batch_size, accumulate
        self.workers, self.rank, self.world = workers, rank, world
        self.pin, self.timeout, self.prefetch, self.max_unreadable = pin, timeout, prefetch, max_unreadable
        self.skipped: dict[str, str] = {}
        self._met = 0  # items asked for
        self._fixed: dict[tuple[int, int], list[Batch]] = {}
        self.position: dict[str, int] = {"shards": 0} if streams(source) else {}
        """What a checkpoint must hold besides the step: of a stream, the shards that are done with. Kept up to date here."""
        self._begun: dict[int, int] = {}  # worker → shards that were begun before the one it is in
        self._readers = 1

    def take_up(self, position: Mapping[str, int]) -> None:
        """Go on where a checkpoint's `position` says."""
        self.position.update({name: position[name] for name in self.position if name in position})

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps start … stop − 1."""
        micro = self.batch_size // self.accumulate
        share = micro // self.world
        first = self.rank * share
        order = drawn if getattr(self.source, "resample", False) else items

        def work() -> Iterator[_Work]:
            for step in range(start, stop):
                chosen = order(self.seed, step * self.batch_size + np.arange(self.batch_size), len(self.source))
                for part in range(self.accumulate):
                    slots = np.arange(part * micro + first, part * micro + first + share)
                    yield _Work((step,), slots, chosen[slots])

        batches: list[Batch] = []
        for batch in self._run(work, (stop - start) * self.accumulate):
            batches.append(batch)
            if len(batches) == self.accumulate:
                yield batches
                batches = []

    def fixed(self, count: int, batch_size: int) -> Iterator[Batch]:
        """The same `count` items (or all there are) with the same crops and starts at every call: for validation.

        Over all ranks each comes once, and every rank gets equally many batches. Slots are places among the `count`.
        """
        count = min(count, len(self.source))
        if (count, batch_size) in self._fixed:
            yield from self._fixed[count, batch_size]
            return
        parts = spread(count, batch_size, self.world)

        def work() -> Iterator[_Work]:
            for part in parts:
                slots = part[self.rank]
                yield _Work(
                    ("fixed",), slots, permute(slots, len(self.source), 0) if count < len(self.source) else slots
                )

        kept: list[Batch] | None = []
        size = 0
        for batch in self._run(work, len(parts)):
            yield batch
            if kept is not None:
                kept.append(batch)
                size += _bytes(batch)
                kept = kept if size <= _KEEP else None
        if kept is not None:
            self._fixed[count, batch_size] = kept

    def in_order(self, start: int, stop: int, batch_size: int) -> Iterator[Batch]:
        """Items start … stop − 1 one after another, each once, with crops and starts that belong to the item: for caches."""

        def work() -> Iterator[_Work]:
            for first in range(start, stop, batch_size):
                places = np.arange(first, min(first + batch_size, stop))
                yield _Work(("in order",), places, places)

        yield from self._run(work, -(-(stop - start) // batch_size))

    def _run(self, work: Any, count: int) -> Iterator[Batch]:
        if not count:
            return
        reader = _Reader(self.source, self.seed, self.rank, self.world, self.position.get("shards", 0))
        self._begun, self._readers = {}, max(1, min(self.workers, count))
        if not self.workers:
            for piece in work():
                batch = self._accept(reader[piece])
                yield batch.pin_memory() if self.pin else batch
            return
        with _main_hidden(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # train.workers is the user's choice
            loader = DataLoader(
                reader,
                batch_size=None,
                sampler=_Plan(work, count),
                collate_fn=_as_is,
                num_workers=self._readers,
                pin_memory=self.pin,
                prefetch_factor=self.prefetch,
                worker_init_fn=_prepare_worker,
                timeout=min(_POLL, self.timeout),
                multiprocessing_context=_start_method(self.source),
            )
            reads = iter(loader)
        try:
            for _ in range(count):
                yield self._accept(self._next(reads))
        except RunFailed:
            _kill(reads)  # they hang, or some are gone: there is nothing to wait for
            raise
        finally:
            _end(reads)

    def _next(self, reads: Iterator[_Read]) -> _Read:
        """Waits up to `timeout`, looking every few seconds whether the workers still live."""
        began = time.monotonic()
        while True:
            try:
                return next(reads)
            except RuntimeError as error:
                text = str(error)
                if "timed out" in text:
                    if time.monotonic() - began < self.timeout:
                        continue
                    raise RunFailed(
                        f"no data for {self.timeout:g} s from {self.workers} workers: a disk that hangs, or batches that take longer; "
                        "raise train.timeout or train.workers"
                    ) from None
                if "DataLoader worker" in text and "Traceback" not in text:
                    raise worker_died(text) from None
                raise

    def _accept(self, read: _Read) -> Batch:
        if read.error is not None:
            raise read.error
        assert read.batch is not None
        self.skipped.update(read.skipped)
        if read.begun is not None:  # the worker that is furthest behind decides: rather twice than never
            self._begun[read.begun[0]] = read.begun[1]
            if len(self._begun) >= self._readers:
                self.position["shards"] = min(self._begun.values())
        self._met += len(read.batch)
        known = min(self._met, len(self.source))
        if known >= 100 and len(self.skipped) > self.max_unreadable * known:
            path, reason = next(iter(self.skipped.items()))
            raise RunFailed(
                f"{len(self.skipped)} of the first {known} items cannot be read, for instance {path}: {reason}; "
                f"data.max_unreadable={self.max_unreadable:g} is the limit: repair them or raise it"
            )
        return read.batch


def worker_died(text: str) -> RunFailed:
    return RunFailed(
        f"a data worker died ({text.splitlines()[0]}): most often out of memory, or too little shared memory (/dev/shm); "
        "lower train.workers or train.batch_size, then run the same command to go on"
    )


def _start_method(source: Source) -> str:
    """Workers are forked from a clean server process: a fork of the training process would inherit locks that its threads
    hold. Only a user's own Dataset is forked directly, since it may live in memory or in a notebook."""
    methods = torch.multiprocessing.get_all_start_methods()
    wanted = "fork" if getattr(source, "in_memory", False) else "forkserver"
    if wanted not in methods:
        return "spawn"
    if wanted == "forkserver":  # what the workers need is imported once, in the server
        needed = [
            "kineograph.data.worker_server",
            "kineograph.data.loader",
            "kineograph.data.folder",
            type(source).__module__,
        ]
        torch.multiprocessing.get_context("forkserver").set_forkserver_preload(
            [name for name in needed if name != "__main__"]
        )
    return wanted


def _end(reads: Any) -> None:
    """Stop the workers now. They are deaf to SIGTERM, so one that is stuck is killed."""
    workers = list(reads._workers)
    try:
        reads._shutdown_workers()
    except (
        RuntimeError
    ) as error:  # torch's own watch over its workers, which speaks up while a killed one is being joined
        if "DataLoader worker" not in str(error):
            raise
    for worker in workers:
        if worker.is_alive():
            worker.kill()


def _kill(reads: Any) -> None:
    for worker in reads._workers:
        worker.kill()


def _bytes(batch: Batch) -> int:
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    batch.map(add)
    return total
