"""One log file per process, RUN/logs/rank-N.log: notes, warnings, timings, and stacks where the watchdog ended it.

The console shows rank 0 only. A log that cannot be written never ends a run.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from kineograph.core import distributed, heartbeat
from kineograph.core.notes import Note
from kineograph.core.run_folder import open_nofollow

TIMINGS_EVERY = 30.0  # seconds


def log_file(run: Path, rank: int) -> Path:
    return run / "logs" / f"rank-{rank}.log"


class RankLog:
    """This process's log. Every start of a run appends to it."""

    def __init__(self, run: Path) -> None:
        self.path = log_file(run, distributed.rank())
        self.file: TextIO | None = None
        self._timings_written = -math.inf
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(  # noqa: SIM115 (closed by close)
                self.path, "a", encoding="utf-8", buffering=1, errors="replace", opener=open_nofollow
            )
        self.write(
            f"rank {distributed.rank()} of {distributed.world()}: process {os.getpid()} on {socket.gethostname()}"
        )

    def write(self, line: str) -> None:
        """Write a line to the file, not to the console."""
        if self.file is not None:
            with suppress(OSError, ValueError):  # a full disk; a closed file
                self.file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")

    def write_timings(self, stage: str, step: int, parts_ms: Mapping[str, float], slowest: object | None) -> None:
        """Write where this process's time went, at most every TIMINGS_EVERY seconds."""
        if time.monotonic() - self._timings_written < TIMINGS_EVERY:
            return
        self._timings_written = time.monotonic()
        parts = "  ".join(f"{name} {ms:.3g} ms" for name, ms in parts_ms.items())
        self.write(f"{stage}  step {step}  {parts}" + (f"; {slowest}" if slowest is not None else ""))

    def with_note(self, note: Note) -> Note:
        """Return a note function that writes to the file and, on rank 0, to `note`."""
        console = distributed.on_first_rank(note)

        def write_both(line: str) -> None:
            self.write(line)
            console(line)

        return write_both

    @contextmanager
    def capture_warnings(self) -> Iterator[None]:
        """Write Python's and loggers' warnings to the file. Rank 0 still shows them on the console."""
        root = logging.getLogger()
        handlers: list[logging.Handler] = [_LogHandler(self)]
        # Python shows warnings of loggers itself only while the root logger has no handler.
        if distributed.is_first() and not root.handlers and logging.lastResort is not None:
            handlers.append(logging.lastResort)
        for handler in handlers:
            root.addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            for handler in handlers:
                root.removeHandler(handler)

    @contextmanager
    def watchdog(self, seconds: float) -> Iterator[None]:
        """Write the stacks of all threads to the file and exit with code 1 after `seconds` without a heartbeat.

        faulthandler needs no GIL, so it also ends a process that hangs inside a C call.
        """
        file = self.file or sys.stderr

        def rearm() -> None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=file)

        rearm()
        heartbeat.set_listener(rearm)
        try:
            yield
        finally:
            heartbeat.set_listener(None)
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class _LogHandler(logging.Handler):
    def __init__(self, log: RankLog) -> None:
        super().__init__(logging.WARNING)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log.write(f"{record.levelname} {record.name}: {record.getMessage()}")
