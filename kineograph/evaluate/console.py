"""Where tables are printed: as wide as the terminal, and never squeezed into 80 columns in a pipe or a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kineograph.core.batch import Batch, Shape
from kineograph.evaluate.metric_api import Metric

WIDE = 160


def open_console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE)


_LOOKED_AT = ("real", "generated", "reconstruction")


class Watching:
    """How many batches are judged, and what is done with the present one. Unless it is `shown`, it tells nothing."""

    def __init__(self) -> None:
        self._bar: Any = None

    @contextmanager
    def shown(self, stage: str, batches: int) -> Iterator[None]:
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        words = (TextColumn("judging {task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        columns = (*words, TimeRemainingColumn(), TextColumn("{task.fields[doing]}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as self._bar:
            self._task = self._bar.add_task(stage, total=batches, doing="")
            yield
        self._bar = None

    def each(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """One more is judged when the next is asked for."""
        for batch in batches:
            yield batch
            if self._bar is not None:
                self._bar.advance(self._task)

    def doing(self, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, doing=what)

    def looked(self, extractor: str, done: int, total: int) -> None:
        """An extractor has seen so many pictures or clips of a batch."""
        self.doing(f"{extractor.split()[0]} {done:,} of {total:,}")


def beforehand(
    stage: str, device: torch.device, count: int, shape: Shape, metrics: Mapping[str, Metric], compiled: bool = False
) -> str:
    """What judging a stage will compute, in a line: which metrics, on which device, and how much an extractor has to look at."""
    line = f"judging {stage} on {device}: {count} samples for {', '.join(metrics)}"
    seen: dict[str, set[str]] = {}  # extractor → what it looks at
    clips = set()
    for metric in metrics.values():
        label = getattr(getattr(metric, "extractor", metric), "label", None)
        if label is not None:
            seen.setdefault(label, set()).update(metric.needs & set(_LOOKED_AT))
            if "clips" in metric.needs:
                clips.add(label)
    for label, kinds in seen.items():
        many = count * len(kinds) * (1 if label in clips else shape.frames)
        line += f"; {label.split()[0]} looks at {many:,} {'clips' if label in clips else 'pictures'}"
    if compiled:
        line += "; the first batches wait for the compiler"
    if seen and device.type == "cpu":
        line += " (slow on a CPU: --metrics leaves some out, --samples takes fewer)"
    return line
