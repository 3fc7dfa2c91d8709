"""Size and length of many media files, read from their headers once and cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.run_folder import write_atomic
from kineograph.core.text_file import parse_json
from kineograph.data.buckets import MediaInfo

_THREADS = 16  # waits for the disk, not for the processor
_PROGRESS_EVERY = 3.0  # seconds
T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=Exception)


def user_cache(folder: str, path: str, suffix: str) -> Path:
    """A file in the user's cache folder that belongs to `path`."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    digest = hashlib.blake2b(os.fsencode(os.path.realpath(path)), digest_size=16).hexdigest()
    return home / "kineograph" / folder / f"{digest}{suffix}"


def map_with_progress(function: Callable[[T], R], items: Sequence[T], message: str, errors: type[E]) -> Iterator[R | E]:
    """Map over threads; exceptions of type `errors` are results. Print `message` with the counts every few seconds."""

    def try_item(item: T) -> R | E:
        try:
            return function(item)
        except errors as error:
            return error

    printed = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, result in enumerate(pool.map(try_item, items), 1):
            yield result
            if time.monotonic() - printed > _PROGRESS_EVERY:
                printed = time.monotonic()
                print(message.format(done=done, count=len(items)), file=sys.stderr, flush=True)


def probe_all(
    stamps: Sequence[str], probe: Callable[[int], MediaInfo], path: str, label: str
) -> list[MediaInfo | Unreadable]:
    """Probe every item, or find it in the cache of `path` by its stamp, which names the item and its state."""
    cache_file = user_cache("media", path, ".json")
    cached = _load_cache(cache_file)
    missing = [index for index, stamp in enumerate(stamps) if stamp not in cached]
    message = label + ": {done:,} of {count:,} probed"
    probed = dict(zip(missing, map_with_progress(probe, missing, message, Unreadable), strict=True))
    results: list[MediaInfo | Unreadable] = [
        cached[stamp] if stamp in cached else probed[index] for index, stamp in enumerate(stamps)
    ]
    if missing:
        known = {stamp: info for stamp, info in zip(stamps, results, strict=True) if isinstance(info, MediaInfo)}
        with suppress(OSError):  # a cache folder that cannot be written: probe again next time
            write_atomic(cache_file, json.dumps(known))
    return results


def _load_cache(path: Path) -> dict[str, MediaInfo]:
    try:
        return {stamp: MediaInfo(*values) for stamp, values in parse_json(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def list_unreadable(
    names: Iterable[str], results: Sequence[MediaInfo | Unreadable], max_unreadable: float
) -> dict[str, str]:
    """Name → reason of the items that could not be probed; an InputError if they are too many."""
    failed = {name: r.reason for name, r in zip(names, results, strict=True) if isinstance(r, Unreadable)}
    count = len(results)
    if failed and (len(failed) > max_unreadable * count or len(failed) == count):
        name, reason = next(iter(failed.items()))
        raise InputError(
            f"{len(failed)} of {count} items cannot be measured for data.buckets (data.max_unreadable={max_unreadable:g}), "
            f"for example {name}: {reason}"
        )
    return failed
