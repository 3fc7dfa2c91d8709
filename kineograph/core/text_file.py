"""Lines of text files that people write."""

from __future__ import annotations


def split_lines(text: str) -> list[str]:
    """Split at newlines only: `str.splitlines` also splits at characters that captions may hold, such as U+2028."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]
