"""The frozen encoders of a task, applied to batches; compiled where enough encoding is left to pay for it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kineograph.core.batch import Batch
from kineograph.core.capabilities import SupportsCaching
from kineograph.core.notes import Note
from kineograph.core.task import Task
from kineograph.train.compile import compile_task

COMPILE_AFTER = 240.0
"""Seconds of encoding left, for each clip shape, from which compiling pays: it takes one or two minutes itself."""


class Encoders:
    """`Task.precompute`, in micro-batches of the size that training uses: what fits there fits here."""

    def __init__(self, task: Task, device: torch.device, may_compile: bool, shapes: int, note: Note) -> None:
        """`shapes`: how many clip shapes there are; each is compiled for itself. `may_compile`: if the time left makes it worthwhile."""
        self.task, self.device, self.note, self.shapes = task, device, note, shapes
        self.may_compile = may_compile and device.type == "cuda"
        self.compiled = False
        self._warm = False

    def encode(self, batch: Batch, rows: int, remaining: int) -> dict[str, Tensor]:
        """Encode a batch, `rows` at a time. `remaining`: items that this process encodes after these."""
        start = time.perf_counter()
        indices = range(len(batch))
        parts = [self._encode_rows(batch, indices[first : first + rows], rows) for first in indices[::rows]]
        fields = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self.may_compile and not self.compiled:
            torch.cuda.synchronize(self.device)
            # The first batch also searches for the fastest kernels, so its time says little.
            if self._warm:
                self._compile_if_worthwhile((time.perf_counter() - start) / len(batch) * remaining)
            self._warm = True
        return fields

    def _encode_rows(self, batch: Batch, indices: range, rows: int) -> dict[str, Tensor]:
        # Compiled encoders always get `rows` rows: another number would compile them again.
        padding = rows - len(indices) if self.compiled else 0
        assert isinstance(self.task, SupportsCaching)
        fields = self.task.precompute(batch.rows([*indices, *[indices[-1]] * padding]).to(self.device))
        return {name: value[: len(indices)] for name, value in fields.items()}

    def _compile_if_worthwhile(self, seconds: float) -> None:
        if seconds < COMPILE_AFTER * self.shapes:
            return
        self.note(f"about {seconds / 60:.0f} minutes of encoding are left: compiling the encoders")
        for stage in self.task.stages.values():
            compile_task(stage, graphs=False)
        self.compiled = True
