"""What a person sees while a stage trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LINE_EVERY = 15.0  # seconds between lines when there is no terminal


class Progress:
    """Loss, samples a second and time left of one stage."""

    def __init__(self, stage: str, steps: int, quiet: bool = False, heard: Callable[[str], None] | None = None) -> None:
        """`heard` gets every note, whether it is shown or not."""
        self.stage = stage
        self.steps = steps
        self.quiet = quiet
        self.heard = heard
        self._bar: Any = None
        self._started = time.monotonic()
        self._first: int | None = None
        self._last_line = 0.0

    @contextmanager
    def shown(self, done: int) -> Iterator[Progress]:
        self._first = done
        if self.quiet or not sys.stderr.isatty():
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=Console(stderr=True)) as bar:
            self._bar, self._id = bar, bar.add_task(self.stage, total=self.steps, completed=done, numbers="")
            yield self
        self._bar = None

    def advance(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._id, completed=done)

    def numbers(self, done: int, loss: float, rate: float) -> None:
        """Freshly fetched numbers of step `done`."""
        text = f"loss {loss:.4g}  {rate:.0f} samples/s"
        if self._bar is not None:
            self._bar.update(self._id, completed=done, numbers=text)
        elif not self.quiet and (time.monotonic() - self._last_line > LINE_EVERY or done == self.steps):
            self._last_line = time.monotonic()
            taken = time.monotonic() - self._started
            left = taken / max(1, done - (self._first or 0)) * (self.steps - done)
            print(f"{self.stage}  {done}/{self.steps}  {text}  {_clock(left)} left", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """A line that stays."""
        if self.heard is not None:
            self.heard(line)
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
