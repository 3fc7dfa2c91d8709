"""Stop on SIGINT or SIGTERM: the first signal finishes the step and saves, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from kineograph.core import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """True once a signal asked to stop."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._pending: tuple[torch.Tensor, Any] | None = None  # the last all_reduce, and its handle

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def agree(self) -> bool:
        """Whether all ranks stop now. A signal may reach one rank only, and all must leave the loop at the same step.

        Each call starts an asynchronous all_reduce and reads the previous one, so no rank waits.
        """
        if not distributed.is_active():
            return bool(self)
        previous = self._pending
        number = torch.tensor([SIGNALS.index(signal.Signals[self.signal_name]) + 1 if self.signal_name else 0])
        self._pending = (number, dist.all_reduce(number, dist.ReduceOp.MAX, async_op=True))
        if previous is None:
            return False
        previous[1].wait()
        highest = int(previous[0])
        if highest:
            self._pending[1].wait()  # nothing may be in flight when the group is used for saving
            self.signal_name = self.signal_name or SIGNALS[highest - 1].name
        return bool(highest)

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside. Python allows that in the main thread only; elsewhere this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and distributed.is_active():
            return  # launchers repeat a signal that the terminal sent to all, and kill what takes too long
        if self.signal_name is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal_name = signal.Signals(number).name
        # A plain write to stderr: the handler may interrupt any other output.
        if distributed.is_first():
            os.write(
                2, f"\n{self.signal_name}: finishing the step, then saving; a second signal ends at once\n".encode()
            )
