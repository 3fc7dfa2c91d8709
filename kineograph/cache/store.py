"""The folder of a stage's cache: packs, looked up by key; sets, which list the rows of one version of the data; pruning."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import numpy as np
from pydantic import Field

from kineograph.cache.pack import HEADER, Pack, pack_folders, read_header
from kineograph.core.config import Axis, Config
from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.run_folder import write_atomic
from kineograph.core.text_file import parse_json, read_regular
from kineograph.core.units import format_size
from kineograph.data.arrays import load_npy
from kineograph.data.buckets import BucketsConfig
from kineograph.data.open_source import Split

SET = "set.json"
_EARLIER = ("shards.json", "facts.json")  # of caches of an earlier version, which nothing reads any more
_ROWS = "rows.npy"
_LOCKED = (SET, HEADER)  # the file of a set or pack that readers lock
_REMOVED = ".removed-"  # the prefix of a folder whose removal has begun


class _IndexedPack(NamedTuple):
    pack: Pack
    keys: np.ndarray  # sorted
    rows: np.ndarray  # of these keys


class PackIndex:
    """Rows of all packs of one recipe, by item key."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder, self.recipe = folder, recipe
        self._packs: dict[Path, _IndexedPack] = {}

    @property
    def packs(self) -> list[Pack]:
        return [indexed.pack for indexed in self._packs.values()]

    def refresh(self) -> None:
        """Read what was appended since. Damaged packs are left out, so their items are encoded again."""
        for folder in pack_folders(self.folder):
            known = self._packs.get(folder)
            try:
                header = read_header(folder)
                if header is None or header.key != self.recipe or not header.done:
                    continue
                if known is None or known.pack.header.done < header.done:
                    pack = Pack.open(folder)
                    pack.captions()
                    order = np.argsort(keys := pack.keys())
                    self._packs[folder] = _IndexedPack(pack, keys[order], order)
            except InputError:
                continue

    def find(self, keys: np.ndarray) -> np.ndarray:
        """N 2: the number of the pack and the row in it of each key; −1 where there is none."""
        rows = np.full((len(keys), 2), -1, np.int64)
        for number, indexed in enumerate(self._packs.values()):
            positions = np.searchsorted(indexed.keys, keys).clip(max=len(indexed.keys) - 1)
            matches = (indexed.keys[positions] == keys) & (rows[:, 0] < 0)
            rows[matches, 0], rows[matches, 1] = number, indexed.rows[positions[matches]]
        return rows


class SetHeader(Config):
    """The content of set.json."""

    packs: tuple[str, ...]
    """Folders beside the set that hold its rows."""
    split: Split | None = "train"
    """null: items of all splits, divided by their identities."""
    shapes: tuple[tuple[int, int, int], ...] = ()
    """Of the buckets: frames, height, width. Empty: no buckets."""
    bucket_of: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The index in `shapes` of each pack."""
    usual: tuple[Axis, Axis, Axis] | None = None
    """The shape of data.frames and data.size, with buckets."""
    buckets: BucketsConfig | None = None


@dataclass
class CacheSet:
    """One version of the data: which row of which pack holds each item."""

    folder: Path
    header: SetHeader
    rows: np.ndarray  # N 2: index in header.packs, row

    @staticmethod
    def read(folder: Path) -> CacheSet | None:
        """None where there is no set."""
        try:
            header = SetHeader.model_validate(parse_json(read_regular(folder / SET)))
            return CacheSet(folder, header, load_npy(folder / _ROWS, mmap=False))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{folder / SET} cannot be read: {error}; remove {folder} and run kineo cache") from None

    def write(self) -> None:
        """The header comes last: a folder that has one is complete."""
        content = io.BytesIO()
        np.save(content, self.rows)
        write_atomic(self.folder / _ROWS, content.getvalue())
        write_atomic(self.folder / SET, self.header.model_dump_json(indent=1))

    def open_packs(self) -> list[Pack]:
        """Its packs. Raises InputError where one is damaged or gone."""
        packs = [Pack.open(self.folder.parent / name) for name in self.header.packs]
        for number, pack in enumerate(packs):
            rows = self.rows[self.rows[:, 0] == number, 1]
            if len(rows) and rows.max() >= pack.header.done:
                raise InputError(
                    f"{pack.folder} has {pack.header.done} rows, too few for {self.folder}: run kineo cache"
                )
        return packs


def is_complete(folder: Path) -> bool:
    """Whether a set lies here and all of its rows can be read."""
    try:
        cache_set = CacheSet.read(folder)
        return cache_set is not None and all(pack.captions() for pack in cache_set.open_packs())
    except InputError:
        return False


# Pruning -----------------------------------------------------------------------------------------------------------


def lock_cache(folder: Path, exclusive: bool = False) -> IO[bytes] | None:
    """Keep a set (or a pack) from being removed while the file is open; `exclusive`: nobody else reads it.
    None where that is not possible."""
    path = next((folder / name for name in _LOCKED if (folder / name).is_file()), None)
    if path is None:
        return None
    file = None
    try:
        file = open(path, "r+b" if exclusive else "rb")  # noqa: SIM115 (the caller closes it)
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        return file
    except OSError:
        if file is not None:
            file.close()
        return None


def list_stale(folder: Path, keep: Collection[Path]) -> list[Path]:
    """Folders that no set in `keep` needs: other sets, packs without one of its rows, caches of earlier versions. `keep` may name any of them."""
    kept = {path.resolve() for path in keep}
    for path in list(kept):
        cache_set = CacheSet.read(path)
        kept |= {path.parent / name for name in cache_set.header.packs} if cache_set is not None else set()
    return [path for path in _list_entries(folder) if path.resolve() not in kept]


def prune(folder: Path, keep: Collection[Path], note: Note) -> int:
    """Remove what is stale, except what a process reads at this moment. → how many folders were removed."""
    packs = set(pack_folders(folder))
    sets = [path for path in list_stale(folder, keep) if path not in packs]
    in_use = [path for path in sets if not _remove(path, note)]
    # A set that is still in use keeps its packs.
    packs &= set(list_stale(folder, [*keep, *in_use]))
    return len(sets) - len(in_use) + sum(_remove(path, note) for path in sorted(packs))


def _remove(path: Path, note: Note) -> bool:
    size, lock = format_disk_use([path]), lock_cache(path, exclusive=True)
    if lock is None and any((path / name).is_file() for name in _LOCKED):
        note(f"{path} is kept: a process reads it, or it cannot be written to")
        return False
    gone = path if path.name.startswith(_REMOVED) else path.with_name(f"{_REMOVED}{path.name}")
    os.replace(path, gone)  # a removal that is killed leaves no half of a cache
    shutil.rmtree(gone)
    if lock is not None:
        lock.close()
    note(f"{path} removed ({size})")
    return True


def _list_entries(folder: Path) -> list[Path]:
    """Sets, packs, caches of earlier versions, and what a killed removal left."""
    if not folder.is_dir():
        return []
    packs = set(pack_folders(folder))
    return sorted(
        path
        for path in folder.iterdir()
        if path in packs
        or path.name.startswith(_REMOVED)
        or any((path / name).is_file() for name in (*_LOCKED, *_EARLIER))
    )


def format_disk_use(folders: Iterable[Path]) -> str:
    """Disk space in use; arrays of unfinished packs have holes."""
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return format_size(sum(file.stat().st_blocks * 512 for file in files))
