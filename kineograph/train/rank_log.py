"""What each process has to say, in a file of its own: RUN/logs/rank-N.log. The console hears the first process alone.

Notes, Python's warnings and the warnings of other libraries' loggers. A log that cannot be written never ends a run.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from kineograph.core import distributed

TIMINGS_EVERY = 30.0  # seconds
Note = Callable[[str], None]


def log_file(run: Path, rank: int) -> Path:
    return run / "logs" / f"rank-{rank}.log"


class RankLog:
    """Opened once a run may be written to. Lines of several lives of a run follow one another."""

    def __init__(self, run: Path) -> None:
        self.path = log_file(run, distributed.rank())
        self.file: TextIO | None = None
        self._told = -math.inf
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a", encoding="utf-8", buffering=1, errors="replace")  # noqa: SIM115 (closed by close)
        self.write(
            f"rank {distributed.rank()} of {distributed.world()}: process {os.getpid()} on {socket.gethostname()}"
        )

    def write(self, line: str) -> None:
        """To the file alone."""
        if self.file is not None:
            with suppress(OSError, ValueError):  # a full disk; closed
                self.file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")

    def timings(self, stage: str, step: int, parts: Mapping[str, float], slowest: object | None) -> None:
        """Where this process's time went, now and then."""
        if time.monotonic() - self._told < TIMINGS_EVERY:
            return
        self._told = time.monotonic()
        told = "  ".join(f"{name} {ms:.3g} ms" for name, ms in parts.items())
        self.write(f"{stage}  step {step}  {told}" + (f"; {slowest}" if slowest is not None else ""))

    def with_note(self, note: Note) -> Note:
        """A note that goes to the file, and from the first process to `note` too."""
        said = distributed.on_first_rank(note)

        def both(line: str) -> None:
            self.write(line)
            said(line)

        return both

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Warnings go to the file meanwhile; those of the first process are shown as before, too."""
        shown = warnings.showwarning
        handler = _Handler(self)
        loggers, last = logging.getLogger(), logging.lastResort
        # Without handlers Python shows warnings itself; with ours it no longer would.
        kept = last if distributed.is_first() and not loggers.handlers else None

        def heard(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: Any = None,
            line: Any = None,
        ) -> None:
            self.write(f"{category.__name__}: {message} ({filename}:{lineno})")
            if distributed.is_first():
                shown(message, category, filename, lineno, file, line)

        warnings.showwarning = heard
        added = [handler, *([kept] if kept is not None else [])]
        for each in added:
            loggers.addHandler(each)
        try:
            yield
        finally:
            warnings.showwarning = shown
            for each in added:
                loggers.removeHandler(each)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class _Handler(logging.Handler):
    def __init__(self, log: RankLog) -> None:
        super().__init__(logging.WARNING)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log.write(f"{record.levelname} {record.name}: {record.getMessage()}")
