"""Heartbeats for the watchdog: training, judging and drawing call `beat` after each step, batch or clip."""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[], None] | None = None


def set_listener(listener: Callable[[], None] | None) -> None:
    """Call `listener` at every beat of this process; None ends that."""
    global _listener
    _listener = listener


def beat() -> None:
    """Report progress."""
    if _listener is not None:
        _listener()
