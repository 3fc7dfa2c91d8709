"""Where tar shards lie: folders, patterns, brace ranges, numbered templates, pipes and URLs → a list of shards with names."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from kineograph.core.errors import ConfigError, InputError, NoData

ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_PACKED = ENDINGS[1:]  # no offsets into these
_FILE = re.compile(r"[^\s/'\"|;&=?<>]+\.(?:tar(?:\.(?:gz|bz2|xz))?|tgz)(?![\w.])", re.IGNORECASE)
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)(?:\.\.(\d+))?\}|\{([^{}]*,[^{}]*)\}")
_FETCH = {  # as webdataset opens them
    "s3": ["aws", "s3", "cp", "{}", "-", "--only-show-errors"],
    "gs": ["gsutil", "-q", "cat", "{}"],
    "http": [
        "curl",
        "--fail",
        "--silent",
        "--show-error",
        "--location",
        "--connect-timeout",
        "30",
        "--retry",
        "5",
        "{}",
    ],
}
_FETCH["https"] = _FETCH["http"]


@dataclass(frozen=True)
class Shard:
    """One tar file, or what prints one."""

    place: str
    """A path, a URL, or pipe:COMMAND."""
    name: str
    """Short and unique: what its samples' identities begin with, the same for a file and for a pipe that fetches it."""

    @property
    def number(self) -> int | None:
        """The last number in its name: embeddings of 00012.tar lie in img_emb_0012.npy."""
        return last_number(self.name)

    @property
    def streamed(self) -> bool:
        """Whether it can only be read from its beginning."""
        return self.command is not None or self.place.lower().endswith(_PACKED)

    @property
    def command(self) -> list[str] | None:
        """What prints it; None for a file."""
        if self.place.startswith("pipe:"):
            return ["sh", "-c", self.place.removeprefix("pipe:").strip()]
        fetch = _FETCH.get(_scheme(self.place))
        return [word.replace("{}", self.place) for word in fetch] if fetch else None


def find_shards(given: str | Iterable[str], start: int = 0, end: int | None = None, width: int = 6) -> list[Shard]:
    """Every shard that `data.shards` names, in order. `{}` stands for the numbers start … end, `width` digits wide."""
    texts = [given] if isinstance(given, str) else list(given)
    places = [place for text in texts for numbered in _numbered(text, start, end, width) for place in _local(numbered)]
    if not places:
        raise InputError(f"data.shards={given!r} names no shard at all")
    repeated = [place for place, count in Counter(places).items() if count > 1]
    if repeated:
        raise InputError(f"data.shards names {repeated[0]} twice")
    return [Shard(place, name) for place, name in zip(places, _names(places), strict=True)]


def unusable(shards: Sequence[Shard], reason: str) -> InputError:
    """What to raise where no shard can be read: files that are not there are another matter than files that are broken."""
    gone = all(shard.command is None and not os.path.exists(shard.place) for shard in shards)
    return NoData(reason) if gone else InputError(reason)


def expand(text: str) -> list[str]:
    """{00..03} → 00 01 02 03 (as many digits as the ends have), {a,b} → a b; several braces give all combinations."""
    parts: list[list[str]] = []
    at = 0
    for found in _BRACES.finditer(text):
        parts.append([text[at : found.start()]])
        first, last, step, listed = found.groups()
        if listed is not None:
            parts.append(listed.split(","))
        else:
            low, high, stride = int(first), int(last), int(step or 1)
            if high < low or stride < 1:
                raise ConfigError(f"data.shards={text}: {found[0]} is an empty range, the first number comes first")
            parts.append([f"{number:0{len(first)}d}" for number in range(low, high + 1, stride)])
        at = found.end()
    parts.append([text[at:]])
    return ["".join(chosen) for chosen in product(*parts)]


def last_number(name: str) -> int | None:
    digits = re.findall(r"\d+", name.split(".", 1)[0])
    return int(digits[-1]) if digits else None


def _numbered(text: str, start: int, end: int | None, width: int) -> list[str]:
    if end is None:
        if "{}" in text and _scheme(text) != "pipe":
            raise ConfigError(f"data.shards={text} has {{}} for a number: set data.end_shard (the last one, included)")
        return expand(text)
    if "{}" not in text:
        raise ConfigError(f"data.end_shard={end} counts shards, and data.shards={text} has no {{}} for their number")
    if end < start:
        raise ConfigError(f"data.end_shard={end} lies before data.start_shard={start}")
    return [text.replace("{}", f"{number:0{width}d}") for number in range(start, end + 1)]


def _scheme(place: str) -> str:
    found = re.match(r"(pipe):|([a-z0-9]+)://", place)
    return (found[1] or found[2]) if found else ""


def _local(place: str) -> list[str]:
    """A folder is all the shards in it, a pattern what it matches; pipes and URLs stay as they are."""
    scheme = _scheme(place)
    if scheme == "file":
        place = place.removeprefix("file://")
    elif scheme:
        if scheme != "pipe" and scheme not in _FETCH:
            raise ConfigError(
                f"data.shards={place}: {scheme}:// is not fetched; use pipe:COMMAND that prints the tar file"
            )
        return [place]
    path = Path(place).expanduser()
    if path.is_dir():
        found = sorted(
            os.path.join(folder, name)
            for folder, folders, names in os.walk(path, followlinks=True)
            if not any(part.startswith(".") for part in Path(folder).relative_to(path).parts)
            for name in names
            if name.lower().endswith(ENDINGS) and not name.startswith(".")
        )
        if not found:
            raise InputError(f"data.shards={place} holds no tar files: give the folder, file or range of your shards")
        return found
    if not path.exists() and re.search(r"[*?\[]", place):
        found = sorted(glob.glob(str(path)))
        if not found:
            raise NoData(f"data.shards={place} matches no file")
        return found
    return [str(path)]


def _names(places: list[str]) -> list[str]:
    """The file's own name where that tells shards apart, else as much of the path as differs."""
    short = [found[-1] if (found := _FILE.findall(place)) else place.rstrip("/").rpartition("/")[2] for place in places]
    if len(set(short)) == len(places):
        return short
    shared = os.path.commonprefix(places)  # noqa: RUF071 (pipes are no paths; cut at a slash below)
    shared = shared[: shared.rfind("/") + 1]
    return [place.removeprefix(shared) for place in places]
