"""Writes a new folder completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kineograph.core.errors import InputError, RunFailed
from kineograph.core.run_folder import sync_folder


def check_unoccupied(target: Path, option: str = "DIR") -> None:
    """Refuse to overwrite: `target` must be new, or an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists and is not an empty folder: give {option} another path")


@contextmanager
def write_atomically(target: Path, option: str = "DIR") -> Iterator[Path]:
    """A folder beside `target` to write into. It is flushed and renamed at the end; after an error nothing is left."""
    check_unoccupied(target, option)
    new_parents = [parent for parent in target.parents if not parent.exists()]  # innermost first
    temporary = target.parent / f".writing-{target.name}-{os.getpid()}"
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{target} cannot be written ({error.strerror}): give {option} a writable path") from None
        try:
            yield temporary
            for path in sorted(temporary.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            os.replace(temporary, target)  # replaces an empty folder
            sync_folder(target.parent)
        except OSError as error:
            raise RunFailed(
                f"cannot write {target}: {error}; free disk space or fix the permissions, then try again"
            ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise
