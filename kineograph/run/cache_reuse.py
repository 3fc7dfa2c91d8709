"""What a new cache takes over from earlier ones, and what becomes of those.

A cache's key covers all of its data, so that one changed clip makes another cache. Its items are known one by one: those that stayed as they
were are copied from the cache that was there, and only the others are encoded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kineograph.core.errors import RunInUse
from kineograph.core.protocols import Source
from kineograph.core.run_folder import RunFolder
from kineograph.data.buckets import Bucket, Buckets
from kineograph.data.cache import HEADER
from kineograph.data.cache_earlier import FACTS, Earlier, digests_of, write_items
from kineograph.data.cache_shards import SHARDS, hold, read_layout
from kineograph.data.cache_writer import StoredRow
from kineograph.stage.spec import Plan, StagePlan
from kineograph.train.precision import resolve_precision

# Keys of data.* that say which items there are and in which batches, not how one is read; its bucket is part of what it is.
_ABOUT_THE_SET = (
    "validation",
    "test",
    "max_unreadable",
    "buckets",
    "shards",
    "start_shard",
    "end_shard",
    "shard_width",
)
_GOING = ".removed-"  # what a cache is called while it is being removed


def take_over(
    path: Path, facts: dict[str, Any], stage: StagePlan, source: Source, device: torch.device
) -> Earlier | None:
    """Note what the items of the cache at `path` are, where it is new; → where those that were encoded before lie. None: the source does not
    tell whether an item has changed."""
    states: Callable[[], list[str]] | None = getattr(source, "states", None)
    if states is None:
        return None
    buckets: Buckets | None = getattr(source, "buckets", None)
    shape = stage.spec.data.shape
    usual = Bucket(shape.frames, shape.height, shape.width)
    shapes = [buckets.shape(item) if buckets is not None else usual for item in range(len(source))]
    digests = digests_of(states(), shapes)
    data = {key: value for key, value in facts["data"].items() if key not in _ABOUT_THE_SET}
    same = {**facts, "data": data, "train_precision": resolve_precision(stage.train.precision, device)}
    del same["content"]
    if read_layout(path) is None:
        write_items(path, same, digests)
    return Earlier(path, same, digests)


class Mixture:
    """Items of a shard in their order: some lie in an earlier cache, others are to be encoded."""

    def __init__(self, items: np.ndarray, earlier: Earlier | None) -> None:
        self._rows: list[StoredRow | None] = earlier.rows(items) if earlier is not None else [None] * len(items)
        self.todo = items[[row is None for row in self._rows]]
        self._at = 0

    @property
    def any(self) -> StoredRow | None:
        """One that is there, to know how all are kept."""
        return next((row for row in self._rows if row is not None), None)

    @property
    def count(self) -> int:
        """Items that are there."""
        return len(self._rows) - len(self.todo)

    def leading(self) -> list[StoredRow]:
        """Those that come before the next one to be encoded, or all that are left."""
        begin = self._at
        while self._at < len(self._rows) and self._rows[self._at] is not None:
            self._at += 1
        return [row for row in self._rows[begin : self._at] if row is not None]

    def through(self, count: int) -> list[StoredRow | None]:
        """Up to and with the next `count` to be encoded, each of which is None."""
        begin = self._at
        while count:
            count -= self._rows[self._at] is None
            self._at += 1
        return self._rows[begin : self._at]


# Caches that are not read any more ---------------------------------------------------------------------------------


def superseded(path: Path) -> list[Path]:
    """Caches beside the one that a stage reads."""
    return [other for other in _caches_in(path.parent) if other.name != path.name]


def _caches_in(folder: Path) -> list[Path]:
    """With what is left of those whose making or removal ended at once."""
    if not folder.is_dir():
        return []
    marks = (SHARDS, FACTS, HEADER)
    return sorted(
        other
        for other in folder.iterdir()
        if other.name.startswith(_GOING) or any((other / mark).is_file() for mark in marks)
    )


def tell_superseded(path: Path, stage: str, folder: RunFolder, note: Callable[[str], None]) -> None:
    others = superseded(path)
    if others:
        caches, them = ("another cache", "it") if len(others) == 1 else (f"{len(others)} other caches", "them")
        note(
            f"{stage}: {caches} in {path.parent}, which this run does not read now, take{'s' if len(others) == 1 else ''} "
            f"{_size(others)}: kineo cache {folder.path} --prune removes {them}"
        )


def prune(plan: Plan, folder: RunFolder, current: Collection[Path], note: Callable[[str], None]) -> list[Path]:
    """Remove the caches of stages that are not skipped, but for those that are `current`, that a stage names as its data or that a process
    reads. Nothing may train or encode meanwhile."""
    named = [Path(stage.spec.data.folder).expanduser() for stage in plan.stages if stage.spec.data.source == "cache"]  # type: ignore[attr-defined]
    kept = {path.resolve() for path in (*current, *named)}
    kept |= {path.parent for path in kept}  # one of a cache's shards
    having = {path.parent.resolve() for path in current}
    removed: list[Path] = []
    try:
        with folder.lock():
            for stage in plan.stages:
                place = folder.stage(stage.name) / "cache"
                if stage.spec.config.skip or (stage.spec.config.cache is not False and place.resolve() not in having):
                    continue  # nothing says which of them it will read
                for path in _caches_in(place):
                    if path.resolve() not in kept and _remove(path, note):
                        removed.append(path)
    except RunInUse as error:
        raise RunInUse(f"nothing was removed: {error}") from None
    if not removed:
        note(f"{folder.path}: there is no cache to remove")
    return removed


def _remove(path: Path, note: Callable[[str], None]) -> bool:
    size = _size([path])
    going = path if path.name.startswith(_GOING) else path.with_name(f"{_GOING}{path.name}")
    held = hold(path, alone=True)
    if held is None and (path / SHARDS).exists():
        note(f"{path} is kept: a process reads it, or it cannot be written to")
        return False
    with held or nullcontext():
        os.replace(path, going)  # at once: a removal that is killed leaves no half of a cache behind
        shutil.rmtree(going)
    note(f"{path} removed ({size})")
    return True


def _size(folders: Iterable[Path]) -> str:
    from kineograph.doctor.report import size  # late: it estimates whole runs

    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return size(sum(file.stat().st_blocks * 512 for file in files))  # arrays of unfinished caches have holes
