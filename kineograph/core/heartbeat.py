"""Signs of life. Whoever gets something done says so here (a step, a batch that was judged or drawn), and the watchdog listens.

One to a process, since a process hangs as a whole.
"""

from __future__ import annotations

import time

beats = 0  # things that this process got done
_last = time.monotonic()
_doing = "starting"


def beat() -> None:
    """Something was done."""
    global beats, _last
    beats += 1
    _last = time.monotonic()


def set_activity(what: str) -> None:
    """What this process turns to now, in a word or two: what is said of it should it never come back."""
    global _doing
    _doing = what


def current_activity() -> str:
    return _doing


def seconds_since_last() -> float:
    """Seconds since the last sign of life."""
    return time.monotonic() - _last
