"""Terminal output of evaluations: the console for tables, the announcement and the progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import torch

from kineograph.core.batch import Shape
from kineograph.evaluate.metric_api import FeatureMetric, Metric, PixelKind

T = TypeVar("T")


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class ProgressBar:
    """Batches done, and the current activity. Shown on stderr, on a terminal only, inside `show`."""

    def __init__(self) -> None:
        self._bar: Any = None

    @contextmanager
    def show(self, stage: str, batches: int) -> Iterator[None]:
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("evaluating {task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[activity]}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as self._bar:
            self._task = self._bar.add_task(stage, total=batches, activity="")
            yield
        self._bar = None

    def track(self, batches: Iterator[T]) -> Iterator[T]:
        for batch in batches:
            yield batch
            if self._bar is not None:
                self._bar.advance(self._task)

    def set_activity(self, activity: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, activity=activity)


def describe_work(
    stage: str, device: torch.device, count: int, shape: Shape, metrics: Mapping[str, Metric], compiled: bool
) -> str:
    """One line before an evaluation starts: the metrics, the device, and how much each extractor has to process."""
    line = f"evaluating {stage} on {device}: {count} samples for {', '.join(metrics)}"
    inputs: dict[str, set[str]] = {}  # extractor → kinds of pixels
    of_clips = set()
    for metric in metrics.values():
        if isinstance(metric, FeatureMetric):
            inputs.setdefault(metric.label, set()).update(metric.needs & set(get_args(PixelKind)))
            if "clips" in metric.needs:
                of_clips.add(metric.label)
    for label, kinds in inputs.items():
        total = count * len(kinds) * (1 if label in of_clips else shape.frames)
        line += f"; {label.split()[0]} processes {total:,} {'clips' if label in of_clips else 'images'}"
    if compiled:
        line += "; the first batches wait for the compiler"
    if inputs and device.type == "cpu":
        line += " (slow on a CPU: select fewer --metrics or --samples)"
    return line
