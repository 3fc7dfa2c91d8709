"""Captions of a folder: sidecar .txt or .caption, metadata.jsonl/.csv/.parquet (or any other .jsonl that names files), videos/ + labels/,
prompts.txt + videos.txt.

A row of metadata may caption a span of a clip (`start` and `end`, in seconds), or several (`clips`, a list of spans).
"""

from __future__ import annotations

import csv
import errno
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from unicodedata import normalize

from kineograph.core.errors import InputError
from kineograph.core.text_file import MAX_CAPTION, clean_caption, parse_json, read_text, replace_surrogates, split_lines
from kineograph.data.parquet import read_rows

if TYPE_CHECKING:  # imports torch
    from kineograph.core.protocols import Source

_MAX_SIDECAR = 2**20  # bytes
_MAX_HEADER = 2**16  # characters
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
TEXT_KEYS = ("text", "caption", "prompt", "texts", "captions", "prompts")
FILE_KEYS = ("file_name", "video", "media_path", "path")
# Words that become wrong when the picture is mirrored.
_SIDES = re.compile(r"\b(?:left|right)(?:wards?|most|hand(?:ed)?)?\b|\b(?:anti-?|counter-?)?clockwise\b", re.IGNORECASE)
SIDECARS = (".txt", ".caption")
PROMPTS = ("prompts.txt", "prompt.txt", "captions.txt")
Lines = Literal["one", "several"]


class Problem(NamedTuple):
    path: str
    reason: str


class Span(NamedTuple):
    """A part of a clip with its own caption."""

    start: float  # seconds
    end: float  # infinite: to the end of the file
    texts: tuple[str, ...] | None  # its captions; None: those of the file


class Row(NamedTuple):
    """A list's entry for a file, or for a span of it."""

    file: str
    texts: tuple[str, ...]
    span: tuple[float, float] | None = None


class Captions(NamedTuple):
    """Captions by media name. Sidecar files are read on demand, since there may be millions."""

    listed: dict[str, tuple[str, ...]]  # media → captions from lists
    sidecars: dict[str, str]  # media → .txt or .caption beside it
    unused: list[str]  # such files that belong to no media
    problems: list[Problem]
    spans: dict[str, list[Span]]  # media → its captioned spans, which replace the whole file


def find_captions(root: Path, media: Sequence[str], others: Sequence[str]) -> Captions:
    """Find the captions of `media` in `others`, both relative to the root. Lists take precedence over sidecars."""
    media_names = {normalize("NFC", name): name for name in media}  # file systems encode é differently
    other_names = {normalize("NFC", name): name for name in others}
    listed: dict[str, tuple[str, ...]] = {}
    spans: dict[str, list[Span]] = {}
    problems: list[Problem] = []
    used: set[str] = set()
    for name in others:
        base = name.rpartition("/")[2]
        if base not in METADATA and base != "videos.txt" and not base.endswith(".jsonl"):
            continue
        folder = PurePosixPath(name).parent
        prompts = next((path for other in PROMPTS if (path := str(folder / other)) in other_names), None)
        if base in METADATA or (base.endswith(".jsonl") and names_files(root / name)):
            rows = _read_metadata(root / name, name, problems)
        elif base == "videos.txt" and prompts is not None:
            rows = _read_paired_lines(root, name, prompts)
            used |= {name, prompts}
        else:
            continue
        for file, texts, span in rows:
            target = media_names.get(normalize("NFC", str(folder / file)))
            if target is None:
                problems.append(Problem(name, f"names {file!r}, which does not exist"))
            elif span is not None:
                spans.setdefault(target, []).append(Span(*span, texts))
            elif texts:
                listed[target] = tuple(dict.fromkeys((*listed.get(target, ()), *texts)))
    sidecars: dict[str, str] = {}
    for name in media:
        for candidate in _sidecar_names(normalize("NFC", name)):
            if candidate in other_names:
                used.add(other_names[candidate])
                if name not in listed:
                    sidecars.setdefault(name, other_names[candidate])
    unused = [name for name in others if name.lower().endswith(SIDECARS) and name not in used]
    return Captions(listed, sidecars, unused, problems, {name: sorted(set(parts)) for name, parts in spans.items()})


def read_captions(path: Path, lines: Lines = "one") -> tuple[str, ...]:
    """The captions in a text file. Raises OSError or UnicodeDecodeError."""
    with open(path, "rb") as file:
        data = file.read(_MAX_SIDECAR + 1)
    if len(data) > _MAX_SIDECAR:
        raise OSError(errno.EFBIG, f"more than {_MAX_SIDECAR:,} bytes are no caption")
    return split_captions(data.decode("utf-8-sig"), lines)


def split_captions(text: str, lines: Lines) -> tuple[str, ...]:
    """The whole text as one caption, or each line as one; without empty and repeated ones."""
    texts = [text] if lines == "one" else split_lines(text)
    return clean_captions(texts)


