"""Text files that people write."""

from __future__ import annotations

from pathlib import Path

from kineograph.core.errors import InputError


def read_text(path: Path, key: str = "") -> str:
    """Read a UTF-8 file, with or without a byte order mark. `key` names the path's origin in errors."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{key}{path} is not UTF-8 text: {error}; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{key}{path} cannot be read: {error.strerror}") from None


def split_lines(text: str) -> list[str]:
    """Split at newlines only: `str.splitlines` also splits at characters that captions may hold, such as U+2028."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]
