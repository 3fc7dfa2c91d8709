"""How far a stage is by the clock, with `train.minutes`. The first process's clock decides for all."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from kineograph.core import distributed
from kineograph.core.errors import InputError


class Share(NamedTuple):
    """Shares of a stage's schedule, 0 … 1, before and after its last step."""

    before: float = 0.0
    now: float = 0.0


NO_SHARE = Share()


def next_share(share: float, spent: float, left: float) -> float:
    """The share after a step that took `spent` seconds and left `left`: the rest of the schedule is spread evenly over the rest of the time.

    With steps of equal length this is the share of the time. A pause (compilation, validation, a resume) does not move
    the schedule: what comes after it goes faster.
    """
    return 1.0 if left <= 0 else share + (1 - share) * spent / (spent + left)


class StageClock:
    """Counts the seconds of a stage, over all processes that have trained it one after the other."""

    def __init__(self, elapsed: float = 0.0, started: float | None = None) -> None:
        """`elapsed`: seconds in earlier processes; `started`: when this one began, by time.monotonic."""
        self._elapsed = elapsed
        self._started = time.monotonic() if started is None else started
        # Until when the schedule has moved; None in the first step of a process, in which most tasks compile.
        self._counted: float | None = None

    def seconds(self) -> float:
        return self._elapsed + time.monotonic() - self._started

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The time inside does not move the schedule."""
        began = self.seconds()
        try:
            yield
        finally:
            if self._counted is not None:
                self._counted += self.seconds() - began

    def end_step(self, share: float, budget: float, compiled: bool = False) -> float:
        """The share of the schedule after a step, the same in all processes. `compiled`: the step was compiled in its time.

        A step counts from the end of the one before: the host waits for a GPU in between, when it logs.
        """
        now = self.seconds()
        spent = 0.0 if self._counted is None or compiled else now - self._counted
        self._counted = now
        return float(distributed.broadcast_object(next_share(share, spent, budget - now)))


def read_share(state: Mapping[str, Any], budget: float | None) -> Share:
    """The share that a checkpoint's state holds, for the time that the stage has now."""
    if budget is None:
        return NO_SHARE
    clock = state.get("clock")
    if clock is None:  # trained by steps until now
        used = min(1.0, state.get("elapsed", 0.0) / budget)
        return Share(used, used)
    numbers = [clock.get(key) for key in ("before", "now", "seconds")]
    if not all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers):
        raise InputError(f"a checkpoint's state.json has no usable clock ({clock}): delete that checkpoint")
    before, now, seconds = numbers
    scale = seconds / budget
    return Share(min(1.0, before * scale), min(1.0, now * scale))
