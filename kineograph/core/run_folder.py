"""The run folder: its paths, and a lock against a second process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kineograph.core.config import Tree
from kineograph.core.config_file import dump_yaml, load_file
from kineograph.core.errors import InputError, RunInUse
from kineograph.core.text_file import parse_json, read_regular
from kineograph.core.trust import remember, require_trust


def _find_problem(tree: Tree) -> str | None:
    """What is wrong with the form of a saved config, which commands read without parsing all of it."""
    stages = tree.get("stages")
    if not isinstance(stages, dict) or not all(
        isinstance(stage, dict) and isinstance(stage.get("task"), str) for stage in stages.values()
    ):
        return "stages must map each name to the keys of a stage"
    if not stages:
        return "it has no stages"
    sections = {key: tree.get(key, {}) for key in ("data", "train", "sample", "evaluate")}
    numbers = {"seed": tree.get("seed", 0)}
    for name, stage in stages.items():
        sections |= {f"stages.{name}.{key}": stage.get(key, {}) for key in ("data", "train", "players")}
        train = stage.get("train")
        numbers[f"stages.{name}.train.steps"] = train.get("steps", 1) if isinstance(train, dict) else 1
    for key, value in sections.items():
        if not isinstance(value, dict):
            return f"{key} must map keys to values"
    return next((f"{key} must be a whole number" for key, value in numbers.items() if type(value) is not int), None)


class RunFolder:
    """Paths of a run. See docs/architecture.md for what each file holds."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @staticmethod
    def existing(path: str | Path) -> RunFolder:
        """A folder that must hold a run already."""
        folder = RunFolder(path)
        if not folder.exists():
            above = folder.path.parent
            if folder.path.is_dir() and RunFolder(above).exists():
                raise InputError(f"{path} is a part of the run {above}: name the run, and --stage {folder.path.name}")
            raise InputError(f"{path} is not a run folder: it has no config.yaml (kineo runs lists the runs)")
        return folder

    def exists(self) -> bool:
        return os.path.isfile(self.config_file)  # False for a name that is too long

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def data_file(self) -> Path:
        return self.path / "data.json"

    @property
    def stopped_marker(self) -> Path:
        return self.path / "stopped"

    @property
    def failed_marker(self) -> Path:
        """Holds the error that ended the last training."""
        return self.path / "failed"

    def config(self) -> Tree:
        """Read the saved config. A run may come from elsewhere: code that nobody typed here is refused."""
        tree = load_file(self.config_file)
        if (problem := _find_problem(tree)) is not None:
            raise InputError(f"{self.config_file} is damaged: {problem}")
        require_trust(tree, str(self.config_file))
        return tree

    def write_config(self, tree: Tree) -> None:
        """Save the config of a run that begins or continues here, and remember the code that it names."""
        write_atomic(self.config_file, dump_yaml(tree))
        remember(tree)

    def stage(self, name: str) -> Path:
        return self.path / name

    def checkpoints(self, stage: str) -> Path:
        return self.path / stage / "checkpoints"

    def samples(self, stage: str, step: int) -> Path:
        return self.path / stage / "samples" / f"step-{step:08d}"

    def validation(self, stage: str) -> Path:
        return self.path / stage / "validation"

    @contextmanager
    def lock(self, shared: bool = False) -> Iterator[None]:
        """Lock the run for this process, exclusively or `shared`. The kernel drops the lock when the process dies."""
        # A record lock: unlike flock, forked data workers do not keep it alive. It does not exclude this process itself, and closing
        # the file anywhere in it drops the lock; so locked runs are remembered.
        path = self.path.resolve()
        if path in _locked:
            raise RunInUse(
                f"{self.path} is in use by this process: wait for the other training call, or give it another run folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = self._open_lock()
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be written to ({error.strerror}): give --run a folder that can"
            ) from None
        with open(descriptor, "r+", encoding="utf-8") as file:
            try:
                _lock_patiently(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            except OSError:
                file.seek(0)
                raise RunInUse(
                    f"{self.path} is in use by {file.read().strip() or 'another process'}: wait for it, stop it, or give --run another folder"
                ) from None
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            _locked.add(path)
            try:
                yield
            finally:
                _locked.discard(path)

    def _open_lock(self, create: int = os.O_CREAT) -> int:
        descriptor = open_nofollow(str(self.path / ".lock"), os.O_RDWR | create)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, ".lock is not a regular file")
        return descriptor

    def remove_leftovers(self) -> None:
        """Remove the temporary files of a killed run. Only the holder of the lock may call this."""
        for pattern in ("", "*/", "*/checkpoints/", "*/checkpoints/step-*/"):
            for path in self.path.glob(f"{pattern}.*"):
                name, _, number = path.name.rpartition(".")
                # `kineo evaluate` writes its results without the lock.
                if number.isdigit() and name not in ("", ".evaluation.json"):
                    path.unlink(missing_ok=True)
        for pattern in ("samples/*/", "samples/*/online/", "validation/"):
            for path in self.path.glob(f"*/{pattern}.*.part.*"):
                path.unlink(missing_ok=True)
        for path in self.path.glob("*/.fetching-*"):
            shutil.rmtree(path, ignore_errors=True)

    def in_use(self) -> bool:
        """Whether a live process holds the run."""
        if self.path.resolve() in _locked:
            return True
        try:
            with open(self._open_lock(0), "r+", encoding="utf-8") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except OSError:
            return False


_locked: set[Path] = set()  # by this process


def _lock_patiently(file: IO[str], kind: int) -> None:
    """Lock a file. `in_use` of other processes, such as the studio, holds the lock for a moment: OSError only after a second try."""
    with suppress(OSError):
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
        return
    time.sleep(0.2)
    fcntl.lockf(file, kind | fcntl.LOCK_NB)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically, even when the power fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        # A file name that is not UTF-8 is written as JSON's escapes.
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def open_nofollow(path: str, flags: int) -> int:
    """An `opener` of `open` that refuses a link or a pipe, which a run from elsewhere may hold: it leads to another file, or blocks."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file; empty if it is missing, damaged or no regular file: a pipe would block."""
    try:
        value = parse_json(read_regular(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def sync_folder(path: Path) -> None:
    """Make renames inside this folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
