"""Checks a folder of data for the page, as `kineo data check` does, and prints what it found as JSON. It imports torch, so it runs
in a process of its own.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

PACKED = 100_000  # samples of tars and items of arrays that are listed


def describe_folder(folder: Path, settings: list[str]) -> dict[str, Any]:
    """Lines, items, buckets and problems of a folder. Links out of it are not followed."""
    from kineograph.data.buckets import assign_buckets
    from kineograph.data.check import check_folder, parse_settings
    from kineograph.data.check_report import MemberPlace

    config = parse_settings(folder, settings) if settings else None
    report = check_folder(folder, config, follow_links=False)
    readable = [item.info for item in report.items if item.info is not None]
    buckets = None
    if config is not None and config.buckets is not None and readable:
        buckets = assign_buckets(readable, config.buckets, config.base_shape, config.fps)
    reasons: dict[str, list[str]] = {}
    for path, reason in report.problems:
        reasons.setdefault(path, []).append(reason)
    names = set()
    items, number = [], 0
    for item in (*report.items, *report.packed[:PACKED]):
        own = [item.name]
        tree: dict[str, Any] = {"name": item.name, "captions": item.captions}
        if item.place is not None:
            tree["place"] = item.place._asdict()
            own += [f"{item.place.file}:{item.place.member}"] if isinstance(item.place, MemberPlace) else []
        names.update(own)
        tree["problems"] = [reason for name in own for reason in reasons.get(name, ())]
        if item.span is not None:
            end = item.span.end if math.isfinite(item.span.end) else None
            tree |= {"start": item.span.start, "end": end}
        if item.info is not None:
            tree |= item.info._asdict()
            if buckets is not None and item.place is None:
                tree["bucket"] = str(buckets.shape(number))
            number += 1
        items.append(tree)
    lines = [line for line in report.lines() if not line.startswith("  ")]
    if len(report.packed) > PACKED:
        lines.insert(-1, f"the first {PACKED:,} of {len(report.packed):,} samples are listed below")
    return {
        "lines": lines,
        "items": items,
        "buckets": buckets.table() if buckets is not None else [],
        "problems": [problem for problem in report.problems if problem[0] not in names],
    }


def main() -> None:
    from kineograph.core.errors import KineoError

    try:
        found = describe_folder(Path(sys.argv[1]), sys.argv[2:])
    except KineoError as error:
        found = {"error": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
