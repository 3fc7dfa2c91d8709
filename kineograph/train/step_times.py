"""Where a step's time goes: forward, backward, optimizer, and waiting for other processes.

On a GPU the marks are CUDA events, read once the Trainer has fetched that step's numbers and they lie in the past; on a CPU they are
readings of the clock. Only a few steps between two reports are measured. The others merely leave a word of where they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from kineograph.core import distributed, heartbeat
from kineograph.train.config import TrainConfig
from kineograph.train.phases import is_logged

PARTS = ("forward", "backward", "optimizer", "sync")
SAMPLED = 2  # steps between two reports that are measured, at most


def is_measured(config: TrainConfig, step: int) -> bool:
    """Whether the update to `step` completed steps is one of those. A reported one always is."""
    apart = -(-config.log_every // SAMPLED)
    return is_logged(config, step) or step % config.log_every % apart == 0


class StepTimes:
    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._steps: list[list[tuple[str | None, Any]]] = []  # of each measured step: what began when
        self._part: str | None = None
        self._measuring = False

    @contextmanager
    def step(self, measured: bool) -> Iterator[None]:
        """Around one step."""
        self._measuring = measured
        if measured:
            self._steps.append([])
            self._mark(None)
            self.align()
        try:
            yield
        finally:
            if measured:
                self._mark(None)
            self._measuring = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside belongs to `name`, and to nothing around it."""
        before, self._part = self._part, name
        heartbeat.set_activity(name)
        if self._measuring:
            self._mark(name)
        try:
            yield
        finally:
            self._part = before
            if before is not None:
                heartbeat.set_activity(before)
            if self._measuring:
                self._mark(before)

    def align(self) -> None:
        """In a measured step, let all processes begin what follows at the same time: whoever comes early waits here, in `sync`, and not
        inside the next part, where it could not be told from work. The step would wait for the last one later in any case."""
        if self._measuring and distributed.is_active():
            with self.part("sync"):
                dist.all_reduce(torch.zeros((), device=self._device))

    def _mark(self, name: str | None) -> None:
        now: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            now.record()
        self._steps[-1].append((name, now))

    def read(self) -> dict[str, float]:
        """Milliseconds a step of each part: the mean of what was measured since the last call and has come to its end."""
        count = 0  # steps end in the order in which they began
        while count < len(self._steps) and (not self._on_gpu or self._steps[count][-1][1].query()):
            count += 1
        finished, self._steps = self._steps[:count], self._steps[count:]
        sums = dict.fromkeys(PARTS, 0.0)
        for marks in finished:
            for (name, began), (_, ended) in pairwise(marks):
                if name is not None:
                    sums[name] += began.elapsed_time(ended) if self._on_gpu else 1000 * (ended - began)
        return {name: total / count for name, total in sums.items()} if count else {}
