"""Saves checkpoints in the background: copies the state to the host, then writes it while training goes on.

One thread does everything in order: write a checkpoint, record a finished phase in it, prune, write samples. A save
waits for the one before, so the host holds one copy. With several ranks each writes its own shards; rank 0 adds the
state and the manifest and renames the folder after all shards are on disk. A failure on one rank fails on all: `check`
and `wait` raise it in the training thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kineograph.core import distributed, heartbeat
from kineograph.core.errors import RunFailed, Stopped
from kineograph.core.text_file import parse_json
from kineograph.train import checkpoint
from kineograph.train.dtensors import to_local

TIMEOUT = timedelta(hours=1)  # for the slowest rank's shards


class HostBuffers:
    """Host copies of tensors, reused from save to save. For GPU tensors they are pinned, so that copying is asynchronous."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._last_copy: Any = None  # a CUDA event
        self._device: torch.device | None = None  # to which it belongs

    def copy(self, name: str, value: Tensor) -> Tensor:
        """Return the buffer that holds `value` as it is now, once `wait` has returned."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = self._buffers[name] = _allocate_like(value)
        buffer.copy_(value, non_blocking=True)
        if value.is_cuda:
            self._last_copy, self._device = self._last_copy or torch.cuda.Event(), value.device
            self._last_copy.record(torch.cuda.current_stream(value.device))
        return buffer

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._last_copy is not None:
            # A new thread is on GPU 0, where waiting would create a context of half a gigabyte for every process.
            with torch.cuda.device(self._device):
                self._last_copy.synchronize()


def _allocate_like(value: Tensor) -> Tensor:
    if value.is_cuda:
        # torch rounds pinned tensors up to powers of two bytes: up to twice the memory, and no setting of all its versions avoids it.
        with suppress(RuntimeError):  # the system allows no more pinned memory: pageable memory is slower, but works
            return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return torch.empty(value.shape, dtype=value.dtype)


class Saver:
    """Writes the checkpoints of one stage. All ranks call the same methods in the same order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._queue: list[Future[None]] = []
        self._failed = False
        # A gloo group of its own, so that its messages do not mix with those of training.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if distributed.world() > 1 else None

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Save checkpoint `step` as everything is now. Returns once the tensors are being copied."""
        self.wait()
        copies = {kind: self._copy(kind, group) for kind, group in tensors.items()}
        text = json.dumps({"step": step, **state}, ensure_ascii=False)
        self._submit(lambda: self._write(step, copies, text))

    def then(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0, after everything that was queued before."""
        if distributed.is_first():
            self.check()
            self._submit(lambda: self._run(work))

    def check(self) -> None:
        """Raise an error that happened in the background."""
        while self._queue and self._queue[0].done():
            self._queue.pop(0).result()

    def wait(self) -> None:
        """Wait until everything is written."""
        while self._queue:
            self._queue.pop(0).result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is queued. An error here counts if the run ended well or was stopped; else the first error goes on."""
        try:
            with suppress(*(() if kind is None or issubclass(kind, Stopped) else (Exception,))):
                self.wait()
        finally:
            self._thread.shutdown()
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def _submit(self, work: Callable[[], None]) -> None:
        self._queue.append(self._thread.submit(self._run_unless_failed, work))

    def _run_unless_failed(self, work: Callable[[], None]) -> None:
        """Do nothing after a failure: later work relies on what could not be written."""
        if self._failed:
            return
        try:
            work()
            heartbeat.beat()
        except BaseException:
            self._failed = True
            raise

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            raise RunFailed(
                f"cannot write to {self.folder}: {error}; {checkpoint.DISK_REMEDY} and run the same command to go on"
            ) from error

    def _copy(self, kind: str, group: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy to the host what this rank writes."""
        if distributed.world() == 1:
            return {
                name: self._buffers.copy(f"{kind}/{name}", to_local(value).detach()) for name, value in group.items()
            }
        from kineograph.train.distributed_checkpoint import slices_to_write

        return {
            name: replace(piece, local=self._buffers.copy(f"{kind}/{name}", piece.local))
            for name, piece in slices_to_write(group)
        }

    def _write(self, step: int, copies: dict[str, dict[str, Any]], text: str) -> None:
        self._buffers.wait()
        if self._group is None:
            checkpoint.write(self.folder, step, copies, text)
        else:
            _write_shards(self.folder, step, copies, text, self._group)


# Several ranks -------------------------------------------------------------------------------------------------------


def _write_shards(folder: Path, step: int, copies: dict[str, dict[str, Any]], text: str, group: Any) -> None:
    """Write this rank's shards; rank 0 completes the checkpoint once all ranks have written theirs."""
    from kineograph.train import distributed_checkpoint

    temporary: Path | None = None
    try:
        path = _gather_results(
            group, lambda: str(checkpoint.prepare(folder, step) or "") if distributed.is_first() else ""
        )[0]
        if not path:
            return
        temporary = Path(path)
        own_files: dict[str, Path] = {}
        for kind, parts in copies.items():
            written = distributed_checkpoint.write(temporary / kind, parts, group)
            own_files |= {f"{kind}/{file.name}": file for file in written}
            heartbeat.beat()
        files = _gather_results(
            group, lambda: {name: checkpoint.flush_and_hash(file) for name, file in own_files.items()}
        )
        positions = _gather_results(group, lambda: parse_json(text).get("data") or {})

        def commit() -> None:
            if not distributed.is_first():
                return
            state = parse_json(text) | {"processes": distributed.world()}
            if positions[0]:  # of a stream: go on from the rank that is furthest behind, rather than skip samples
                state["data"] = {key: min(position[key] for position in positions) for key in positions[0]}
            all_files = {name: entry for part in files for name, entry in part.items()}
            checkpoint.commit(Path(path), step, json.dumps(state, ensure_ascii=False), all_files)

        _gather_results(group, commit)
    except (_RankFailed, OSError) as error:
        raise checkpoint.save_error(folder, step, temporary, error) from error
    except Exception as error:  # mostly of gloo
        reason = distributed.describe_group_failure(error) or f"{type(error).__name__}: {error}"
        raise checkpoint.save_error(folder, step, temporary, reason, "fix that") from error


class _RankFailed(Exception):
    """One rank failed; raised on all."""


def _gather_results(group: Any, work: Callable[[], Any]) -> list[Any]:
    """Do `work` on every rank. → the results by rank; or raise the first failure on every rank."""
    try:
        result: dict[str, Any] = {"result": work()}
    except Exception as error:
        result = {"failed": f"process {distributed.rank()}: {error}"}
    results = distributed.all_gather_object(result, group)
    for each in results:
        if "failed" in each:
            raise _RankFailed(each["failed"])
    return [each["result"] for each in results]
