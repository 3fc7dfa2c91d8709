"""Batches for the trainer. Items, augmentation and slots follow from (seed, step, slot) alone.

So any number of workers or processes sees the same batches, and a resumed run continues without reading earlier items.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError, RunFailed
from kineograph.core.protocols import Source, Stream
from kineograph.data.buckets import Bucket, BucketedSource, BucketOrder, Buckets, buckets_of
from kineograph.data.order import ItemOrder, permute, split_batches
from kineograph.data.reader import Reader, ReadRequest, ReadResult, free_shared_memory

_ENOUGH_SHARED = 2**30  # bytes
_POLL_SECONDS = 2.0  # between checks that the workers are alive
_CACHE_BYTES = 256 * 2**20  # of validation batches kept in memory

Requests = Callable[[], Iterator[ReadRequest]]


class _Group(NamedTuple):
    """Validation items that share batches."""

    shape: Bucket | None
    slots: np.ndarray
    batch_size: int


class _RequestSampler(Sampler):
    def __init__(self, requests: Requests, count: int) -> None:
        self.requests, self.count = requests, count

    def __iter__(self) -> Iterator[ReadRequest]:
        return self.requests()

    def __len__(self) -> int:
        return self.count


class Loader:
    """Micro-batches of each step for one rank, prefetched by worker processes.

    `batch_size` is global: over `world` processes and `accumulate` micro-batches.
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
        self.buckets = buckets_of(source)
        if self.buckets is None and batch_size % (world * accumulate):
            parts = f"{world} processes × {accumulate} micro-batches" if world > 1 else f"train.accumulate={accumulate}"
            nearest = -(-batch_size // (world * accumulate)) * world * accumulate
            raise ConfigError(f"train.batch_size={batch_size} does not divide into {parts}: use {nearest}")
        if not len(source):
            raise InputError("the data source has no items")
        self.source, self.seed, self.batch_size, self.accumulate = source, seed, batch_size, accumulate
        self.workers, self.rank, self.world = workers, rank, world
        self.pin, self.timeout, self.prefetch, self.max_unreadable = pin, timeout, prefetch, max_unreadable
        self.skipped: dict[str, str] = {}
        """Items that could not be read: identity → reason."""
        self.replaced: set[int] = set()
        """Numbers of the items that others replaced."""
        self.position: dict[str, int] = {"shards": 0} if isinstance(source, Stream) else {}
        """State for a checkpoint besides the step: of a stream, the number of finished shards."""
        self._items_read = 0
        self._fixed: dict[tuple[int, int, bool], list[Batch]] = {}
        self._shards_begun: dict[int, int] = {}  # worker → shards begun before its current one
        self._readers = 1

    def check(self) -> None:
        """Refuse buckets whose batches have too few clips for every process; only `steps` needs this."""
        if self.buckets is None:
            return
        for shape, rows in zip(self.buckets.shapes, self.buckets.batch_sizes(self.batch_size), strict=True):
            if 0 < rows < self.world * self.accumulate:
                needed = self.world * self.accumulate * self.buckets.config.tokens(shape)
                raise ConfigError(
                    f"a batch of bucket {shape} has {rows} clips, too few for {self.world} processes × train.accumulate={self.accumulate}: "
                    f"raise data.buckets.budget to {needed} or more (now {self.buckets.budget(self.batch_size)})"
                )

    def load_position(self, position: Mapping[str, int]) -> None:
        """Continue from a checkpoint's `position`."""
        self.position.update({name: position[name] for name in self.position if name in position})

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps start … stop − 1."""
        self.check()
        items_at = self._step_order()

        def requests() -> Iterator[ReadRequest]:
            for step in range(start, stop):
                shape, items = items_at(step)
                for part in np.array_split(np.arange(len(items)), self.accumulate):
                    slots = np.array_split(part, self.world)[self.rank]
                    yield ReadRequest((step,), slots, items[slots], shape)

        batches: list[Batch] = []
        for batch in self._read(requests, (stop - start) * self.accumulate):
            batches.append(batch)
            if len(batches) == self.accumulate:
                yield batches
                batches = []

    def _step_order(self) -> Callable[[int], tuple[Bucket | None, np.ndarray]]:
        """Step → the shape and the items of its global batch."""
        if self.buckets is not None:
            return self._bucket_order(self.buckets).batch_at
        order, slots = ItemOrder.of(self.source, self.seed), np.arange(self.batch_size)
        return lambda step: (None, order.pick(step * self.batch_size + slots))

    def _bucket_order(self, buckets: Buckets) -> BucketOrder:
        source = self.source
        return BucketOrder(buckets, self.seed, self.batch_size, source.resample, source.shuffle, source.shares)

    def count_epoch(self) -> int:
        """Samples in an epoch: each item once, or as often as its part of a mix says."""
        return ItemOrder.of(self.source, self.seed).epoch

    def count_steps(self, epochs: float) -> int:
        """Steps in which so many epochs are read; the last batch is filled from the next one."""
        if self.buckets is not None:
            return self._bucket_order(self.buckets).count_steps(epochs)
        return max(1, math.ceil(epochs * self.count_epoch() / self.batch_size))

    def fixed_batches(self, count: int, batch_size: int, one_shape: bool = False) -> Iterator[Batch]:
        """The same `count` items (or all) with the same crops and starts at every call, for validation.

        Each item comes once over all ranks, and every rank takes part in every batch: where a batch has fewer items than there are ranks, some
        get a `spare` one that another rank counts. So the batches do not depend on the number of ranks. Slots number the `count` items.
        With buckets, a batch has one bucket and about as many tokens as `batch_size` base clips; `one_shape` reads all items in the base shape instead.
        """
        count = min(count, len(self.source))
        key = (count, batch_size, one_shape)
        if key in self._fixed:
            yield from self._fixed[key]
            return
        slots = np.arange(count)
        items = permute(slots, len(self.source), 0) if count < len(self.source) else slots
        groups = self._group_by_shape(items, batch_size, one_shape)
        parts = [
            (group, share.spare, group.slots[share.indices])
            for group in groups
            for share in (shares[self.rank] for shares in split_batches(len(group.slots), group.batch_size, self.world))
        ]

        def requests() -> Iterator[ReadRequest]:
            for group, _, part in parts:
                yield ReadRequest(("fixed",), part, items[part], group.shape)

        kept: list[Batch] | None = []
        size = 0
        for (_, spare, _), batch in zip(parts, self._read(requests, len(parts)), strict=True):
            batch.spare = spare
            yield batch
            if kept is not None:
                kept.append(batch)
                size += sum(tensor.nbytes for tensor in batch.tensors())
                kept = kept if size <= _CACHE_BYTES else None
        if kept is not None:
            self._fixed[key] = kept

    def _group_by_shape(self, items: np.ndarray, batch_size: int, one_shape: bool) -> list[_Group]:
        everything = np.arange(len(items))
        if self.buckets is None:
            return [_Group(None, everything, batch_size)]
        assert isinstance(self.source, BucketedSource)
        if one_shape and self.source.can_reshape:
            return [_Group(self.buckets.base, everything, batch_size)]
        tokens = self.buckets.config.tokens
        groups = []
        for bucket, shape in enumerate(self.buckets.shapes):
            slots = np.flatnonzero(self.buckets.item_buckets[items] == bucket)
            if len(slots):
                groups.append(_Group(shape, slots, max(1, batch_size * tokens(self.buckets.base) // tokens(shape))))
        if one_shape:  # encoded items keep their shape: take the largest bucket
            return [max(groups, key=lambda group: len(group.slots))._replace(batch_size=batch_size)]
        return groups

    def ordered_batches(
        self, items: Sequence[int] | np.ndarray, batch_size: int, shape: Bucket | None = None
    ) -> Iterator[Batch]:
        """These items in order, read as `shape`, with crops and starts that depend on the item's identity: for caches."""
        items = np.asarray(items, np.int64)
        starts = range(0, len(items), batch_size)

        def requests() -> Iterator[ReadRequest]:
            for first in starts:
                part = items[first : first + batch_size]
                slots = np.array([_hash_identity(self.source.identity(int(item))) for item in part], np.int64)
                yield ReadRequest(("in order",), slots, part, shape)

        yield from self._read(requests, len(starts))

    def count_as_read(self, count: int) -> None:
        """Count items that were read before this loader existed, for the share of unreadable items."""
        self._items_read += count

    def _read(self, requests: Requests, count: int) -> Iterator[Batch]:
        if not count:
            return
        reader = Reader(self.source, self.seed, self.rank, self.world, self.position.get("shards", 0))
        self._shards_begun, self._readers = {}, max(1, min(self.workers, count))
        if not self.workers:
            for request in requests():
                batch = self._accept(reader[request])
                yield batch.pin_memory() if self.pin else batch
            return
        with _hide_main_module(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # train.workers is the user's choice
            loader = DataLoader(
                reader,
                batch_size=None,
                sampler=_RequestSampler(requests, count),
                collate_fn=_identity,
                num_workers=self._readers,
                pin_memory=self.pin,
                prefetch_factor=self.prefetch,
                worker_init_fn=_init_worker,
                timeout=min(_POLL_SECONDS, self.timeout),
                multiprocessing_context=_start_method(self.source),
            )
            results = iter(loader)
            _running.update(results._workers)  # type: ignore[attr-defined]
        try:
            for _ in range(count):
                yield self._accept(self._next(results))
        except RunFailed:
            for worker in results._workers:  # type: ignore[attr-defined]  # hung or dead: do not wait for them
                worker.kill()
            raise
        finally:
            _stop_workers(results)

    def _next(self, results: Iterator[ReadResult]) -> ReadResult:
        """Wait up to `timeout`; DataLoader checks every few seconds that the workers are alive."""
        began = time.monotonic()
        while True:
            try:
                return next(results)
            except RuntimeError as error:
                text = str(error)
                if "timed out" in text:
                    if time.monotonic() - began < self.timeout:
                        continue
                    raise RunFailed(
                        f"no data for {self.timeout:g} s from {self.workers} workers: the disk hangs, or batches take longer; "
                        "raise train.timeout or train.workers"
                    ) from None
                if "DataLoader worker" in text and "Traceback" not in text:
                    raise worker_error(_describe_dead(results) or text) from None
                raise
            except (ConnectionError, EOFError, FileNotFoundError) as error:  # it died while handing over a batch
                reason = _describe_dead(results) or f"its connection broke: {error or type(error).__name__}"
                raise worker_error(reason) from None

    def _accept(self, result: ReadResult) -> Batch:
        if result.error is not None:
            raise result.error
        assert result.batch is not None
        self.skipped.update(result.skipped)
        self.replaced |= result.replaced
        if result.stream_position is not None:
            worker, begun = result.stream_position
            self._shards_begun[worker] = begun
            # The slowest worker counts: better to read a shard twice than never.
            if len(self._shards_begun) >= self._readers:
                self.position["shards"] = min(self._shards_begun.values())
        self._items_read += len(result.batch)
        count = min(self._items_read, len(self.source))
        if count >= 100 and len(self.skipped) > self.max_unreadable * count:
            path, reason = next(iter(self.skipped.items()))
            raise RunFailed(
                f"{len(self.skipped)} of the first {count} items cannot be read, for example {path}: {reason}; "
                f"data.max_unreadable={self.max_unreadable:g} is the limit: repair them or raise it"
            )
        return result.batch


def _identity(result: Any) -> Any:
    return result


def _hash_identity(identity: str) -> int:
    """A slot for an item that does not depend on the other items."""
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# Worker processes -------------------------------------------------------------------------------------------------


def worker_error(reason: str) -> RunFailed:
    return RunFailed(
        f"a data worker died ({reason.splitlines()[0]}): lower train.workers or train.batch_size if memory is short, "
        "then run the same command to continue"
    )


_CAUSES = {
    signal.SIGKILL: "as the kernel does when memory runs out",
    signal.SIGBUS: "a mapped file became shorter, or shared memory (/dev/shm) is full",
    signal.SIGSEGV: "a decoder crashed; kineo data check finds the file",
}


def _describe_dead(results: Any) -> str | None:
    """How the first dead worker ended."""
    for worker in results._workers:
        worker.join(0.1)  # its exit code may be on the way
        code = worker.exitcode
        if code is not None and code < 0:
            cause = _CAUSES.get(signal.Signals(-code))
            return f"process {worker.pid} ended by {signal.Signals(-code).name}" + (f", {cause}" if cause else "")
        if code:
            return f"process {worker.pid} ended with code {code}"
    return None


def warn_of_shared_memory(workers: int) -> str | None:
    """A warning if batches of data workers will not fit into /dev/shm."""
    free = free_shared_memory()
    if not workers or free is None or free >= _ENOUGH_SHARED:
        return None
    return (
        f"warning: /dev/shm has {free / 2**20:.0f} MiB free: batches of data workers that do not fit are sent through pipes, "
        "which is slower; give a container more with --shm-size=8g"
    )


def _start_method(source: Source) -> str:
    """Workers are forked from a clean server process: a fork of the training process would inherit locks held by its threads.
    Only a user's own Dataset is forked directly, since it may live in memory or in a notebook."""
    method = "fork" if source.is_user_dataset else "forkserver"
    if method not in torch.multiprocessing.get_all_start_methods():
        return "spawn"
    if method == "forkserver":
        modules = ["worker_signals", "loader", "folder"]
        preload = [*(f"kineograph.data.{name}" for name in modules), type(source).__module__]
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([name for name in preload if name != "__main__"])
    return method


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Keep new processes from importing the started script, which would run again without a main guard. Workers never need it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _init_worker(worker: int) -> None:
    """Ignore signals to the process group: the main process decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


_running: WeakSet[BaseProcess] = WeakSet()


@atexit.register
def _kill_workers() -> None:
    """At exit Python waits for workers, which ignore SIGTERM. Some are left if an error, such as a closed pipe, holds their loader."""
    for worker in _running:
        with suppress(ValueError, AssertionError):  # closed already, or of another process
            worker.kill()


def _stop_workers(results: Any) -> None:
    """Stop the workers now. They ignore SIGTERM, so a stuck one is killed."""
    workers = list(results._workers)
    try:
        results._shutdown_workers()
    except RuntimeError as error:  # torch reports a killed worker while joining it
        if "DataLoader worker" not in str(error):
            raise
    for worker in workers:
        if worker.is_alive():
            worker.kill()
