"""Decoding every item once before training, so that broken files are known, counted and listed at the start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source
from kineograph.core.run_folder import write_atomic

LIMIT = 10_000  # larger sets are checked as they are met


class Skipped(NamedTuple):
    """One item that cannot be read."""

    path: str
    reason: str


def scan(
    source: Source,
    max_unreadable: float,
    note: Callable[[str], None] | None = None,
    memory: Path | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    kind: str = "items",
) -> list[Skipped]:
    """Read all items of a source of files with up to 10,000 of them; → those that cannot be read, or an InputError where they are too many.

    `memory` is a file that remembers the result: nothing is decoded again while the files stay as they are. `kind` is what a note calls them.
    """
    if len(source) > LIMIT or not hasattr(source, "fingerprint"):  # made on the fly, or a Dataset of the user's own
        return []
    skipped = _recall(memory, source)
    if skipped is None:
        skipped = _decode_all(source, threads, progress)
        if memory is not None:
            remember(memory, source, skipped)
    refuse_unreadable(skipped, len(source), max_unreadable)
    if skipped and note:
        note(
            f"{len(skipped)} of {len(source)} {kind} cannot be read and are left out, the first is {skipped[0].path}: {skipped[0].reason}"
        )
    return skipped


def _decode_all(source: Source, threads: int | None, progress: Callable[[int, int], None] | None) -> list[Skipped]:
    def attempt(index: int) -> Skipped | None:
        try:
            source.read(index, numpy_rng(0, index, "scan"))
        except Unreadable as error:
            return Skipped(error.path, error.reason)
        return None

    skipped = []
    # Threads: Pillow and FFmpeg decode without the interpreter lock, and no process has to be started.
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for done, found in enumerate(pool.map(attempt, range(len(source))), 1):
            skipped += [found] if found else []
            if progress:
                progress(done, len(source))
    return skipped


def remember(memory: Path, source: Source, skipped: Iterable[tuple[str, str]]) -> None:
    """Keep what a scan found, for as long as the files stay as they are."""
    if hasattr(source, "fingerprint") and len(source) <= LIMIT:
        write_atomic(memory, json.dumps({"fingerprint": source.fingerprint(), "skipped": list(skipped)}))


def _recall(memory: Path | None, source: Any) -> list[Skipped] | None:
    if memory is None or not memory.exists():
        return None
    try:
        saved = json.loads(memory.read_text(encoding="utf-8"))
        fits = saved["fingerprint"] == source.fingerprint()
        return [Skipped(*row) for row in saved["skipped"]] if fits else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_unreadable(skipped: Sequence[tuple[str, str]], count: int, limit: float) -> None:
    """Too many of so many items are an error."""
    if len(skipped) <= limit * count:
        return
    first = "\n".join(f"  {path}: {reason}" for path, reason in skipped[:5])
    more = f"\n  … and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    raise InputError(
        f"{len(skipped)} of {count} items cannot be read ({len(skipped) / count:.0%}; data.max_unreadable={limit:g} allows {limit:.0%}):\n{first}{more}\n"
        f"Repair or remove them, or set data.max_unreadable={min(-(-len(skipped) * 100 // count) / 100, 1):g}"
    )


def write_skipped(path: Path, skipped: Mapping[str, str] | Iterable[tuple[str, str]]) -> int:
    """Add to skipped.jsonl what is not in it yet: one {path, reason} a line. Returns how many lines it has."""
    rows: dict[str, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["path"]] = row["reason"]
    rows |= dict(skipped)
    if rows:
        write_atomic(
            path, "".join(json.dumps({"path": name, "reason": reason}) + "\n" for name, reason in rows.items())
        )
    return len(rows)
