"""Text that people write: files of it, and captions."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kineograph.core.errors import InputError

_MAX_TEXT = 2**32  # bytes of captions and their like
_MAX_SMALL = 2**28  # bytes of a file that is read whole
_MAX_LINE = 2**22  # bytes of a record


def read_text(path: Path, key: str = "") -> str:
    """Read a UTF-8 file, with or without a byte order mark. `key` names the path's origin in errors."""
    try:
        size = path.stat().st_size
        if size > _MAX_TEXT:
            raise InputError(f"{key}{path} has {size:,} bytes, and no more than {_MAX_TEXT:,} are read: split it")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{key}{path} is not UTF-8 text: {error}; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{key}{path} cannot be read: {error.strerror}") from None


def read_regular(path: Path) -> str:
    """Read a UTF-8 file of a folder that may come from elsewhere. Raises an OSError for a pipe or a device, which would block or never end,
    and for a file that would fill the memory.
    """
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if os.fstat(file.fileno()).st_size > _MAX_SMALL:
            raise OSError(errno.EFBIG, f"more than {_MAX_SMALL:,} bytes", str(path))
        return file.read()


def iterate_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file of records, up to one that no record fills: a file with holes would fill the memory."""
    while (line := file.readline(_MAX_LINE)) and (len(line) < _MAX_LINE or line.endswith(b"\n")):
        yield line


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from anywhere. Raises a ValueError, also for nesting that Python's parser cannot follow."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def replace_surrogates(text: str) -> str:
    """Put U+FFFD for half a character: JSON and Python can hold one, such as "\\ud83d", and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")  # but tabs and newlines


def escape_controls(text: str) -> str:
    r"""`\x1b` for an escape, and so on: a file's name could move the cursor, or give the terminal commands."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


MAX_CAPTION = 2**20  # characters: a tokenizer takes a hundred bytes of memory for each


def clean_caption(text: str) -> str:
    """One line of whole characters; encoders keep only its beginning."""
    return " ".join(replace_surrogates(text[:MAX_CAPTION]).split())


def split_lines(text: str) -> list[str]:
    """Split at newlines only: `str.splitlines` also splits at characters that captions may hold, such as U+2028."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]
