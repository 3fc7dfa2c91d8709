"""What a stage's frozen encoders make of its data for a cache; compiled once that pays."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from kineograph.core.batch import Batch
from kineograph.core.task import Task, compile_task

PAYS = 240.0
"""Seconds of encoding still ahead, for each shape of clips, from which on encoders are compiled: that takes one or two minutes itself, and
most small sets are encoded by then."""


class Encoders:
    """`precompute` of a task, for as many rows at a time as training takes: what fits there fits here."""

    def __init__(
        self, task: Task, device: torch.device, may_compile: bool, shapes: int, note: Callable[[str], None]
    ) -> None:
        self.task, self.device, self.note = task, device, note
        self.compiles = may_compile and device.type == "cuda"
        self.shapes = shapes
        self.compiled = False
        self._warm = False

    def encode(self, batch: Batch, rows: int, left: int) -> dict[str, Tensor]:
        """`left`: how many items this process will have to encode after these."""
        began = time.perf_counter()
        places = range(len(batch))
        parts = [self._part(batch, places[start : start + rows], rows) for start in places[::rows]]
        made = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self.compiles and not self.compiled:
            torch.cuda.synchronize(self.device)
            if self._warm:  # the first batch also looks for the fastest kernels
                self._consider((time.perf_counter() - began) / len(batch) * left)
            self._warm = True
        return made

    def _part(self, batch: Batch, places: range, rows: int) -> dict[str, Tensor]:
        """Where encoders are compiled, fewer rows than usual are filled up: another number of them would be another compilation."""
        whole = [*places, *([places[-1]] * (rows - len(places) if self.compiled else 0))]
        made = self.task.precompute(batch.rows(whole).to(self.device))
        return {name: value[: len(places)] for name, value in made.items()}

    def _consider(self, seconds: float) -> None:
        if seconds < PAYS * self.shapes:
            return
        self.note(f"about {seconds / 60:.0f} minutes of encoding are left: the encoders are compiled for it")
        for stage in self.task.stages.values():
            compile_task(stage, graphs=False)
        self.compiled = True
