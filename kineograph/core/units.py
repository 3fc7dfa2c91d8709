"""Sizes and counts as people read them."""

from __future__ import annotations


def format_size(number: float) -> str:
    """Bytes: 512 bytes, 36.4 MiB, 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def format_count(number: int) -> str:
    """Parameters: 512, 3.1 k, 24.6 M, 1.7 billion."""
    for limit, unit in ((1e9, "billion"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return str(number)
