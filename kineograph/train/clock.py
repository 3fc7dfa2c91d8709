"""How long training takes: throughput between two reports without pauses for judging, pictures and saving; parts of a step; memory;
and which process the others wait for."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from kineograph.core import distributed
from kineograph.train.step_times import PARTS, StepTimes

OWN = ("data", "forward", "backward", "optimizer")  # what a process does by itself; the rest is waiting for others
BEHIND = 0.1  # of the usual process's own time: so much more is worth a word …
IN_A_ROW = 3  # … when it is the same process in so many reports


@dataclass(frozen=True)
class Work:
    """Arithmetic of a step."""

    flops: float  # over all processes, without what is computed twice to save memory
    peak: float | None = None  # floating-point operations a second that one device could do


@dataclass(frozen=True)
class Slowest:
    """The process that the others wait for."""

    rank: int
    part: str  # where it loses most
    behind: float  # ms a step over the usual process's own time
    share: float  # of that time

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is the slowest: {self.behind:.3g} ms a step behind the median, most of it in {self.part}"
        )


class Clock:
    def __init__(
        self,
        before: float,
        device: torch.device | str = "cpu",
        times: StepTimes | None = None,
        work: Work | None = None,
    ) -> None:
        """`before`: seconds that the stage trained before this process took over."""
        self._before, self._device, self._work = before, torch.device(device), work
        self._times = times or StepTimes(self._device)
        self._begin = self._mark = time.monotonic()
        self._samples = self._steps = 0
        self._waited = self._pause = 0.0
        self._known: tuple[int, int] = (0, 0)  # the slowest rank, and in how many reports in a row
        self.mine: dict[str, float] = {}  # this process's own parts of the last report, ms

    def waiting(self) -> _Span:
        return _Span(self, "_waited")

    def paused(self) -> _Span:
        return _Span(self, "_pause")

    def count(self, samples: int) -> None:
        self._samples += samples
        self._steps += 1

    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._begin

    def report(self) -> tuple[dict[str, Any], Slowest | None]:
        """`time/…` of the steps since the last report: means over processes, memory of the fullest; and who was slowest.
        Every process calls, at the same step, after it has fetched that step's numbers."""
        seconds = max(1e-9, time.monotonic() - self._mark - self._pause)
        steps = max(1, self._steps)
        self.mine = {"data": 1000 * self._waited / steps, **(dict.fromkeys(PARTS, 0.0) | self._times.read())}
        memory = {"host_memory_gib": _host_memory() / 2**30}
        if self._device.type == "cuda":
            memory["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        names = [*self.mine, *memory]
        table = distributed.all_gather_floats([*self.mine.values(), *memory.values()])
        columns = dict(zip(names, zip(*table, strict=True), strict=True))  # name → value of each rank
        record = {
            "time/samples_per_second": self._samples / seconds,
            "time/step_ms": 1000 * seconds / steps,
            **{f"time/{part}_ms": statistics.fmean(columns[part]) for part in self.mine},
            "time/elapsed": self.elapsed(),
            **{f"time/{name}": max(columns[name]) for name in memory},
        }
        if self._work is not None:
            rate = self._work.flops * steps / seconds / distributed.world()
            record["time/tflops"] = rate / 1e12
            if self._work.peak:
                record["time/mfu"] = rate / self._work.peak
        slowest = slowest_of({name: columns[name] for name in OWN}) if distributed.world() > 1 else None
        if slowest is not None:
            record["time/slowest_rank"] = slowest.rank
            record["time/slowest_behind_ms"] = slowest.behind
        self._mark, self._samples, self._steps, self._waited, self._pause = time.monotonic(), 0, 0, 0.0, 0.0
        return record, slowest

    def is_worth_a_word(self, slowest: Slowest) -> bool:
        """Whether one process has been well behind for a while. True once, until another one is."""
        rank, times = self._known
        if slowest.share < BEHIND:
            self._known = (slowest.rank, 0)
            return False
        times = times + 1 if rank == slowest.rank else 1
        self._known = (slowest.rank, times)
        return times == IN_A_ROW


def slowest_of(columns: dict[str, tuple[float, ...]]) -> Slowest:
    """From each part's milliseconds by rank."""
    own = [sum(each) for each in zip(*columns.values(), strict=True)]
    rank = max(range(len(own)), key=own.__getitem__)
    usual = statistics.median_low(own)
    over = {part: values[rank] - statistics.median_low(values) for part, values in columns.items()}
    behind = own[rank] - usual
    return Slowest(rank, max(over, key=over.__getitem__), behind, behind / max(usual, 1e-9))


def _host_memory() -> int:
    """The most bytes of main memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Span:
    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        setattr(self.clock, self.name, getattr(self.clock, self.name) + time.monotonic() - self.started)
