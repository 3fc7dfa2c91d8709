"""Captions of a folder: sidecar .txt, metadata.jsonl/.csv (or any other .jsonl that names files), videos/ + labels/, prompts.txt + videos.txt.

A row of metadata may speak of a part of a clip (`start` and `end`, in seconds), or of several (`clips`, a list of such parts).
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from unicodedata import normalize

from kineograph.core.errors import InputError
from kineograph.core.lines import lines_of
from kineograph.core.protocols import Source

METADATA = ("metadata.jsonl", "metadata.csv")
TEXT_KEYS = ("text", "caption", "prompt")
FILE_KEYS = ("file_name", "video", "media_path", "path")
PROMPTS = ("prompts.txt", "prompt.txt", "captions.txt")


class Problem(NamedTuple):
    path: str
    reason: str


class Span(NamedTuple):
    """A part of a clip that has a caption of its own."""

    start: float  # seconds
    end: float  # infinite: to the end of the file
    text: str


class Row(NamedTuple):
    """What a list says about one file, or about a part of it."""

    file: str
    text: str
    span: tuple[float, float] | None = None


class Captions(NamedTuple):
    """Found captions by media name; sidecar files are read when they are needed, since there may be millions."""

    listed: dict[str, str]  # media → caption from a list
    sidecars: dict[str, str]  # media → .txt beside it
    unused: list[str]  # .txt files that belong to no media
    problems: list[Problem]
    spans: dict[str, list[Span]]  # media → the parts that have captions; such a file is its parts


def find_captions(root: Path, media: Iterable[str], others: Iterable[str]) -> Captions:
    """`media` and `others` are names relative to the root. Lists of captions beat files beside the media."""
    media, others = list(media), list(others)
    known = {normalize("NFC", name): name for name in media}  # systems differ in how they spell é
    others_by_name = {normalize("NFC", name): name for name in others}
    listed: dict[str, str] = {}
    problems: list[Problem] = []
    lists: set[str] = set()
    spans: dict[str, list[Span]] = {}
    for name in others:
        base = PurePosixPath(name).name
        if base in METADATA or (base.endswith(".jsonl") and _names_files(root / name)):
            rows = _metadata_rows(root / name, name, problems)
        elif base == "videos.txt" and (prompts := _prompts_beside(name, others_by_name)) is not None:
            rows = _paired_lines(root, name, prompts)
            lists |= {name, prompts}
        else:
            continue
        folder = PurePosixPath(name).parent
        for file, text, span in rows:
            target = known.get(normalize("NFC", str(folder / file)))
            if target is None:
                problems.append(Problem(name, f"names {file!r}, which is not there"))
            elif span is not None:
                spans.setdefault(target, []).append(Span(*span, text))
            elif text:
                listed.setdefault(target, text)
    sidecars: dict[str, str] = {}
    used = set()
    for name in media:
        for candidate in _sidecar_names(normalize("NFC", name)):
            if candidate in others_by_name:
                used.add(others_by_name[candidate])
                if name not in listed:
                    sidecars.setdefault(name, others_by_name[candidate])
    unused = [name for name in others if name.lower().endswith(".txt") and name not in used and name not in lists]
    return Captions(listed, sidecars, unused, problems, {name: sorted(set(parts)) for name, parts in spans.items()})


def read_caption(path: Path) -> str:
    """The whole file as one line; raises OSError or UnicodeDecodeError."""
    return " ".join(path.read_text(encoding="utf-8-sig").split())


def _sidecar_names(name: str) -> list[str]:
    """a/videos/b/c.mp4 → a/videos/b/c.txt, a/labels/b/c.txt."""
    path = PurePosixPath(name).with_suffix(".txt")
    names = [str(path)]
    for place, part in enumerate(path.parts[:-1]):
        if part in ("videos", "images"):
            names.append(str(PurePosixPath(*path.parts[:place], "labels", *path.parts[place + 1 :])))
    return names


def _prompts_beside(name: str, others: Mapping[str, str]) -> str | None:
    return next((found for other in PROMPTS if (found := _sibling(name, other)) in others), None)


def _sibling(name: str, other: str) -> str:
    return str(PurePosixPath(name).parent / other)


def _paired_lines(root: Path, videos: str, prompts: str) -> list[Row]:
    files, texts = ([line.strip() for line in lines_of(_text(root / name).strip())] for name in (videos, prompts))
    if len(files) != len(texts):
        raise InputError(
            f"{root / videos} has {len(files)} lines and {root / prompts} has {len(texts)}: each video needs its prompt on the same line"
        )
    return [Row(file, text) for file, text in zip(files, texts, strict=True)]


def _metadata_rows(path: Path, name: str, problems: list[Problem]) -> list[Row]:
    rows = []
    for number, row in _numbered_rows(path, name, problems):
        file = _file_of(row)
        if file is None:
            problems.append(Problem(name, f"line {number} has no file_name"))
            continue
        clips = row.get("clips")
        for part in clips if isinstance(clips, list) and clips else [row]:
            try:
                rows.append(Row(file, _text_of(part), _span_of(part, clips is not None)))
            except ValueError as error:
                problems.append(Problem(name, f"line {number}: {error}"))
    return rows


def _file_of(row: dict[str, Any]) -> str | None:
    return next((row[key] for key in FILE_KEYS if isinstance(row.get(key), str) and row[key]), None)


def _text_of(row: dict[str, Any]) -> str:
    text = next((row[key] for key in TEXT_KEYS if isinstance(row.get(key), str)), "")
    return " ".join(text.split())


def _span_of(row: Any, needed: bool) -> tuple[float, float] | None:
    """The seconds that a row speaks of; None: the whole file."""
    if not isinstance(row, dict):
        raise ValueError(f"a clip is an object with start, end and text, not {row!r}")
    if not needed and all(row.get(key) in (None, "") for key in ("start", "end")):
        return None
    start, end = row.get("start"), row.get("end")
    try:
        begin = float(start) if start not in (None, "") else 0.0
        stop = float(end) if end not in (None, "") else math.inf
    except (TypeError, ValueError):
        raise ValueError(f"start={start!r} and end={end!r} are seconds") from None
    if not 0 <= begin < stop:
        raise ValueError(f"a clip from {begin:g} to {stop:g} s is empty")
    return begin, stop


def _names_files(path: Path) -> bool:
    """Whether the first line of a .jsonl speaks of a file: others may be anything."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            row = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and _file_of(row) is not None and bool(row.keys() & {*TEXT_KEYS, "clips"})


def _numbered_rows(path: Path, name: str, problems: list[Problem]) -> Iterable[tuple[int, dict[str, Any]]]:
    text = _text(path)
    if path.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""))
        if not set(FILE_KEYS) & set(reader.fieldnames or ()):
            raise InputError(
                f"{path} has the columns {', '.join(reader.fieldnames or ()) or '(none)'}: file_name and text are needed"
            )
        yield from ((reader.line_num, row) for row in reader)
        return
    for number, line in enumerate(lines_of(text), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(Problem(name, f"line {number} is not JSON: {error}"))
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            problems.append(Problem(name, f"line {number} is not a JSON object"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def require_captions(source: Source, consumer: str, kind: str = "items") -> None:
    """Refuse a source without captions. `consumer` names what reads them ("stage generator"), `kind` the items."""
    missing = source.list_missing_captions()
    if not missing:
        return
    examples = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
    raise InputError(
        f"{consumer} reads captions, and {len(missing)} of {len(source)} {kind} have none ({examples}): {source.caption_help}"
    )