def clean_captions(texts: Iterable[str]) -> tuple[str, ...]:
    """Captions of one item, each on one line; without empty and repeated ones."""
    return tuple(dict.fromkeys(filter(None, map(clean_caption, texts))))


def strip_captions(texts: Iterable[str]) -> tuple[str, ...]:
    """Captions of one item that are lines already, as they are."""
    return tuple(dict.fromkeys(filter(None, (replace_surrogates(text[:MAX_CAPTION]).strip() for text in texts))))


def several_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """Sample.texts of an item: its captions if it has several."""
    return tuple(texts) if len(texts) > 1 else ()


def _sidecar_names(name: str) -> list[str]:
    """a/videos/b/c.mp4 → a/videos/b/c.txt, a/labels/b/c.txt, and both with .caption."""
    stem = name.rpartition(".")[0]
    stems, parts = [stem], stem.split("/")
    for depth, part in enumerate(parts[:-1]):
        if part in ("videos", "images"):
            stems.append("/".join([*parts[:depth], "labels", *parts[depth + 1 :]]))
    return [stem + suffix for suffix in SIDECARS for stem in stems]


def _read_paired_lines(root: Path, videos: str, prompts: str) -> list[Row]:
    files, texts = (
        [line.strip() for line in split_lines(read_text(root / name).strip())] for name in (videos, prompts)
    )
    if len(files) != len(texts):
        raise InputError(
            f"{root / videos} has {len(files)} lines and {root / prompts} has {len(texts)}: each video needs its prompt on the same line"
        )
    return [Row(file, strip_captions([text])) for file, text in zip(files, texts, strict=True)]


def _read_metadata(path: Path, name: str, problems: list[Problem]) -> list[Row]:
    rows: list[Row] = []
    nameless: list[int] = []
    keys: dict[str, None] = {}  # of all lines, in order
    for number, row in _iterate_rows(path, name, problems):
        keys |= dict.fromkeys(row)
        file = _find_file(row)
        if file is None:
            nameless.append(number)
            continue
        clips = row.get("clips")
        for part in clips if isinstance(clips, list) and clips else [row]:
            try:
                rows.append(Row(file, find_texts(part), _parse_span(part, clips is not None)))
            except ValueError as error:
                problems.append(Problem(name, f"line {number}: {error}"))
    if nameless and not keys.keys() & set(FILE_KEYS):
        found = ", ".join([*keys][:12])[:200] or "none at all"
        captions = "" if keys.keys() & {*TEXT_KEYS, "clips"} else ", and that of the captions to text"
        reason = f"no key {list_words(FILE_KEYS)} in any line, but {found}: rename that of the files{captions}"
        problems.append(Problem(name, reason))
    else:
        problems += [Problem(name, f"line {number} has no file_name") for number in nameless]
    return rows


def list_words(words: Sequence[str]) -> str:
    """`a, b or c`"""
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _find_file(row: dict[str, Any]) -> str | None:
    return next((row[key] for key in FILE_KEYS if isinstance(row.get(key), str) and row[key]), None)


def find_texts(row: Any, keys: Sequence[str] = TEXT_KEYS) -> tuple[str, ...]:
    """The captions of a row: a text, or a list of them."""
    return clean_captions(find_values(row, keys))


def find_values(row: Any, keys: Sequence[str]) -> list[str]:
    """The text or list of texts under the first of these keys that has any."""
    for key in keys:
        value = row.get(key) if isinstance(row, dict) else None
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if any(map(str.strip, texts)):
            return texts
    return []


def _parse_span(row: Any, required: bool) -> tuple[float, float] | None:
    """Start and end in seconds; None: the whole file."""
    if not isinstance(row, dict):
        raise ValueError(f"a clip is an object with start, end and text, not {row!r}")
    start, end = (None if row.get(key) == "" else row.get(key) for key in ("start", "end"))
    if not required and start is None and end is None:
        return None
    try:
        first, last = 0.0 if start is None else float(start), math.inf if end is None else float(end)
    except (TypeError, ValueError):
        raise ValueError(f"start={start!r} and end={end!r} must be seconds") from None
    if not 0 <= first < last:
        raise ValueError(f"a clip from {first:g} to {last:g} s is empty")
    return first, last


