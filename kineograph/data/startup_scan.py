"""The start-up check: decode every item once before training, so that broken files are known and listed at the start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source
from kineograph.core.run_folder import write_atomic
from kineograph.core.text_file import parse_json

LIMIT = 10_000  # items; larger sets are checked while they are read


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
    """Read all items of a source of up to 10,000 files; → the unreadable ones, or an InputError if they are too many.

    `result_file` stores the result: unchanged files are not decoded again. `kind` names the items in the note.
    """
    fingerprint = source.fingerprint() if len(source) <= LIMIT else None
    if fingerprint is None:  # too large, generated on the fly, or a user's own Dataset
        return []
    skipped = _load_scan(result_file, fingerprint) if result_file is not None else None
    if skipped is None:
        skipped = _decode_all(source)
        if result_file is not None:
            save_scan(result_file, source, skipped)
    check_unreadable_share(skipped, len(source), max_unreadable)
    if skipped and note:
        path, reason = skipped[0]
        note(f"{len(skipped)} of {len(source)} {kind} cannot be read and are left out, the first is {path}: {reason}")
    return skipped


def _decode_all(source: Source) -> list[Skipped]:
    def try_read(index: int) -> Skipped | None:
        try:
            source.read(index, numpy_rng(0, index, "scan"))
        except Unreadable as error:
            return Skipped(error.path, error.reason)
        return None

    # Threads: Pillow and FFmpeg release the interpreter lock, and no process has to be started.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [skipped for skipped in pool.map(try_read, range(len(source))) if skipped]


def save_scan(path: Path, source: Source, skipped: Iterable[tuple[str, str]]) -> None:
    """Store a scan's result together with the source's fingerprint."""
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
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = parse_json(line)
            rows[row["path"]] = row["reason"]
    rows |= dict(skipped)
    if rows:
        lines = (json.dumps({"path": name, "reason": reason}) + "\n" for name, reason in rows.items())
        write_atomic(path, "".join(lines))
    return len(rows)
