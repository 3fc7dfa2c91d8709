"""The progress of a stage on the console: a bar on a terminal, otherwise a line every 15 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kineograph.core.notes import Note
from kineograph.core.text_file import escape_controls

LINE_EVERY = 15.0  # seconds between lines without a terminal


class Progress:
    """Loss, samples per second and time left of one stage."""

    def __init__(
        self,
        stage: str,
        steps: int | None,
        quiet: bool = False,
        log_note: Note | None = None,
    ) -> None:
        """`steps` is None for a stage that ends by the clock. `log_note` gets every note, whether the console shows it or not."""
        self.stage = stage
        self.steps = steps
        self.quiet = quiet
        self.log_note = log_note
        self._bar: Any = None
        self._started = time.monotonic()
        self._first_step = 0
        self._last_line = 0.0

    @contextmanager
    def show(self, step: int) -> Iterator[None]:
        """Show the bar inside, beginning at `step`."""
        self._first_step = step
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}" if self.steps is not None else "{task.percentage:.0f} %"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=Console(stderr=True)) as bar:
            total = 1.0 if self.steps is None else self.steps
            self._bar, self._id = bar, bar.add_task(self.stage, total=total, completed=step, numbers="")
            yield
        self._bar = None

    def advance(self, step: int, share: float | None = None) -> None:
        """`share`: of the time that is used, for a stage that ends by the clock."""
        if self._bar is not None:
            self._bar.update(self._id, completed=step if share is None else share)

    def numbers(self, step: int, loss: float, rate: float, share: float | None = None, left: float = 0.0) -> None:
        """Show the loss of `step` and the samples per second; by the clock also the share and the seconds left of its time."""
        text = f"loss {loss:.4g}  {rate:.0f} samples/s"
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._id, numbers=text)
        elif not self.quiet and (now - self._last_line > LINE_EVERY or step == self.steps or share == 1):
            self._last_line = now
            if self.steps is not None:
                left = (now - self._started) / max(1, step - self._first_step) * (self.steps - step)
            how_far = f"step {step}, {share:.0%} done" if share is not None else f"{step}/{self.steps}"
            print(f"{self.stage}  {how_far}  {text}  {_format(max(0.0, left))} left", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Print a line that stays."""
        if self.log_note is not None:
            self.log_note(line)
        if self.quiet:
            return
        line = escape_controls(line)
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _format(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
