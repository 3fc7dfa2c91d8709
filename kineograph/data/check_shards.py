"""What is wrong with tar shards and the embeddings beside them, for `kineo data check`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np

from kineograph.core.errors import InputError, Unreadable
from kineograph.data.captions import Problem
from kineograph.data.decode import VIDEOS, kind_of, measure_picture, reasons
from kineograph.data.embeddings import AlignedEmbeddings, read_npy
from kineograph.data.shard_writer import INDEX_WIDTH
from kineograph.data.shards import Shard
from kineograph.data.tar_index import TarIndex
from kineograph.data.webdataset_samples import WebDatasetConfig

_CAPTIONS: list[str] = WebDatasetConfig.model_fields["captions"].default


def check_shards(
    root: Path,
    names: Sequence[str],
    arrays: Sequence[str],
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[str], list[Problem]]:
    """Decode every member of every tar; see whether each sample has its row in each folder of arrays. → notes, problems."""
    notes: list[str] = []
    problems: list[Problem] = []
    keys: list[list[str]] = []
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for done, (note, wrong, samples) in enumerate(pool.map(lambda name: _check(root, name), names), 1):
            notes.append(note)
            problems += wrong
            keys.append(samples)
            if progress:
                progress(done, len(names))
    shards = [Shard(str(root / name), PurePosixPath(name).name) for name in names]
    for folder in sorted({str(PurePosixPath(name).parent) for name in arrays}):
        _check_embeddings(root, folder, shards, keys, notes, problems)
    return notes, problems


def _check(root: Path, name: str) -> tuple[str, list[Problem], list[str]]:
    """One tar: a line about it, its problems, and the keys of its samples with a picture or clip."""
    problems: list[Problem] = []
    try:
        index = TarIndex.build(str(root / name))
    except OSError as error:
        return f"{name}: unreadable", [Problem(name, f"cannot be read: {error.strerror}")], []
    if index.problem:
        problems.append(Problem(name, f"not a whole tar file: {index.problem}"))
    pictured, texted = set(), set()
    with open(root / name, "rb") as file:
        for row, kind, offset, size in index.members.T.tolist():
            key, ending = index.keys[row], index.endings[kind]
            inside = f"{name}:{key}.{ending}"
            data = os.pread(file.fileno(), size, offset)
            try:
                if _check_member(data, ending, inside):
                    pictured.add(row)
                elif ending in _CAPTIONS:
                    texted.add(row)
            except Unreadable as error:
                problems.append(Problem(inside, error.reason))
                (texted if ending in _CAPTIONS else pictured).add(row)
    if texted:
        problems += [Problem(f"{name}:{index.keys[row]}", "no caption") for row in sorted(pictured - texted)]
    note = f"{name}: {len(pictured)} samples, {len(pictured & texted)} with text"
    return note, problems, [index.keys[row] for row in sorted(pictured)]


def _check_member(data: bytes, ending: str, name: str) -> bool:
    """Decode it; → whether it is a picture or clip."""
    if ending.endswith("npy"):
        read_npy(data, name)
    if ending == "txt" and not data.strip():
        raise Unreadable(name, "an empty caption")
    if not kind_of(f"x.{ending}"):
        return False
    with reasons(name):
        if f".{ending}" in VIDEOS:
            from kineograph.data.video import measure

            measure(io.BytesIO(data))
        else:
            measure_picture(data)
    return True


def _check_embeddings(
    root: Path, folder: str, shards: list[Shard], keys: list[list[str]], notes: list[str], problems: list[Problem]
) -> None:
    try:
        aligned = AlignedEmbeddings(str(root / folder), folder, shards, INDEX_WIDTH)
    except InputError as error:
        problems.append(Problem(folder, str(error)))
        return
    there = 0
    for number, shard in enumerate(shards):
        for key in keys[number]:
            row = aligned.row(number, key)
            try:
                if row.reason:
                    raise Unreadable("", row.reason)
                values = aligned.read(number, row.number, "")
                if not np.isfinite(values).all():
                    raise Unreadable("", "an embedding that is not finite")
                there += 1
            except Unreadable as error:
                problems.append(Problem(f"{shard.name}:{key}", f"{folder}: {error.reason}"))
    shape = " × ".join(map(str, aligned.shape))
    notes.append(f"{folder}: embeddings of {shape} for {there} of {sum(map(len, keys))} samples")
