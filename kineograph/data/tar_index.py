"""An offset index of a tar file: where each member's bytes lie, found by reading headers only, kept beside the data.

Samples follow webdataset's rule: members that follow each other and share their name up to the first dot (000012.jpg, 000012.txt).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kineograph.data.shards import Shard

_BLOCK = 512
_VERSION = 1
_FOLDER = ".kineo-index"
_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_REGULAR = (b"0", b"\0", b"7")
_THREADS = 16  # headers lie far apart: this waits for the disk, not for the processor
_QUIET = 3.0  # seconds before the first word about progress, and between words


class Member(NamedTuple):
    name: str
    offset: int  # of its content
    size: int


class Cut(Exception):
    """The file ends inside a member, or holds something that is no header."""

    def __init__(self, reason: str, name: str | None = None) -> None:
        super().__init__(reason)
        self.name = name  # of the member that is not whole


def split_name(name: str) -> tuple[str, str] | None:
    """a/b.img.npy → (a/b, img.npy). None for what belongs to no sample: folders' notes, hidden files, files without an ending."""
    base = name.rpartition("/")[2]
    found = _NAME.fullmatch(name)
    if found is None or (base.startswith("__") and base.endswith("__")):
        return None
    return found[1], found[2].lower()


# Headers ----------------------------------------------------------------------------------------------------------


