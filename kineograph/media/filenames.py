"""File names from captions, without overwriting."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from pathlib import Path

from kineograph.core.errors import InputError

MAX_SLUG = 80  # bytes; file systems allow 255 for the whole name, some tools less
# Other formats of a clip and its sidecar share its name; a name is free when none of them exists.
_SUFFIXES = (".gif", ".mp4", ".png", ".json", ".txt", ".jsonl", ".wav")


def slugify(caption: str | None) -> str:
    """`A red 3 moves left!` → `a-red-3-moves-left`. Keeps letters of every script; without a caption, `unconditional`."""
    text = unicodedata.normalize("NFKC", caption or "").strip()
    if not text:
        return "unconditional"
    words = re.findall(r"\w+", text.lower().replace("_", " "))
    name = _truncate("-".join(words), MAX_SLUG)
    if name:
        return name
    return f"caption-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"  # only punctuation or pictographs


def _truncate(name: str, limit: int) -> str:
    """At most `limit` bytes, in whole characters, and in whole words if that keeps more than half."""
    if len(name.encode()) <= limit:
        return name
    short = name.encode()[: limit + 1].decode(errors="ignore")
    whole = short.rpartition("-")[0]
    if len(whole.encode()) > limit // 2:
        return whole
    return short.encode()[:limit].decode(errors="ignore")


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is drawn. It need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise InputError(f"cannot write to {folder}: {existing} is a file; use another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {folder}: no permission for {existing}; use another folder")


def reserve_path(folder: str | Path, name: str, number: int, suffix: str) -> Path:
    """`folder/name-0007.gif`, or the next number that is free in every format and has no sidecar.

    Creates an empty file there, so that no other call or process gets the same name: call this just before writing.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}; use another folder") from None
    while True:
        path = folder / f"{name}-{number:04d}{suffix}"
        if not any(os.path.lexists(path.with_suffix(other)) for other in {suffix, *_SUFFIXES}):
            try:
                path.touch(exist_ok=False)
                return path
            except FileExistsError:
                pass
            except OSError as error:
                raise InputError(f"cannot write {path}: {error.strerror}; use another folder") from None
        number += 1
