"""Expanding data.shards: folders, patterns, brace ranges, numbered templates, pipes and URLs → a list of named shards."""

from __future__ import annotations

import glob
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from kineograph.core.errors import ConfigError, InputError, NoData
from kineograph.core.remote_files import PROTOCOLS

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_COMPRESSED = SUFFIXES[1:]  # no offsets into these
_FILE = re.compile(r"[^\s/'\"|;&=?<>]+\.(?:tar(?:\.(?:gz|bz2|xz))?|tgz)(?![\w.])", re.IGNORECASE)
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)(?:\.\.(\d+))?\}|\{([^{}]*,[^{}]*)\}")
_MAX_SHARDS = 10_000_000
_CURL = "curl --fail --silent --show-error --location --connect-timeout 30 --retry 5 {}"
_FETCH = {  # as webdataset opens them; without these tools, and for other schemes, fsspec reads them
    "s3": "aws s3 cp {} - --only-show-errors",
    "gs": "gsutil -q cat {}",
    "http": _CURL,
    "https": _CURL,
}


@dataclass(frozen=True)
class Shard:
    """One tar file, or a command that prints one."""

    url: str
    """A path, a URL, or pipe:COMMAND."""
    name: str
    """Short and unique: its samples' identities begin with it. The same for a file and for a pipe that fetches it."""

    @property
    def number(self) -> int | None:
        """The last number in its name: embeddings of 00012.tar are in img_emb_0012.npy."""
        return last_number(self.name)

    @property
    def is_stream(self) -> bool:
        """It can only be read from its beginning."""
        return self.command is not None or self.url.lower().endswith(_COMPRESSED)

    @property
    def command(self) -> list[str] | None:
        """The command that prints it; None for a file."""
        if self.url.startswith("pipe:"):
            return ["sh", "-c", self.url.removeprefix("pipe:").strip()]
        scheme = _scheme(self.url)
        if not scheme:
            return None
        tool = _FETCH.get(scheme, "").split()
        if tool and _is_installed(tool[0]):
            return [word.replace("{}", self.url) for word in tool]
        return [sys.executable, "-P", "-m", "kineograph.data.print_url", self.url]


@cache
def _is_installed(tool: str) -> bool:
    return shutil.which(tool) is not None


def find_shards(shards: str | Iterable[str], start: int = 0, end: int | None = None, width: int = 6) -> list[Shard]:
    """All shards of `data.shards`, in order. `{}` is replaced by the numbers start … end, `width` digits wide."""
    texts = [shards] if isinstance(shards, str) else list(shards)
    urls = [url for text in texts for numbered in _expand_numbers(text, start, end, width) for url in _expand(numbered)]
    if not urls:
        raise InputError(f"data.shards={shards!r} names no shard at all")
    repeated = [url for url, count in Counter(urls).items() if count > 1]
    if repeated:
        raise InputError(f"data.shards names {repeated[0]} twice")
    return [Shard(url, name) for url, name in zip(urls, _short_names(urls), strict=True)]


def shards_error(shards: Sequence[Shard], message: str) -> InputError:
    """NoData if no file exists, an InputError if files are damaged."""
    missing = all(shard.command is None and not os.path.exists(shard.url) for shard in shards)
    return NoData(message) if missing else InputError(message)


def expand_braces(text: str) -> list[str]:
    """{00..03} → 00 01 02 03 (with the width of the ends), {a,b} → a b; several braces give all combinations."""
    parts: list[list[str]] = []
    at = 0
    for match in _BRACES.finditer(text):
        parts.append([text[at : match.start()]])
        first, last, step, choices = match.groups()
        if choices is not None:
            parts.append(choices.split(","))
        else:
            low, high, stride = int(first), int(last), int(step or 1)
            if high < low or stride < 1:
                raise ConfigError(f"data.shards={text}: {match[0]} is an empty range; put the lower number first")
            if (high - low) // stride >= _MAX_SHARDS:
                raise ConfigError(f"data.shards={text}: {match[0]} names more than {_MAX_SHARDS:,} shards")
            parts.append([f"{number:0{len(first)}d}" for number in range(low, high + 1, stride)])
        at = match.end()
    parts.append([text[at:]])
    if math.prod(map(len, parts)) > _MAX_SHARDS:
        raise ConfigError(f"data.shards={text} names more than {_MAX_SHARDS:,} shards")
    return ["".join(chosen) for chosen in product(*parts)]


def last_number(name: str) -> int | None:
    digits = re.findall(r"\d+", name.split(".", 1)[0])
    return int(digits[-1]) if digits else None


def _expand_numbers(text: str, start: int, end: int | None, width: int) -> list[str]:
    if end is None:
        if "{}" in text and _scheme(text) != "pipe":
            raise ConfigError(f"data.shards={text} has {{}} for a number: set data.end_shard (the last one, included)")
        return expand_braces(text)
    if "{}" not in text:
        raise ConfigError(f"data.end_shard={end} numbers the shards, but data.shards={text} has no {{}} for the number")
    if end < start:
        raise ConfigError(f"data.end_shard={end} is below data.start_shard={start}")
    return [text.replace("{}", f"{number:0{width}d}") for number in range(start, end + 1)]


def _scheme(url: str) -> str:
    match = re.match(r"(pipe):|([a-z0-9]+)://", url)
    return (match[1] or match[2]) if match else ""


def _expand(url: str) -> list[str]:
    """A folder gives all shards in it, a pattern its matches; pipes and URLs stay as they are."""
    scheme = _scheme(url)
    if scheme == "file":
        url = url.removeprefix("file://")
    elif scheme:
        if scheme not in ("pipe", *_FETCH, *PROTOCOLS):
            raise ConfigError(
                f"data.shards={url}: {scheme}:// is not opened: use s3://, gs://, https:// or hf://, or pipe:COMMAND that prints the "
                "tar file"
            )
        return [url]
    # A file may have the name pipe:COMMAND.tar: it is read, not run.
    return [f"./{file}" if _scheme(file) else file for file in _list_files(url)]


def _list_files(url: str) -> list[str]:
    path = Path(url).expanduser()
    if path.is_dir():
        files = sorted(_find_tars(path))
        if not files:
            raise InputError(f"data.shards={url} holds no tar files: give the folder, file or range of your shards")
        return files
    if not path.exists() and re.search(r"[*?\[]", url):
        files = sorted(glob.glob(str(path)))
        if not files:
            raise NoData(f"data.shards={url} matches no file")
        return files
    return [str(path)]


def _find_tars(root: Path) -> Iterator[str]:
    """Tars in a folder and its subfolders, following links, each folder once: links may lead in circles."""
    waiting, visited = [str(root)], set()
    while waiting:
        folder = waiting.pop()
        with suppress(OSError):  # no permission, or a path that is too long
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        waiting.append(entry.path)
                    elif entry.name.lower().endswith(SUFFIXES):
                        yield entry.path


def _short_names(urls: list[str]) -> list[str]:
    """The file's own name if these are unique, else the part of the path that differs."""
    names = [files[-1] if (files := _FILE.findall(url)) else url.rstrip("/").rpartition("/")[2] for url in urls]
    if len(set(names)) == len(urls):
        return names
    prefix = os.path.commonprefix(urls)  # noqa: RUF071 (pipes are no paths; cut at a slash below)
    prefix = prefix[: prefix.rfind("/") + 1]
    return [url.removeprefix(prefix) for url in urls]
