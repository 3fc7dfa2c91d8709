"""`train.compile_ahead`: a second process compiles the stages of a run while their first steps run uncompiled.

It makes two steps of each stage with untrained weights. That fills torch's compile cache on disk, from which the run's own process
then compiles in seconds. Where the second process fails, the run compiles by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kineograph.cache.source import EXTRA_FIELDS
from kineograph.core import distributed
from kineograph.core.batch import Batch
from kineograph.core.capabilities import SupportsCaching
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.notes import Note, discard
from kineograph.core.run_folder import RunFolder, open_nofollow
from kineograph.core.task import Task
from kineograph.doctor.machine import release_memory
from kineograph.doctor.speed import read_two_batches
from kineograph.doctor.step_trace import fill_text_embeddings
from kineograph.run.open_data import open_data
from kineograph.run.plan import make_plan
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan, StagePlan
from kineograph.train.compile import is_compiled
from kineograph.train.stepper import Stepper


class CompileAhead:
    """The second process of a run; ends with the block."""

    def __init__(self, folder: RunFolder, stages: Sequence[str], note: Note) -> None:
        self._note, self._stages = note, set(stages)
        self._log = folder.path / "logs" / "compile.log"
        self._log.parent.mkdir(exist_ok=True)
        self._done = tempfile.TemporaryDirectory(prefix="kineo-compile-")
        command = [sys.executable, "-P", "-m", __name__, str(folder.path), self._done.name, *stages]
        with open(self._log, "wb", opener=open_nofollow) as log:
            # A session of its own: a signal from the terminal is for training, which ends this process.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def is_ready(self, stage: str) -> bool:
        """Whether the stage should be compiled now: the cache is filled, or will never be."""
        if (Path(self._done.name) / stage).exists():
            return True
        if self._process.poll() is None:
            return False
        if stage in self._stages:
            self._stages.discard(stage)
            self._note(f"{stage}: was not compiled ahead, so it is compiled now (see {self._log})")
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the compiler's workers; nothing is saved there
            self._process.wait()
        self._done.cleanup()


def select_stages(plan: Plan) -> list[StagePlan]:
    """The stages to compile ahead."""
    return [
        stage
        for stage in plan.stages
        if stage.train.compile_ahead
        and not stage.spec.config.skip
        and is_compiled(stage.train, distributed.resolve_device(stage.train.device))
    ]


def compile_stages(folder: RunFolder, names: Sequence[str], done: Path) -> None:
    """Fill the compile cache for these stages, in order. `done` gets an empty file for each."""
    plan, data, parent = make_plan(folder.config()), dict[str, StageData](), os.getppid()
    for stage in plan.stages:
        if not stage.spec.config.skip:
            data[stage.name] = open_data(stage, plan.seed, None, discard, folder.path, data)
    for stage in plan.stages:
        if stage.name in names and os.getppid() == parent:
            _compile_stage(plan, stage, data)
            (done / stage.name).touch()
            torch.compiler.reset()
            release_memory()


def _compile_stage(plan: Plan, stage: StagePlan, data: dict[str, StageData]) -> None:
    train, device = stage.train, distributed.resolve_device(stage.train.device)
    enable_flash_attention_3(device)
    task = PlanBuilder(plan, data, discard).build(stage.name, device)
    stepper = Stepper(task, train, {name: stage.players[name] for name in task.players}, device)
    batch = _make_batch(task, stage, data[stage.name], device)
    if batch.pixels is not None:
        stepper.compile_stages()
    task.train()
    for step in {0, train.steps - 1}:  # players may start late
        stepper.step(step, [batch])


def _make_batch(task: Task, stage: StagePlan, data: StageData, device: torch.device) -> Batch:
    """A micro-batch as training reads it, from the cache or from the data."""
    (batch, _), _ = read_two_batches(data, stage.train.micro_batch_size)
    if not (isinstance(task, SupportsCaching) and stage.spec.config.cache in (True, "if_possible")):
        return batch
    batch = fill_text_embeddings(batch, task)
    with torch.no_grad():
        fields: dict[str, Any] = task.precompute(batch.to(device))
    if "frame_mask" in fields and bool(fields["frame_mask"].all()):  # as batches of unpadded clips: without one
        fields["frame_mask"] = None
    batch = replace(batch, pixels=None)
    for name, value in fields.items():
        if name in EXTRA_FIELDS:
            batch.extra[name] = value
        else:
            setattr(batch, name, value)
    return batch


if __name__ == "__main__":
    compile_stages(RunFolder(Path(sys.argv[1])), sys.argv[3:], Path(sys.argv[2]))
