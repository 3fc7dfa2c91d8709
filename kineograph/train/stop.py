"""Stopping on a signal: the first one asks the Trainer to finish its step and save, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set once somebody asked to stop."""

    def __init__(self) -> None:
        self.by: str | None = None

    def __bool__(self) -> bool:
        return self.by is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to SIGINT and SIGTERM. Outside the main thread Python cannot, and signals keep their meaning."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.by = signal.Signals(number).name
        # A plain write to stderr: the handler may interrupt any other output.
        os.write(2, f"\n{self.by}: finishing the step, then saving; once more ends at once\n".encode())
