"""Batches for the trainer. Position in the data is the step: item, augmentation and slot follow from (seed, step, slot) alone,

so that any number of workers or processes sees the same batches, and a resumed run starts where it stopped without reading
what came before.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError, RunFailed
from kineograph.core.protocols import Source
from kineograph.data.buckets import Bucket, BucketOrder, Buckets
from kineograph.data.order import drawn, items, permute, spread
from kineograph.data.reader import Read, Reader, Work, streams

_POLL = 2.0  # seconds between looks at whether the workers are alive
_KEEP = 256 * 2**20  # bytes of validation batches kept in memory


class _Group(NamedTuple):
    """Items of validation that share batches."""

    shape: Bucket | None
    places: np.ndarray
    batch_size: int


def _refuse_few(buckets: Buckets, batch_size: int, world: int, accumulate: int) -> None:
    """Every process needs a row of every micro-batch."""
    for shape, rows in zip(buckets.shapes, buckets.rows(batch_size), strict=True):
        if 0 < rows < world * accumulate:
            needed = world * accumulate * buckets.config.tokens(shape)
            raise ConfigError(
                f"a batch of bucket {shape} has {rows} clips, too few for {world} processes × train.accumulate={accumulate}: "
                f"raise data.buckets.budget to {needed} or more (now {buckets.budget(batch_size)})"
            )


class _Plan(Sampler):
    def __init__(self, work: Any, count: int) -> None:
        self.work, self.count = work, count

    def __iter__(self) -> Iterator[Work]:
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
        self.buckets: Buckets | None = getattr(source, "buckets", None)
        if self.buckets is None and batch_size % (world * accumulate):
            parts = f"{world} processes × {accumulate} micro-batches" if world > 1 else f"train.accumulate={accumulate}"
            near = -(-batch_size // (world * accumulate)) * world * accumulate
            raise ConfigError(f"train.batch_size={batch_size} does not divide into {parts}: use {near}")
        if not len(source):
            raise InputError("the data source has no items")
        self.source, self.seed, self.batch_size, self.accumulate = source, seed, batch_size, accumulate
        self.workers, self.rank, self.world = workers, rank, world
        self.pin, self.timeout, self.prefetch, self.max_unreadable = pin, timeout, prefetch, max_unreadable
        self.skipped: dict[str, str] = {}
        self.replaced: set[int] = set()
        """Items that could not be read, so that others stood in for them."""
        self._met = 0  # items asked for
        self._fixed: dict[tuple[int, int, bool], list[Batch]] = {}
        self.position: dict[str, int] = {"shards": 0} if streams(source) else {}
        """What a checkpoint must hold besides the step: of a stream, the shards that are done with. Kept up to date here."""
        self._begun: dict[int, int] = {}  # worker → shards that were begun before the one it is in
        self._readers = 1

    def check(self) -> None:
        """Refuse batches of buckets that are too small for `steps`; showing and judging need none of those."""
        if self.buckets is not None:
            _refuse_few(self.buckets, self.batch_size, self.world, self.accumulate)

    def take_up(self, position: Mapping[str, int]) -> None:
        """Go on where a checkpoint's `position` says."""
        self.position.update({name: position[name] for name in self.position if name in position})

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps start … stop − 1."""
        self.check()
        chosen_at = self._order()

        def work() -> Iterator[Work]:
            for step in range(start, stop):
                shape, chosen = chosen_at(step)
                for part in np.array_split(np.arange(len(chosen)), self.accumulate):
                    slots = np.array_split(part, self.world)[self.rank]
                    yield Work((step,), slots, chosen[slots], shape)

        batches: list[Batch] = []
        for batch in self._run(work, (stop - start) * self.accumulate):
            batches.append(batch)
            if len(batches) == self.accumulate:
                yield batches
                batches = []

    def _order(self) -> Callable[[int], tuple[Bucket | None, np.ndarray]]:
        """Step → the shape and the items of its global batch."""
        resample = getattr(self.source, "resample", False)
        if self.buckets is not None:
            return BucketOrder(self.buckets, self.seed, self.batch_size, resample).at
        order = drawn if resample else items
        places = np.arange(self.batch_size)
        return lambda step: (None, order(self.seed, step * self.batch_size + places, len(self.source)))

    def fixed(self, count: int, batch_size: int, alike: bool = False) -> Iterator[Batch]:
        """The same `count` items (or all there are) with the same crops and starts at every call: for validation.

        Over all ranks each comes once, and every rank gets equally many batches; where there are fewer items than ranks, some get a `spare`
        one, which another rank counts. Slots are places among the `count`. With buckets, batches
        are of one bucket each, and of `batch_size` or as many as have that many tokens; `alike` reads all items in the usual shape instead.
        """
        count = min(count, len(self.source))
        key = (count, batch_size, alike)
        if key in self._fixed:
            yield from self._fixed[key]
            return
        everything = np.arange(count)
        chosen = permute(everything, len(self.source), 0) if count < len(self.source) else everything
        groups = [_Group(None, everything, batch_size)]
        if self.buckets is not None and alike and getattr(self.source, "reshapes", True):
            groups = [_Group(self.buckets.usual, everything, batch_size)]
        elif self.buckets is not None:
            groups = self._groups(chosen, batch_size)
            if alike:  # what is encoded has a shape: those of the fullest bucket
                groups = [max(groups, key=lambda group: len(group.places))._replace(batch_size=batch_size)]
        parts = [
            (group, part[self.rank])
            for group in groups
            for part in spread(len(group.places), group.batch_size, self.world)
        ]

        def work() -> Iterator[Work]:
            for group, part in parts:
                slots = group.places[part]
                yield Work(("fixed",), slots, chosen[slots], group.shape)

        kept: list[Batch] | None = []
        size = 0
        for (group, _), batch in zip(parts, self._run(work, len(parts)), strict=True):
            batch.spare = self.rank >= len(group.places)
            yield batch
            if kept is not None:
                kept.append(batch)
                size += _bytes(batch)
                kept = kept if size <= _KEEP else None
        if kept is not None:
            self._fixed[key] = kept

    def _groups(self, chosen: np.ndarray, batch_size: int) -> list[_Group]:
        """Places of the chosen items by bucket."""
        assert self.buckets is not None
        usual = self.buckets.config.tokens(self.buckets.usual)
        groups = []
        for bucket, shape in enumerate(self.buckets.shapes):
            places = np.flatnonzero(self.buckets.of[chosen] == bucket)
            if len(places):
                rows = max(1, batch_size * usual // self.buckets.config.tokens(shape))
                groups.append(_Group(shape, places, rows))
        return groups

    def in_order(
        self, places: Sequence[int] | np.ndarray, batch_size: int, shape: Bucket | None = None
    ) -> Iterator[Batch]:
        """These items one after another, with crops and starts that belong to the item wherever it stands, read as `shape`: for caches."""
        places = np.asarray(places, np.int64)
        starts = range(0, len(places), batch_size)

        def work() -> Iterator[Work]:
            for first in starts:
                part = places[first : first + batch_size]
                slots = np.array([_slot_of(self.source.identity(int(item))) for item in part], np.int64)
                yield Work(("in order",), slots, part, shape)

        yield from self._run(work, len(starts))

    def vouch(self, count: int) -> None:
        """So many items were read before this loader was made: what cannot be read is a share of these too."""
        self._met += count

    def _run(self, work: Any, count: int) -> Iterator[Batch]:
        if not count:
            return
        reader = Reader(self.source, self.seed, self.rank, self.world, self.position.get("shards", 0))
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

    def _next(self, reads: Iterator[Read]) -> Read:
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
            except (ConnectionError, EOFError, FileNotFoundError) as error:  # it died while a batch was handed over
                raise worker_died(f"its connection broke: {error or type(error).__name__}") from None

    def _accept(self, read: Read) -> Batch:
        if read.error is not None:
            raise read.error
        assert read.batch is not None
        self.skipped.update(read.skipped)
        self.replaced |= read.replaced
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


def _slot_of(identity: str) -> int:
    """A number for an item that stays when others come and go."""
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
