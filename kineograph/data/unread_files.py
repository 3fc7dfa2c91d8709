"""Files of a folder that training does not read, by their ending, and captions in forms that it does not know."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kineograph.core.text_file import parse_json
from kineograph.data.captions import (
    FILE_KEYS,
    METADATA,
    PROMPTS,
    SIDECARS,
    TEXT_KEYS,
    Problem,
    list_words,
    names_files,
    read_parquet_columns,
    split_header,
)
from kineograph.data.media_config import media_kind

_KEY = re.compile(r'"([^"\\]{1,255})"\s*:')  # of an object
_HEAD = 1 << 16  # bytes read of a list
_REMEDY = "write metadata.jsonl instead, a line per file: " + '{"file_name": "a.jpg", "text": "a cat"}'
_CONVERT = {
    **dict.fromkeys(
        (".heic", ".heif", ".svg", ".psd", ".raw", ".dng", ".cr2", ".nef", ".ico", ".tga", ".exr"), "to PNG or JPEG"
    ),
    **dict.fromkeys((".m2ts", ".mts", ".vob", ".rm", ".rmvb", ".y4m", ".m2v"), "to MP4"),
    **dict.fromkeys((".zip", ".rar", ".7z", ".gz", ".tgz", ".zst"), "by unpacking"),
}
_DOCUMENTS = {"", ".md", ".rst", ".pdf", ".html"}


class Unread(NamedTuple):
    note: str | None
    problems: list[Problem]


def find_unread(root: Path, media: Sequence[str], others: Sequence[str]) -> Unread:
    """Describe the files among `others` that are neither media nor captions."""
    rest = [name for name in others if not name.lower().endswith(SIDECARS) and not _is_list(root, name)]
    uncaptioned = {str(PurePosixPath(name).with_suffix("")) for name in media} - {
        str(PurePosixPath(name).with_suffix("")) for name in others if name.lower().endswith(SIDECARS)
    }
    problems = [problem for name in others for problem in _find_unknown_captions(root, name, uncaptioned)]
    named = {problem.path for problem in problems}
    endings = Counter(PurePosixPath(name).suffix.lower() for name in rest if name not in named)
    parts = [
        f"{count} {ending or 'without an ending'}"
        + (f" (convert them {_CONVERT[ending]})" if ending in _CONVERT else "")
        for ending, count in endings.most_common()
        if ending not in _DOCUMENTS
    ]
    more = f", and {len(parts) - 12} more endings" if len(parts) > 12 else ""
    return Unread(f"not read: {', '.join(parts[:12])}{more}" if parts else None, problems)


def _is_list(root: Path, name: str) -> bool:
    """Whether a file lists captions in a form that is read."""
    base = PurePosixPath(name).name
    return base in (*METADATA, *PROMPTS, "videos.txt") or (base.endswith(".jsonl") and names_files(root / name))


def _find_unknown_captions(root: Path, name: str, uncaptioned: Set[str]) -> Iterator[Problem]:
    path = PurePosixPath(name)
    if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
        columns = _read_columns(root / name)
        if path.name in METADATA:
            if columns & set(FILE_KEYS) and not columns & {*TEXT_KEYS, "clips"}:
                yield Problem(
                    name,
                    f"no column {list_words(TEXT_KEYS[:3])}, but {', '.join(sorted(columns))}: rename that of the captions",
                )
        elif len(columns) > 1:
            yield Problem(
                name,
                f"not read, with the columns {', '.join(sorted(columns))}: if these are captions, name it "
                f"metadata{'.parquet' if path.suffix.lower() == '.parquet' else '.csv'}, and its columns file_name and text",
            )
    elif path.suffix.lower() == ".jsonl":
        keys = _read_keys(root / name)
        if keys & set(FILE_KEYS) and not keys & {*TEXT_KEYS, "clips"}:
            yield Problem(
                name,
                f"no key {list_words(TEXT_KEYS[:3])} in its first line, but {', '.join(sorted(keys))}: rename that of the captions",
            )
    elif path.suffix.lower() == ".json":
        form = _find_json_form(_read_head(root / name))
        if form == "item" and str(path.with_suffix("")) in uncaptioned:
            yield Problem(name, "a caption in a .json is not read: write the text into a .txt of the same name")
        elif form in ("COCO's form", "a .json"):
            yield Problem(name, f"captions in {form} are not read: {_REMEDY}")


def _find_json_form(head: str) -> str | None:
    """How the beginning of a .json holds captions, if it does: in COCO's form, for many files, or for one item."""
    if '"images"' in head and '"file_name"' in head:
        return "COCO's form"
    keys = set(_KEY.findall(head))
    if any(media_kind(key) for key in keys) or (keys & set(FILE_KEYS) and keys & set(TEXT_KEYS)):
        return "a .json"
    return "item" if keys & set(TEXT_KEYS) else None


def _read_head(path: Path) -> str:
    with suppress(OSError), open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read(_HEAD)
    return ""


def _read_columns(path: Path) -> set[str]:
    if path.suffix.lower() == ".parquet":
        return read_parquet_columns(path)
    columns = split_header(_read_head(path), "\t,;" if path.suffix.lower() == ".tsv" else ",\t;")[1]
    return {column.strip() for column in columns if column.strip()}


def _read_keys(path: Path) -> set[str]:
    with suppress(ValueError):
        row = parse_json(next((line for line in _read_head(path).splitlines() if line.strip()), "null"))
        return set(row) if isinstance(row, dict) else set()
    return set()
