"""Lines of text files that people write."""

from __future__ import annotations


def lines_of(text: str) -> list[str]:
    """Ends at "\\n" alone, with or without "\\r" before it: `str.splitlines` also ends lines at characters that a caption or a string
    of JSON may hold, such as U+2028."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]
