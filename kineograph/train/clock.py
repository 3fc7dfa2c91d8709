"""How long training takes: throughput between two reports, without pauses for judging, pictures and saving."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    def __init__(self, before: float) -> None:
        """`before`: seconds that the stage trained before this process took over."""
        self._before = before
        self._begin = self._mark = time.monotonic()
        self._samples = self._steps = 0
        self._waited = self._pause = 0.0

    def waiting(self) -> _Span:
        return _Span(self, "_waited")

    def paused(self) -> _Span:
        return _Span(self, "_pause")

    def count(self, samples: int) -> None:
        self._samples += samples
        self._steps += 1

    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._begin

    def report(self, device: torch.device) -> dict[str, Any]:
        seconds = max(1e-9, time.monotonic() - self._mark - self._pause)
        steps = max(1, self._steps)
        record = {
            "time/samples_per_second": self._samples / seconds,
            "time/step_ms": 1000 * seconds / steps,
            "time/data_ms": 1000 * self._waited / steps,
            "time/elapsed": self.elapsed(),
        }
        if device.type == "cuda":
            record["time/memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        self._mark, self._samples, self._steps, self._waited, self._pause = time.monotonic(), 0, 0, 0.0, 0.0
        return record


class _Span:
    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        setattr(self.clock, self.name, getattr(self.clock, self.name) + time.monotonic() - self.started)
