"""Stopping on a signal: the first one asks the Trainer to finish its step and save, the second ends at once."""

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
    """Set once somebody asked to stop."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._asking: tuple[torch.Tensor, Any] | None = (
            None  # what all processes were asked last, and the answer to come
        )

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def agreed(self) -> bool:
        """Whether all stop now. A signal may reach one process alone, or each at another step; all must leave the loop at the same one.

        The question is put to all processes at once and the answer read at the next call, a step later: nobody waits for it.
        """
        if not distributed.is_active():
            return bool(self)
        asked = self._asking
        heard = torch.tensor([SIGNALS.index(signal.Signals[self.signal_name]) + 1 if self.signal_name else 0])
        self._asking = (heard, dist.all_reduce(heard, dist.ReduceOp.MAX, async_op=True))
        if asked is None:
            return False
        asked[1].wait()
        number = int(asked[0])
        if number:
            self._asking[1].wait()  # the group is used for other things from here on
            self.signal_name = self.signal_name or SIGNALS[number - 1].name
        return bool(number)

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
        if self.signal_name is not None and distributed.is_active():
            return  # launchers pass on what the terminal has sent to everyone already, and end by themselves what takes too long
        if self.signal_name is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal_name = signal.Signals(number).name
        # A plain write to stderr: the handler may interrupt any other output.
        if distributed.is_first():
            os.write(2, f"\n{self.signal_name}: finishing the step, then saving; once more ends at once\n".encode())
