"""How large and long files are, found from their headers and remembered, so that a million clips are looked at once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.run_folder import write_atomic
from kineograph.data.buckets import Extent
from kineograph.data.decode import VIDEOS, extent_of_picture, reasons

_THREADS = 16  # waits for the disk, not for the processor
_QUIET = 3.0  # seconds before the first word about progress, and between words


def extent_of(file: Path | bytes, ending: str, name: str) -> Extent:
    """Of one picture or clip. Raises Unreadable."""
    with reasons(name):
        if ending.lower() in VIDEOS:
            from kineograph.data.video import extent  # PyAV is imported where videos are

            return Extent(*extent(file if isinstance(file, Path) else io.BytesIO(file)))
        return Extent(*extent_of_picture(file.read_bytes() if isinstance(file, Path) else file))


def memory_of(place: str) -> Path:
    """Where the extents of what lies at `place` are remembered."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    digest = hashlib.blake2b(os.fsencode(os.path.realpath(place)), digest_size=16).hexdigest()
    return home / "kineograph" / "extents" / f"{digest}.json"


def measure_all(
    stamps: Sequence[str], measure: Callable[[int], Extent], memory: Path, what: str
) -> list[Extent | Unreadable]:
    """Item → extent, or why there is none. A stamp names an item and its state: what has the same one is not measured again."""
    known = _recall(memory)
    missing = [place for place, stamp in enumerate(stamps) if stamp not in known]

    def attempt(place: int) -> Extent | Unreadable:
        try:
            return measure(place)
        except Unreadable as error:
            return error

    found: dict[int, Extent | Unreadable] = {}
    told = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        for place, extent in zip(missing, pool.map(attempt, missing), strict=True):
            found[place] = extent
            if time.monotonic() - told > _QUIET:
                told = time.monotonic()
                print(f"{what}: {len(found):,} of {len(missing):,} measured", file=sys.stderr, flush=True)
    whole = [known[stamp] if stamp in known else found[place] for place, stamp in enumerate(stamps)]
    if missing:
        kept = {stamp: extent for stamp, extent in zip(stamps, whole, strict=True) if isinstance(extent, Extent)}
        with suppress(OSError):  # a home that cannot be written: measured again next time
            write_atomic(memory, json.dumps(kept))
    return whole


def _recall(memory: Path) -> dict[str, Extent]:
    try:
        return {stamp: Extent(*values) for stamp, values in json.loads(memory.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def refuse_many(unmeasured: dict[str, str], count: int, limit: float) -> None:
    """Too many that cannot be measured are an error; the rest are left out and listed."""
    if unmeasured and (len(unmeasured) > limit * count or len(unmeasured) == count):
        name, reason = next(iter(unmeasured.items()))
        raise InputError(
            f"{len(unmeasured)} of {count} items cannot be measured for data.buckets (data.max_unreadable={limit:g}), for instance {name}: {reason}"
        )
