"""A new folder that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kineograph.core.errors import InputError, RunFailed
from kineograph.core.run_folder import sync_folder


def check_unoccupied(target: Path, option: str = "DIR") -> None:
    """Nothing is ever overwritten: the place must be new, or an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} is there already and is not an empty folder: give {option} a new place")


@contextmanager
def write_atomically(target: Path, option: str = "DIR") -> Iterator[Path]:
    """A folder beside `target` to write into. It gets its name when everything is written and flushed; after an error nothing is left."""
    check_unoccupied(target, option)
    made = [parent for parent in target.parents if not parent.exists()]  # innermost first
    temporary = target.parent / f".writing-{target.name}-{os.getpid()}"
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise InputError(
                f"{target} cannot be written ({error.strerror}): give {option} a place that can be"
            ) from None
        try:
            yield temporary
            for path in sorted(temporary.rglob("*")):
                _flush(path)
            os.replace(temporary, target)  # an empty folder gives way
            sync_folder(target.parent)
        except OSError as error:
            raise RunFailed(f"cannot write {target}: {error}; make room or permission and do it again") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def _flush(path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
