"""Pictures that Pillow refuses to decode, because a small file may ask for all memory: what to tell a person about them."""

from __future__ import annotations

import re


def too_large(error: Exception) -> str:
    """From PIL.Image.DecompressionBombError: how many pixels, how many are decoded, and what to do."""
    numbers = re.findall(r"(\d+) pixels", str(error))
    if len(numbers) != 2:
        return f"too large: {error}"
    pixels, limit = map(int, numbers)
    return f"too large: {pixels:,} pixels, and no more than {limit:,} are decoded; scale it down first"
