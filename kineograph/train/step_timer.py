"""Where training time goes: the `time/*` metrics, which docs/launching.md lists.

The parts of a step are measured in a few steps between two reports: with CUDA events, read after the step's numbers
were fetched, or with the clock on a CPU. Throughput leaves out the pauses for saving, judging and drawing.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from kineograph.core import distributed
from kineograph.train.config import TrainConfig
from kineograph.train.phases import is_logged

PARTS = ("forward", "backward", "optimizer", "sync")
OWN_PARTS = ("data", "forward", "backward", "optimizer")  # without waiting for other ranks
MEASURED_STEPS = 2  # at most, between two reports
SLOW_SHARE = 0.1  # a rank is slow when it takes so much longer than the median rank …
SLOW_REPORTS = 3  # … in so many reports in a row


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one step over all ranks, without recomputation, and a device's peak per second."""

    flops: float
    peak: float | None = None


@dataclass(frozen=True)
class SlowestRank:
    rank: int
    part: str  # where it loses most time
    behind_ms: float  # per step, to the median rank
    share: float  # of the median rank's time

    def __str__(self) -> str:
        return f"rank {self.rank} is the slowest: {self.behind_ms:.3g} ms a step behind the median, most of it in {self.part}"


def is_measured(config: TrainConfig, step: int) -> bool:
    """Whether the parts of the update to `step` are measured: always when it is logged."""
    interval = -(-config.log_every // MEASURED_STEPS)
    return is_logged(config, step) or step % config.log_every % interval == 0


class StepTimer:
    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._uses_events = self._device.type == "cuda"
        self._marks: list[list[tuple[str | None, Any]]] = []  # of each measured step: (part that begins, time)
        self._is_measuring = False
        self._slow: tuple[int, int] = (0, 0)  # the slowest rank, and in how many reports in a row
        self.own_ms: dict[str, float] = {}  # this rank's parts in the last report
        self.reset()

    def begin(self) -> None:
        """Begin to measure a stage. The peak of a GPU's memory would otherwise be that of the stages before, too."""
        if self._uses_events:
            torch.cuda.reset_peak_memory_stats(self._device)
        self.reset()

    def reset(self) -> None:
        """Begin a new interval between two reports."""
        self._began = time.monotonic()
        self._samples = self._steps = 0
        self._seconds = {"data": 0.0, "pause": 0.0}

    # Inside a step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, is_measured: bool) -> Iterator[None]:
        self._is_measuring = is_measured
        if is_measured:
            self._marks.append([])
            self._mark(None)
            self.align()
        try:
            yield
        finally:
            self._is_measuring = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what runs inside as part `name`. Parts do not nest."""
        self._mark(name)
        try:
            yield
        finally:
            self._mark(None)

    def align(self) -> None:
        """In a measured step, let all ranks begin what follows together, so that waiting counts as `sync` and not as work."""
        if self._is_measuring and distributed.is_active():
            with self.part("sync"):
                dist.all_reduce(torch.zeros((), device=self._device))

    def _mark(self, name: str | None) -> None:
        if not self._is_measuring:
            return
        now: Any = torch.cuda.Event(enable_timing=True) if self._uses_events else time.perf_counter()
        if self._uses_events:
            now.record()
        self._marks[-1].append((name, now))

    # Between steps ---------------------------------------------------------------------------------------------------

    def wait_for_device(self) -> None:
        """Wait until a GPU has computed the steps that the host gave it."""
        if self._uses_events:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def outside(self, what: Literal["data", "pause"]) -> Iterator[None]:
        """Count the time inside as waiting for data, or as a pause that the throughput leaves out."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[what] += time.monotonic() - began

    def count(self, samples: int) -> None:
        self._samples += samples
        self._steps += 1

    def read_parts(self) -> dict[str, float]:
        """Mean milliseconds of each part over the steps that were measured, and have ended, since the last call."""
        count = 0
        while count < len(self._marks) and (not self._uses_events or self._marks[count][-1][1].query()):
            count += 1
        ended, self._marks = self._marks[:count], self._marks[count:]
        sums = dict.fromkeys(PARTS, 0.0)
        for marks in ended:
            for (name, begin), (_, end) in pairwise(marks):
                if name is not None:
                    sums[name] += begin.elapsed_time(end) if self._uses_events else 1000 * (end - begin)
        return {name: total / count for name, total in sums.items()} if count else {}

    def report(self, work: StepFlops | None = None) -> tuple[dict[str, Any], SlowestRank | None]:
        """`time/*` since the last report: means over ranks, memory of the fullest rank; and the slowest rank of several.

        Collective: every rank calls it at the same step, after fetching that step's numbers.
        """
        seconds = max(1e-9, time.monotonic() - self._began - self._seconds["pause"])
        steps = max(1, self._steps)
        self.own_ms = {"data": 1000 * self._seconds["data"] / steps, **dict.fromkeys(PARTS, 0.0), **self.read_parts()}
        memory = {"host_memory_gib": _peak_host_memory() / 2**30}
        if self._device.type == "cuda":
            memory["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        table = distributed.all_gather_floats([*self.own_ms.values(), *memory.values()])
        by_rank = dict(zip([*self.own_ms, *memory], zip(*table, strict=True), strict=True))
        record = {
            "time/samples_per_second": self._samples / seconds,
            "time/step_ms": 1000 * seconds / steps,
            **{f"time/{part}_ms": statistics.fmean(by_rank[part]) for part in self.own_ms},
            **{f"time/{name}": max(by_rank[name]) for name in memory},
        }
        if work is not None:
            rate = work.flops * steps / seconds / distributed.world()
            record["time/tflops"] = rate / 1e12
            if work.peak:
                record["time/mfu"] = rate / work.peak
        slowest = find_slowest_rank({part: by_rank[part] for part in OWN_PARTS}) if distributed.world() > 1 else None
        if slowest is not None:
            record["time/slowest_rank"] = slowest.rank
            record["time/slowest_behind_ms"] = slowest.behind_ms
        self.reset()
        return record, slowest

    def should_warn(self, slowest: SlowestRank) -> bool:
        """Whether the same rank was slow in SLOW_REPORTS reports in a row. True once, until another rank is."""
        rank, reports = self._slow
        if slowest.share < SLOW_SHARE:
            reports = 0
        else:
            reports = reports + 1 if rank == slowest.rank else 1
        self._slow = (slowest.rank, reports)
        return reports == SLOW_REPORTS


def find_slowest_rank(parts: dict[str, tuple[float, ...]]) -> SlowestRank:
    """From the milliseconds of each part by rank."""
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    rank = max(range(len(totals)), key=totals.__getitem__)
    median = statistics.median_low(totals)
    excess = {part: values[rank] - statistics.median_low(values) for part, values in parts.items()}
    behind = totals[rank] - median
    return SlowestRank(rank, max(excess, key=excess.__getitem__), behind, behind / max(median, 1e-9))


def _peak_host_memory() -> int:
    """The most bytes of main memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
