"""Saving in the background: the state is copied to the host, then written while training goes on.

One thread does everything in the order in which it was asked: write a checkpoint, note a finished phase in it, prune; also pictures, which are
there before their phase is noted as finished. A save begins when the
one before is complete, so two never overlap and the host holds one copy. With many processes each writes its own part (distributed_checkpoint.py); the first
one writes state and manifest and gives the folder its name after all have told that their part lies on disk. What fails anywhere fails
everywhere: `check`, which costs nothing, and `wait` raise it in the thread that trains.
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

import torch.distributed as dist
from torch import Tensor

from kineograph.core import distributed, heartbeat
from kineograph.core.errors import RunFailed, Stopped
from kineograph.train import checkpoint
from kineograph.train.dtensors import full_tensor
from kineograph.train.staging import Staging

PATIENCE = timedelta(hours=1)  # for the slowest process's part


class Saver:
    """Writes the checkpoints of one stage. Every process calls the same methods in the same order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._asked: list[Future[None]] = []
        self._failed = False
        # A group of its own: its messages must not mix with those of training, and it speaks on the host.
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if distributed.world() > 1 else None

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Checkpoint `step`, as everything is now. Returns once it is copied."""
        self.wait()
        staged = {name: self._copied(name, group) for name, group in tensors.items()}
        text = json.dumps({"step": step, **state}, ensure_ascii=False)
        self._ask(lambda: self._write(step, staged, text))

    def then(self, work: Callable[[], None]) -> None:
        """Something that the first process writes by itself, after what was asked before."""
        if distributed.is_first():
            self.check()
            self._ask(lambda: self._do(work))

    def check(self) -> None:
        """Raise what went wrong in the background."""
        while self._asked and self._asked[0].done():
            self._asked.pop(0).result()

    def wait(self) -> None:
        """Until everything is written."""
        if self._asked:
            heartbeat.set_activity("waiting for a checkpoint to be written")
        while self._asked:
            self._asked.pop(0).result()

    def idle(self) -> bool:
        """Whether everything is written."""
        self.check()
        return not self._asked

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever ends the run, what was begun is written first. A stop that could not be saved is a failure; any other error comes first."""
        try:
            with suppress(*(() if kind is None or issubclass(kind, Stopped) else (Exception,))):
                self.wait()
        finally:
            self._thread.shutdown()
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            raise RunFailed(
                f"cannot write to {self.folder}: {error}; make room or permission and run the same command to go on"
            ) from error

    def _ask(self, work: Callable[[], None]) -> None:
        self._asked.append(self._thread.submit(self._unless_failed, work))

    def _unless_failed(self, work: Callable[[], None]) -> None:
        """After a failure nothing more is touched: what was asked next rests on what was not written."""
        if self._failed:
            return
        try:
            work()
            heartbeat.beat()
        except BaseException:
            self._failed = True
            raise

    def _copied(self, kind: str, group: Mapping[str, Tensor]) -> dict[str, Any]:
        if distributed.world() == 1:
            full = {name: full_tensor(value).detach() for name, value in group.items()}
            return {name: self._staging.copy(f"{kind}/{name}", value) for name, value in full.items()}
        from kineograph.train.distributed_checkpoint import slices_to_write

        return {
            name: replace(piece, local=self._staging.copy(f"{kind}/{name}", piece.local))
            for name, piece in slices_to_write(group)
        }

    def _write(self, step: int, staged: dict[str, dict[str, Any]], text: str) -> None:
        """In the background."""
        self._staging.finish()
        if self._group is None:
            checkpoint.write(self.folder, step, staged, text)
        else:
            _write_together(self.folder, step, staged, text, self._group)


# Many processes --------------------------------------------------------------------------------------------------


def _write_together(folder: Path, step: int, staged: dict[str, dict[str, Any]], text: str, group: Any) -> None:
    """All processes of `group`: each its parts, the first one the rest, after all."""
    from kineograph.train import distributed_checkpoint

    temporary: Path | None = None
    try:
        place = _agree(group, lambda: str(checkpoint.prepare(folder, step) or "") if distributed.is_first() else "")[0]
        if not place:
            return
        temporary = Path(place)
        own: dict[str, Path] = {}
        for name, parts in staged.items():
            own |= {
                f"{name}/{path.name}": path for path in distributed_checkpoint.write(temporary / name, parts, group)
            }
            heartbeat.beat()
        files = _agree(group, lambda: {name: checkpoint.flush_and_hash(path) for name, path in own.items()})
        position = _agree(group, lambda: json.loads(text).get("data") or {})

        def commit() -> None:
            if distributed.is_first():
                state = json.loads(text) | {"processes": distributed.world()}
                if position[0]:  # of a stream, the process that is furthest behind decides: rather twice than never
                    state["data"] = {key: min(found[key] for found in position) for key in position[0]}
                listed = {name: entry for part in files for name, entry in part.items()}
                checkpoint.commit(Path(place), step, json.dumps(state, ensure_ascii=False), listed)

        _agree(group, commit)
    except (_Elsewhere, OSError) as error:
        raise checkpoint.save_error(folder, step, temporary, error) from error
    except Exception as error:  # gloo's, mostly
        told = distributed.describe_peer_failure(error) or f"{type(error).__name__}: {error}"
        raise checkpoint.save_error(folder, step, temporary, told, "see to that") from error


class _Elsewhere(Exception):
    """What went wrong in one of the processes, told to all."""


def _agree(group: Any, work: Callable[[], Any]) -> list[Any]:
    """Do something everywhere and tell everybody what came of it. → the answers in the order of ranks; or the first failure, everywhere."""
    try:
        told: dict[str, Any] = {"answer": work()}
    except Exception as error:
        told = {"failed": f"process {distributed.rank()}: {error}"}
    heard = distributed.all_gather_object(told, group)
    for answer in heard:
        if "failed" in answer:
            raise _Elsewhere(answer["failed"])
    return [answer["answer"] for answer in heard]
