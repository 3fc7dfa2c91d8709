"""File names from captions, none of which ever overwrites another."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from pathlib import Path

from kineograph.core.errors import InputError

LONGEST = 80  # bytes of a slug; file systems allow 255 for the whole name, some tools less
# What shares a name with a clip: other formats of it, its sidecar. A name is free when none of these is there.
_BESIDE = (".gif", ".mp4", ".png", ".webp", ".json", ".txt")


def slugify(caption: str | None) -> str:
    """`A red 3 moves left!` → `a-red-3-moves-left`. Letters of every script stay; no caption is `unconditional`."""
    text = unicodedata.normalize("NFKC", caption or "").strip()
    if not text:
        return "unconditional"
    words = re.findall(r"\w+", text.lower().replace("_", " "))
    name = _cut("-".join(words), LONGEST)
    if name:
        return name
    return f"caption-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"  # only punctuation or pictographs


def _cut(name: str, limit: int) -> str:
    """At most `limit` bytes, whole characters, and whole words where that keeps more than half."""
    if len(name.encode()) <= limit:
        return name
    short = name.encode()[: limit + 1].decode(errors="ignore")
    whole = short.rpartition("-")[0]
    if len(whole.encode()) > limit // 2:
        return whole
    return short.encode()[:limit].decode(errors="ignore")


def check_writable(folder: Path) -> None:
    """Before anything is drawn for it: whether files can be written there. The folder may be yet to come."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise InputError(f"{folder} cannot be written into: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(
            f"{folder} cannot be written into: {there} may not be changed by this user; name another folder"
        )


def reserve_path(folder: str | Path, name: str, number: int, suffix: str) -> Path:
    """`folder/name-0007.gif`, or the next number that is free in every format and has no sidecar.

    The name is taken at once, by an empty file, so that neither a second call nor another process gets it too: ask just before writing.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written into: {error.strerror}") from None
    while True:
        path = folder / f"{name}-{number:04d}{suffix}"
        if not any(os.path.lexists(path.with_suffix(other)) for other in {suffix, *_BESIDE}):
            try:
                path.touch(exist_ok=False)
                return path
            except FileExistsError:
                pass
            except OSError as error:
                raise InputError(f"{path} cannot be written: {error.strerror}") from None
        number += 1