def members(read: Callable[[int, int], bytes], size: int) -> Iterator[Member]:
    """The regular files of a tar: ustar, GNU (long names) and pax. `read(offset, count)`; raises Cut."""
    at = 0
    longer: dict[str, str] = {}  # what an extended header says about the next member
    while at < size:
        block = read(at, _BLOCK)
        if len(block) < _BLOCK:
            raise Cut("ends inside a header")
        if not block.strip(b"\0"):  # the end mark
            return
        if not _sound(block):
            raise Cut(f"no tar header at byte {at}")
        kind, length = block[156:157], _number(block[124:136])
        content = at + _BLOCK
        if kind in (b"x", b"g", b"L", b"K"):
            data = read(content, length)
            if len(data) < length:
                raise Cut("ends inside a header")
            if kind == b"x":
                longer |= _pax(data)
            elif kind == b"L":
                longer["path"] = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        else:
            name = longer.get("path") or _name(block)
            length = int(longer.get("size", length))
            longer = {}
            if content + length > size:
                raise Cut("ends inside a member", name)
            if kind in _REGULAR and not name.endswith("/"):
                yield Member(name, content, length)
        at = content + -(-length // _BLOCK) * _BLOCK
    raise Cut("ends without an end mark")  # the last sample may lack members; what is there is used


def _sound(block: bytes) -> bool:
    """The checksum: the sum of all bytes, its own field counted as spaces."""
    try:
        return sum(block) - sum(block[148:156]) + 8 * 32 == _number(block[148:156])
    except ValueError:
        return False


def _number(field: bytes) -> int:
    """Octal text, or base 256 where the first bit says so (files of 8 GiB and more)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    return int(field.split(b"\0", 1)[0].strip() or b"0", 8)


def _name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    """Records `LENGTH KEY=VALUE\\n`."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at : at + 1] != b"\0":
        length = int(data[at : data.index(b" ", at)])
        key, _, value = data[data.index(b" ", at) + 1 : at + length - 1].partition(b"=")
        found[key.decode()] = value.decode("utf-8", "surrogateescape")
        at += length
    return found


# The index --------------------------------------------------------------------------------------------------------


@dataclass
class TarIndex:
    """The samples of one shard, and where their members lie."""

    keys: list[str]
    endings: list[str]  # distinct ones
    members: np.ndarray  # 4 M: of each member its sample, its ending, where its bytes begin, and how many there are
    problem: str = ""  # where the file is cut off
    stamp: str = ""  # size and time of the file

    def find(self, endings: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each sample's member with the first of these endings that it has → offset, size (−1: none), number of the ending."""
        count = len(self.keys)
        samples, kinds, offsets, sizes = self.members
        offset, size, which = (np.full(count, -1, np.int64) for _ in range(3))
        for place in reversed(range(len(endings))):
            if endings[place] in self.endings:
                here = kinds == self.endings.index(endings[place])
                rows = samples[here]
                offset[rows], size[rows], which[rows] = offsets[here], sizes[here], place
        return offset, size, which

    @staticmethod
    def build(path: str) -> TarIndex:
        """Raises OSError."""
        keys: list[str] = []
        kinds: dict[str, int] = {}
        table: list[tuple[int, int, int, int]] = []
        problem, broken = "", None
        with open(path, "rb") as file:
            handle, status = file.fileno(), os.fstat(file.fileno())

            def read(offset: int, count: int) -> bytes:
                return os.pread(handle, count, offset)

            try:
                for member in members(read, status.st_size):
                    named = split_name(member.name)
                    if named is None:
                        continue
                    key, ending = named
                    if not keys or keys[-1] != key:
                        keys.append(key)
                    table.append((len(keys) - 1, kinds.setdefault(ending, len(kinds)), member.offset, member.size))
            except (Cut, ValueError) as cut:
                broken = split_name(getattr(cut, "name", None) or "")
                problem = f"{cut} after {len(table)} whole files"
        if broken and keys and broken[0] == keys[-1]:  # the rest of this sample is gone
            table = [row for row in table if row[0] < len(keys) - 1]
            keys.pop()
        columns = np.array(table, np.int64).reshape(-1, 4).T  # 4 M
        return TarIndex(keys, list(kinds), columns, problem, _stamp(status))

    def save(self, path: Path) -> None:
        buffer = io.BytesIO()
        texts = ("\0".join([self.stamp, self.problem, *self.endings]), "\0".join(self.keys))
        about, keys = (np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts)
        np.savez(buffer, version=_VERSION, about=about, keys=keys, members=self.members)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, path)

    @staticmethod
    def load(path: Path) -> TarIndex:
        """Raises OSError, ValueError or KeyError where there is none that can be used."""
        with np.load(path, allow_pickle=False) as saved:
            if int(saved["version"]) != _VERSION:
                raise ValueError("of another version")
            about, keys = (saved[name].tobytes().decode("utf-8", "surrogateescape") for name in ("about", "keys"))
            stamp, problem, *endings = about.split("\0")
            return TarIndex(keys.split("\0") if keys else [], endings, saved["members"], problem, stamp)


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def index_of(path: str) -> TarIndex:
    """From beside the data, or from the user's cache folder, or built now and put where it can be. Raises OSError."""
    stamp = _stamp(os.stat(path))
    places = _places(path)
    for place in places:
        try:
            found = TarIndex.load(place)
        except (OSError, ValueError, KeyError, EOFError):
            continue
        if found.stamp == stamp:
            return found
    built = TarIndex.build(path)
    for place in places:
        try:
            built.save(place)
        except OSError:  # read-only data: the next place; and without any, it is built again next time
            continue
        break
    return built


def _places(path: str) -> list[Path]:
    real = Path(os.path.realpath(path))
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    digest = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()
    return [real.parent / _FOLDER / f"{real.name}.npz", home / "kineograph" / "index" / f"{digest}.npz"]


def index_all(shards: Sequence[Shard]) -> list[TarIndex | OSError]:
    """All of them, several at a time, with progress where it takes long."""

    def attempt(shard: Shard) -> TarIndex | OSError:
        try:
            return index_of(shard.place)
        except OSError as error:
            return error

    found: list[Any] = []
    told = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        for index in pool.map(attempt, shards):
            found.append(index)
            if time.monotonic() - told > _QUIET:
                told = time.monotonic()
                print(f"data.shards: {len(found)} of {len(shards)} indexed", file=sys.stderr, flush=True)
    return found
