"""Opens files of a run that may come from a stranger: regular files inside the run folder, and no more of them than is shown."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MEDIA = {
    ".png": "image/png",
    ".gif": "image/gif",
    ".jpg": "image/jpeg",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
}
TEXT_BYTES = 2**20  # of a JSON or text file that is shown


class OutsideRun(Exception):
    """A path that leads out of the run folder, or to something that is not a regular file there."""


def find_file(run: Path, relative: str | Path) -> Path:
    """The file at a path inside a run folder, links resolved. Raises OutsideRun for any other."""
    try:
        path = (run / relative).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # missing; a NUL in the name; a loop of links
        raise OutsideRun(str(relative)) from None
    if not path.is_relative_to(run.resolve()) or not path.is_file():
        raise OutsideRun(str(relative))
    return path


def open_file(run: Path, relative: str | Path) -> BinaryIO:
    """Open a file of a run to read. Raises OutsideRun."""
    path = find_file(run, relative)
    try:
        # It may have been replaced: a pipe must not block, a link must not be followed.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        raise OutsideRun(str(relative)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OutsideRun(str(relative))
    return open(descriptor, "rb")


def find_odd_file(run: Path, *names: str) -> str | None:
    """The first of these names that exists and is not a regular file inside the run folder."""
    for name in names:
        if os.path.lexists(run / name):
            try:
                find_file(run, name)
            except OutsideRun:
                return name
    return None


def read_text(run: Path, relative: str | Path, most: int = TEXT_BYTES) -> str:
    """The beginning of a text file; empty if it cannot be read."""
    with suppress(OutsideRun, OSError), open_file(run, relative) as file:
        return file.read(most).decode("utf-8", "replace")
    return ""


def read_last_lines(run: Path, relative: str | Path, lines: int = 200, most: int = 2**17) -> list[str]:
    """The last lines of a text file; none if it cannot be read."""
    with suppress(OutsideRun, OSError), open_file(run, relative) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        text = file.read(most).decode("utf-8", "replace")
        found = text.split("\n")
        if size > most:
            found = found[1:]  # it began in the middle of a line
        return [line.rstrip("\r") for line in found if line][-lines:]
    return []