def names_files(path: Path) -> bool:
    """Whether the first line of a .jsonl names a file: others may contain anything."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            row = parse_json(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and _find_file(row) is not None and bool(row.keys() & {*TEXT_KEYS, "clips"})


def _iterate_rows(path: Path, name: str, problems: list[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of a .csv, .jsonl or .parquet."""
    if path.suffix == ".parquet":
        yield from enumerate(_read_parquet(path), 1)
        return
    text = read_text(path)
    if path.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=split_header(text)[0])
        try:
            columns = reader.fieldnames or ()
            if not set(FILE_KEYS) & set(columns):
                raise InputError(
                    f"{path} has the columns {', '.join(columns) or '(none)'}: file_name and text are needed"
                )
            yield from ((reader.line_num, row) for row in reader)
        except csv.Error as error:  # such as a quotation mark that is never closed
            raise InputError(f"{path}, line {reader.line_num}, is no CSV: {error}") from None
        return
    for number, line in enumerate(split_lines(text), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            problems.append(Problem(name, f"line {number} is not JSON: {error}"))
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            problems.append(Problem(name, f"line {number} is not a JSON object"))


def split_header(text: str, delimiters: str = ",\t;") -> tuple[str, list[str]]:
    """→ delimiter and columns of a table: the first delimiter that separates a column of files, or else that separates anything."""
    found: dict[str, list[str]] = {}
    for delimiter in delimiters:
        with suppress(csv.Error):
            found[delimiter] = next(csv.reader(io.StringIO(text[:_MAX_HEADER], newline=""), delimiter=delimiter), [])
    fitting = [delimiter for delimiter, columns in found.items() if set(FILE_KEYS) & set(columns)]
    several = [delimiter for delimiter, columns in found.items() if len(columns) > 1]
    best = [*fitting, *several, delimiters[0]][0]
    return best, found.get(best, [])


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    def choose(columns: list[str]) -> list[str]:
        if not set(FILE_KEYS) & set(columns):
            raise InputError(f"{path} has the columns {', '.join(columns)}: file_name and text are needed")
        return [name for name in columns if name in {*FILE_KEYS, *TEXT_KEYS, "start", "end", "clips"}]

    yield from read_rows(path, choose)


def read_parquet_columns(path: Path) -> set[str]:
    """Names of the columns of a .parquet file; none if it cannot be read, or without pyarrow."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_schema
    except ImportError:
        return set()
    try:
        return set(read_schema(path).names)
    except (ArrowException, OSError, ValueError):
        return set()


def read_parquet_column(path: Path, names: Sequence[str], key: str) -> list[str]:
    """The texts of the first of these columns that a .parquet file has; a row without one gives an empty text."""

    def choose(columns: list[str]) -> list[str]:
        name = next((name for name in names if name in columns), None)
        if name is None:
            raise InputError(f"{path} has the columns {', '.join(columns[:12])}: set {key} to that of the captions")
        return [name]

    values = (next(iter(row.values())) for row in read_rows(path, choose))
    return [" ".join(str(value).split()) if value is not None else "" for value in values]


def names_side(caption: str) -> bool:
    """Whether a caption says left, right or clockwise."""
    return _SIDES.search(caption) is not None


def warn_of_flip(flip: float, captions: Sequence[str]) -> str | None:
    """A warning if `data.flip` mirrors pictures whose captions name a side."""
    sided = [caption for caption in captions if names_side(caption)] if flip else []
    if not sided:
        return None
    return (
        f"data.flip={flip:g} mirrors pictures, but not the words of their captions: {len(sided)} of {len(captions)} captions name a side, "
        f"such as {sided[0]!r}; set data.flip=0"
    )


def require_captions(source: Source, consumer: str, kind: str = "items") -> str | None:
    """Refuse a source without captions. → a line for the log about items that train on the null text.

    `consumer` names what reads the captions ("stage generator"), `kind` the items. A few held-out items may all be without.
    """
    missing, refused = _list_missing(source)
    if not missing:
        return None
    from kineograph.core.protocols import Stream

    total, has_none = str(len(source)), len(missing) >= len(source)
    if isinstance(source, Stream):
        total, has_none = "the first", source.caption(0) is None
    named = missing if has_none else refused or missing
    counted = f"{len(named)} of {total} {kind} have"
    examples = ", ".join(named[:3]) + (" …" if len(named) > 3 else "")
    if refused or (has_none and kind == "items"):
        remedy = source.caption_help
        if not has_none:
            remedy += "; or set data.uncaptioned=skip, or data.uncaptioned=empty to train these on the null text"
        raise InputError(f"{consumer} reads captions, and {counted} none ({examples}): {remedy}")
    verb = "trains" if kind == "items" else "judges"
    return f"{counted} no caption ({examples}): data.uncaptioned=empty {verb} them on the null text"


def _list_missing(source: Source) -> tuple[list[str], list[str]]:
    """The items without a caption, and those of them that data.uncaptioned refuses."""
    if source.parts:
        found = {name: _list_missing(part) for name, part in source.parts.items()}
        missing, refused = ([f"{name}/{path}" for name, lists in found.items() for path in lists[n]] for n in (0, 1))
        return missing, refused
    form = source.captioning.at(0)
    missing = source.list_missing_captions() if form.needs_text else []
    return missing, [] if form.blank else missing
