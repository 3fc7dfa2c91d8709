"""The start-up check: decode every item once before training, so that broken files are known and listed at the start."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kineograph.core import distributed
from kineograph.core.errors import InputError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source, Stream
from kineograph.core.run_folder import write_atomic
from kineograph.core.text_file import iterate_lines, parse_json

LIMIT, SAMPLE = 10_000, 1_000  # items of a set that is decoded whole, and of the sample of a larger one
ENDLESS_FROM = 2**32  # items
PROGRESS_EVERY = 5.0  # seconds between lines of progress


class Skipped(NamedTuple):
    """An item that cannot be read."""

    path: str
    reason: str


def scan(
    source: Source,
    max_unreadable: float,
    note: Callable[[str], None] | None = None,
    result_file: Path | None = None,
    kind: str = "items",
) -> list[Skipped]:
    """Read all items of a source of up to 10,000 files, or 1,000 spread over a larger one; → the unreadable ones, or an InputError if they
    are too many. Processes divide the items among them.

    `result_file` stores the result: unchanged files are not decoded again. `kind` names the items in the note.
    """
    count = len(source)
    if isinstance(source, Stream) or count > ENDLESS_FROM:
        return []
    is_sample = count > LIMIT
    fingerprint = source.fingerprint()
    if fingerprint is None:  # generated on the fly, or a user's own Dataset
        return []
    saved = _load_scan(result_file, fingerprint) if result_file is not None and not is_sample else None
    saved = distributed.broadcast_object(saved)  # the other processes may not see the file
    indices = range(0, count, -(-count // SAMPLE)) if is_sample else range(count)
    if saved is None:
        skipped = _decode_items(source, indices, note, kind)
        if result_file is not None and not is_sample:
            save_scan(result_file, source, skipped)
    else:
        skipped = [Skipped(*row) for row in saved]
    check_unreadable_share(skipped, len(indices), max_unreadable)
    if skipped and note:
        path, reason = skipped[0]
        of = f"{len(indices):,} checked of {count:,}" if is_sample else f"{count}"
        note(f"{len(skipped)} of {of} {kind} cannot be read and are replaced by others, the first is {path}: {reason}")
    return skipped


def _decode_items(
    source: Source, indices: Sequence[int], note: Callable[[str], None] | None, kind: str
) -> list[Skipped]:
    """Decode this process's share of the items. → the unreadable ones of all processes, in their order"""

    def try_read(index: int) -> tuple[int, str, str] | None:
        try:
            source.read(index, numpy_rng(0, index, "scan"))
        except Unreadable as error:
            return index, error.path, error.reason
        return None

    own = indices[distributed.rank() :: distributed.world()]
    found: list[tuple[int, str, str]] = []
    told = time.monotonic()
    # Threads: Pillow and FFmpeg release the interpreter lock, and no process has to be started.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, result in enumerate(pool.map(try_read, own), 1):
            found += [result] if result is not None else []
            if note is not None and time.monotonic() - told > PROGRESS_EVERY:
                told = time.monotonic()
                note(f"checking {kind}: {number * distributed.world():,} of {len(indices):,}")
    everywhere = [tuple(row) for rows in distributed.all_gather_object(found) for row in rows]
    return [Skipped(path, reason) for _, path, reason in sorted(everywhere)]


def save_scan(path: Path, source: Source, skipped: Iterable[tuple[str, str]]) -> None:
    """Store a scan's result together with the source's fingerprint."""
    if not distributed.is_first():
        return
    fingerprint = source.fingerprint() if len(source) <= LIMIT else None
    if fingerprint is not None:
        write_atomic(path, json.dumps({"fingerprint": fingerprint, "skipped": list(skipped)}))


def _load_scan(path: Path, fingerprint: str) -> list[Skipped] | None:
    try:
        saved = parse_json(path.read_text(encoding="utf-8"))
        return [Skipped(*row) for row in saved["skipped"]] if saved["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_unreadable_share(skipped: Sequence[tuple[str, str]], count: int, max_unreadable: float) -> None:
    """Raise an InputError if more than `max_unreadable` of `count` items were skipped."""
    if len(skipped) <= max_unreadable * count:
        return
    first = "\n".join(f"  {path}: {reason}" for path, reason in skipped[:5])
    more = f"\n  … and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    needed = min(-(-len(skipped) * 100 // count) / 100, 1)
    raise InputError(
        f"{len(skipped)} of {count} items cannot be read ({len(skipped) / count:.0%}; data.max_unreadable={max_unreadable:g} allows "
        f"{max_unreadable:.0%}):\n{first}{more}\nRepair or remove them, or set data.max_unreadable={needed:g}"
    )


def write_skipped(path: Path, skipped: Mapping[str, str] | Iterable[tuple[str, str]]) -> int:
    """Add new items to skipped.jsonl, one {path, reason} per line. Returns its number of lines."""
    rows: dict[str, str] = {}
    if path.is_file():  # a pipe would block
        with open(path, "rb") as file:
            for line in iterate_lines(file):
                with suppress(ValueError, KeyError, TypeError):  # damaged
                    row = parse_json(line)
                    rows[str(row["path"])] = str(row["reason"])
    rows |= dict(skipped)
    if rows:
        lines = (json.dumps({"path": name, "reason": reason}) + "\n" for name, reason in rows.items())
        write_atomic(path, "".join(lines))
    return len(rows)
