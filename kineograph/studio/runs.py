"""Finds the runs below the given folders, and describes them again only when their files have changed."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError
from kineograph.core.run_folder import RunFolder
from kineograph.core.text_file import replace_surrogates
from kineograph.run.listing import Row, read_run
from kineograph.studio.metric_records import Record, sample_records
from kineograph.studio.run_files import OutsideRun, find_odd_file
from kineograph.studio.wall import read_wall

CENTURY = 100 * 365 * 86_400.0  # seconds
DEPTH = 3  # folders below a root that are searched for runs
PREVIEWS = 4
SPARK = 48  # points of a spark line
READ_FILES = ("config.yaml", "metrics.jsonl", "evaluation.json", "data.json", "skipped.jsonl")


@dataclass(frozen=True)
class Run:
    """A run folder and what a list shows of it."""

    id: str
    path: Path  # resolved
    label: str  # its path below the root
    row: Row
    written: float  # when a file was last written, in seconds since the epoch
    left: float | None = None  # seconds until the stage is trained
    spark: tuple[float, ...] = ()  # the stage's training loss, evenly thinned
    preview: tuple[str, ...] = ()  # its newest pictures or clips, below the run folder

    @property
    def state(self) -> str:
        return self.row.state

    @property
    def share(self) -> float:
        """Done share of the current stage."""
        return min(self.row.step, self.row.steps) / self.row.steps if self.row.steps > 0 else 0.0

    @property
    def age(self) -> float:
        return max(0.0, time.time() - self.written)


@dataclass
class _Known:
    fingerprint: Any
    run: Run
    again_at: float = 0.0  # a run whose description takes long is not described at every change


class RunIndex:
    """The runs below some folders. Thread-safe."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root).resolve() for root in roots]
        self._known: dict[Path, _Known] = {}
        self._lock = threading.Lock()
        self._refreshed = -math.inf

    def refresh(self, age: float = 0.0) -> list[Run]:
        """Look for new and changed runs, unless that was done `age` seconds ago. → the runs, newest first"""
        with self._lock:
            if time.monotonic() - self._refreshed >= age:
                found = {path: label for root in self.roots for path, label in find_runs(root)}
                self._known = {path: self._update(path, label) for path, label in found.items()}
                self._refreshed = time.monotonic()
            return sorted((known.run for known in self._known.values()), key=lambda run: (-run.written, run.label))

    def find(self, run_id: str) -> Run | None:
        """The run with an id, described anew if it has changed."""
        with self._lock:
            for path, known in self._known.items():
                if known.run.id == run_id and RunFolder(path).exists():
                    self._known[path] = self._update(path, known.run.label)
                    return self._known[path].run
        return None

    def _update(self, path: Path, label: str) -> _Known:
        known, fingerprint = self._known.get(path), take_fingerprint(path)
        now = time.monotonic()
        if known is not None and (known.fingerprint == fingerprint or now < known.again_at):
            return known
        run = describe_run(path, label)
        took = time.monotonic() - now
        return _Known(fingerprint, run, again_at=now + 20 * took if took > 0.1 else 0.0)


def find_runs(root: Path) -> Iterator[tuple[Path, str]]:
    """Run folders at or below a root, with their path below it. Links are not followed."""
    if RunFolder(root).exists():
        yield root, root.name
        return
    yield from _find_below(root, "", DEPTH)


def _find_below(folder: Path, prefix: str, depth: int) -> Iterator[tuple[Path, str]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
            continue
        path, label = Path(entry.path), f"{prefix}{entry.name}"
        if RunFolder(path).exists():
            yield path, label
        elif depth > 1:
            yield from _find_below(path, f"{label}/", depth - 1)


def make_id(path: Path) -> str:
    """A name for URLs, which says nothing of where the run lies."""
    slug = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")[:40]
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:10]
    return f"{slug}-{digest}" if slug else digest


def make_mark(path: Path) -> str:
    """The fingerprint in short, for a page to compare."""
    return hashlib.sha256(repr(take_fingerprint(path)).encode()).hexdigest()[:12]


def take_fingerprint(path: Path) -> Any:
    """Changes whenever the description of a run may: sizes and times of its files, and whether it is in use."""
    marks: list[Any] = [RunFolder(path).in_use()]
    with suppress(OSError):  # pages that show its tail follow it
        marks.append(("log", os.stat(path / "logs" / "rank-0.log").st_size))
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                for part in ("checkpoints", "samples", "validation"):
                    with suppress(OSError):
                        marks.append((entry.name, part, os.stat(os.path.join(entry.path, part)).st_mtime_ns))
                with suppress(OSError):  # rewritten in place when the newest phase ends
                    marks.append((entry.name, os.stat(os.path.join(entry.path, "checkpoints/best.json")).st_mtime_ns))
            elif entry.name in READ_FILES or entry.name == "stopped":
                with suppress(OSError):
                    status = entry.stat()
                    marks.append((entry.name, status.st_mtime_ns, status.st_size))
    return sorted(marks, key=str)


# Describing ------------------------------------------------------------------------------------------------------


def describe_run(path: Path, label: str) -> Run:
    """What a list shows of a run; a damaged one is described as broken."""
    odd = find_odd_file(path, *READ_FILES)
    if odd is not None:
        row = Row(path.name, "broken", problem=f"{odd} is not a regular file inside the run folder")
    else:
        row = read_run(path)
    # Numbers in a stranger's files may be nan, or too large for a float.
    best, accuracy = (value if is_number(value) else None for value in (row.best, row.accuracy))
    row = replace(row, best=best, accuracy=accuracy)
    run = Run(make_id(path), path, replace_surrogates(label), row, written=time.time() - row.age)
    if row.state == "broken":
        return run
    with suppress(OSError, OutsideRun):
        records = [
            record
            for record in sample_records(path, SPARK)
            if record["stage"] == row.stage and record.get("split") == "train"
        ]
        losses = [record["loss"] for record in records if is_number(record.get("loss"))]
        run = replace(run, spark=tuple(losses[-SPARK:]), left=_time_left(row, records))
    return replace(run, preview=find_preview(path, row.stage))


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # False for nan


def _time_left(row: Row, records: list[Record]) -> float | None:
    """Seconds until the running stage is trained, at the speed of its newest records."""
    timed = [(r["step"], r["time/elapsed"]) for r in records if is_number(r.get("time/elapsed"))]
    if row.state != "running" or len(timed) < 2 or row.step >= row.steps:
        return None
    (first, began), (last, ended) = timed[max(0, len(timed) - 8)], timed[-1]
    if last <= first or ended <= began:
        return None
    left = (ended - began) / (last - first) * (row.steps - row.step)
    return left if left < CENTURY else None


def find_preview(path: Path, stage: str) -> tuple[str, ...]:
    """The newest samples of the stage; else of another stage; else its reconstructions."""
    for name in dict.fromkeys([stage, *(found.parent.name for found in sorted(path.glob("*/samples")))]):
        wall = read_wall(path, name, most=1)
        files = [row.files[0] for row in wall.rows if row.files[0]]
        if files:
            return tuple(file for file in files[:PREVIEWS] if file)
    return ()


def check_roots(folders: Sequence[Path]) -> list[Path]:
    """The folders to look for runs in. `runs`, the default, may not exist yet."""
    if not folders:
        return [Path("runs")]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: give folders of runs, or run folders (runs/ by default)")
    return list(folders)
