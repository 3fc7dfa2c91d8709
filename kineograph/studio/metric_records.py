"""Reads metrics.jsonl of any length in well under a second: all of a short file; of a long one an even share of the training
records and every record of validation and health.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kineograph.core.text_file import parse_json
from kineograph.studio.run_files import open_file

Record = dict[str, Any]
WHOLE = 8 * 2**20  # bytes up to which every line is read
LARGEST = 2**32  # bytes that are looked through: a file with holes may state any size
SAMPLES = 1_500  # training records of a longer file
RARE = 4_000  # records of validation and health at most
LONGEST_LINE = 2**17
CHUNK = 2**22
# As the Trainer writes them. Long texts are found faster.
RARE_TEXTS = (b'"split": "validation"', b'"finding": {"name": "')
LONGEST_TEXT = max(map(len, RARE_TEXTS))


def read_records(run: Path) -> list[Record]:
    """Records of a run in the order of the file. Raises OutsideRun or OSError if it cannot be read."""
    with open_file(run, "metrics.jsonl") as file:
        size = _measure(file)
        if size <= WHOLE:
            return [record for line in file.read(WHOLE).splitlines() if (record := _parse(line)) is not None]
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _sample(data, 0, len(data), SAMPLES)
            for first, last in _stage_ranges(found, len(data)):
                found |= _sample(data, first, last, SAMPLES // 2)
            for start in {_line_start(data, place) for place in _find_rare(file)} - found.keys():
                if (record := _read_line(data, start)) is not None:
                    found[start] = record
            return [found[start] for start in sorted(found)]


def sample_records(run: Path, count: int) -> list[Record]:
    """A few records, evenly spread over the file, and the last ones."""
    with open_file(run, "metrics.jsonl") as file:
        size = _measure(file)
        if not size:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _sample(data, 0, size, count) | _sample(data, max(0, size - 16_384), size, 8)
        return [found[start] for start in sorted(found)]


def _measure(file: BinaryIO) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > LARGEST:
        raise OSError(errno.EFBIG, f"more than {LARGEST:,} bytes")
    return size


def _parse(line: bytes) -> Record | None:
    """A record, or None for a line that was cut off or does not belong here."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("stage"), str):
        return None
    step = record.get("step")
    return record if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def _sample(data: mmap.mmap, first: int, last: int, count: int) -> dict[int, Record]:
    """About `count` records between two bytes, the last one included, by the byte at which they begin."""
    found: dict[int, Record] = {}
    for place in [*(first + (last - first) * number // count for number in range(count)), last - 1]:
        start = _line_start(data, place)
        if start not in found and (record := _read_line(data, start)) is not None:
            found[start] = record
    return found


def _line_start(data: mmap.mmap, byte: int) -> int:
    return data.rfind(b"\n", max(0, byte - LONGEST_LINE), byte) + 1


def _read_line(data: mmap.mmap, start: int) -> Record | None:
    end = data.find(b"\n", start, start + LONGEST_LINE)
    return _parse(data[start:end]) if end > 0 else None


def _stage_ranges(found: dict[int, Record], size: int) -> Iterator[tuple[int, int]]:
    """From where to where the records of each stage lie, with a margin, where few of them were met."""
    starts = sorted(found)
    for stage in {record["stage"] for record in found.values()}:
        own = [index for index, start in enumerate(starts) if found[start]["stage"] == stage]
        if len(own) < SAMPLES // 3:
            after = own[-1] + 1
            yield starts[max(0, own[0] - 1)], starts[after] if after < len(starts) else size


def _find_rare(file: BinaryIO) -> list[int]:
    """Bytes inside the records of validation and health; of too many an even share."""
    places, begin, end = [], 0, b""
    file.seek(0)
    while chunk := file.read(CHUNK):
        seam = end + chunk[:LONGEST_TEXT]  # a text may lie across two chunks
        for text in RARE_TEXTS:
            if end and (at := seam.find(text)) >= 0:
                places.append(begin - len(end) + at)
            at = chunk.find(text)
            while at >= 0:
                places.append(begin + at)
                at = chunk.find(text, at + len(text))
        begin += len(chunk)
        end = chunk[-LONGEST_TEXT:]
    return places[:: -(-len(places) // RARE) or 1]
