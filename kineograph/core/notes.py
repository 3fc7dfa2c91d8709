"""Notes: lines for people that a function gives while it works. The caller decides where they go."""

from __future__ import annotations

from collections.abc import Callable

Note = Callable[[str], None]


def discard(line: str) -> None:
    """A note that nobody reads."""
