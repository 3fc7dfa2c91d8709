"""Tar shards: an offset index of files, kept beside the data, and a reader of streams such as pipes.

Samples follow webdataset's rule: consecutive members that share their name up to the first dot (000012.jpg, 000012.txt).
"""

from __future__ import annotations

import io
import os
import re
import select
import shlex
import signal
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any

import numpy as np

from kineograph.core.errors import Unreadable
from kineograph.core.run_folder import write_atomic
from kineograph.data.probe import map_with_progress, user_cache
from kineograph.data.shards import Shard

_VERSION = 1
_FOLDER = ".kineo-index"
_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_STDERR_CHARS = 300  # of a failed command's stderr, in its error
_EXIT_TIMEOUT = 10.0  # seconds a command may take to exit after its output has been read
_DAMAGED = (tarfile.TarError, EOFError, zlib.error, LZMAError)


def split_name(name: str) -> tuple[str, str] | None:
    """a/b.img.npy → (a/b, img.npy). None for members that belong to no sample: hidden files, files without a suffix."""
    base = name.rpartition("/")[2]
    match = _NAME.fullmatch(name)
    if match is None or (base.startswith("__") and base.endswith("__")):
        return None
    return match[1], match[2].lower()


# Index ------------------------------------------------------------------------------------------------------------


@dataclass
class TarIndex:
    """The samples of one shard, and the byte ranges of their members."""

    keys: list[str]
    suffixes: list[str]  # distinct ones
    members: np.ndarray  # 4 M: per member its sample, suffix, offset and size
    problem: str = ""  # why the file is not whole
    stamp: str = ""  # size and time of the file

    def find(self, suffixes: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each sample's member with the first of these suffixes that it has → offset, size, number of the suffix (−1: none)."""
        samples, kinds, offsets, sizes = self.members
        offset, size, which = (np.full(len(self.keys), -1, np.int64) for _ in range(3))
        for number in reversed(range(len(suffixes))):
            if suffixes[number] in self.suffixes:
                mask = kinds == self.suffixes.index(suffixes[number])
                rows = samples[mask]
                offset[rows], size[rows], which[rows] = offsets[mask], sizes[mask], number
        return offset, size, which

    @staticmethod
    def build(path: str) -> TarIndex:
        """Read all headers of an uncompressed tar. Raises OSError."""
        keys: list[str] = []
        kinds: dict[str, int] = {}
        table: list[tuple[int, int, int, int]] = []
        problem = ""
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            try:
                for info in _iterate_members(file):
                    named = split_name(info.name)
                    if named is None:
                        continue
                    key, suffix = named
                    if not keys or keys[-1] != key:
                        keys.append(key)
                    if info.offset_data + info.size > status.st_size:
                        problem = f"ends inside a member after {len(table)} whole files"
                        table = [row for row in table if row[0] < len(keys) - 1]  # drop the incomplete sample
                        keys.pop()
                        break
                    table.append((len(keys) - 1, kinds.setdefault(suffix, len(kinds)), info.offset_data, info.size))
            except (tarfile.TarError, ValueError) as error:
                problem = f"{error} after {len(table)} whole files"
        columns = np.array(table, np.int64).reshape(-1, 4).T  # 4 M
        return TarIndex(keys, list(kinds), columns, problem, _file_stamp(status))

    def save(self, path: Path) -> None:
        buffer = io.BytesIO()
        texts = ("\0".join([self.stamp, self.problem, *self.suffixes]), "\0".join(self.keys))
        about, keys = (np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts)
        np.savez(buffer, version=_VERSION, about=about, keys=keys, members=self.members)
        write_atomic(path, buffer.getvalue())

    @staticmethod
    def load(path: Path) -> TarIndex:
        """Raises OSError, ValueError or KeyError if there is no usable index."""
        with np.load(path, allow_pickle=False) as saved:
            if int(saved["version"]) != _VERSION:
                raise ValueError("another version")
            about, keys = (saved[name].tobytes().decode("utf-8", "surrogateescape") for name in ("about", "keys"))
            stamp, problem, *suffixes = about.split("\0")
            return TarIndex(keys.split("\0") if keys else [], suffixes, saved["members"], problem, stamp)


class _FastTarInfo(tarfile.TarInfo):
    """Reads only name and size of an ordinary file's header, which takes a quarter of the time."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _FastTarInfo:
        if len(buf) != tarfile.BLOCKSIZE or buf[156:157] != tarfile.REGTYPE or buf[257:262] != b"ustar" or buf[345]:
            return super().frombuf(buf, encoding, errors)
        info = cls(buf[:100].split(b"\0", 1)[0].decode("utf-8", "surrogateescape"))
        info.size = tarfile.nti(buf[124:136])  # type: ignore[attr-defined]
        return info


def _iterate_members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar; raises tarfile.ReadError where it is damaged, where tarfile would stop without an error."""
    offset = 0
    with suppress(tarfile.ReadError), tarfile.open(fileobj=file, mode="r:", tarinfo=_FastTarInfo) as tar:
        while (info := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
            offset = tar.offset
            if info.isfile():
                yield info
        offset = tar.offset
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if not block:
        raise tarfile.ReadError("ends without an end mark")
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("ends inside a header")
    if block.strip(b"\0"):
        raise tarfile.ReadError(f"no tar header at byte {offset}")


def _file_stamp(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def load_or_build_index(path: str) -> TarIndex:
    """Load the index from beside the data or from the user's cache folder, or build and save it. Raises OSError."""
    stamp = _file_stamp(os.stat(path))
    real = Path(os.path.realpath(path))
    candidates = [real.parent / _FOLDER / f"{real.name}.npz", user_cache("index", path, ".npz")]
    for candidate in candidates:
        with suppress(OSError, ValueError, KeyError, EOFError):
            index = TarIndex.load(candidate)
            if index.stamp == stamp:
                return index
    index = TarIndex.build(path)
    for candidate in candidates:
        with suppress(OSError):  # read-only data: try the next place
            index.save(candidate)
            break
    return index


def index_shards(shards: Sequence[Shard]) -> list[TarIndex | OSError]:
    """Index all shards, several at a time."""
    urls, message = [shard.url for shard in shards], "data.shards: {done} of {count} indexed"
    return list(map_with_progress(load_or_build_index, urls, message, OSError))


# Streams ----------------------------------------------------------------------------------------------------------


def stream_samples(
    shard: Shard, timeout: float, is_wanted: Callable[[str], bool]
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and members (suffix → content) of each sample. Raises Unreadable at the end of a damaged shard."""
    count = 0
    with _open_stream(shard, timeout) as (stream, wait):
        key: str | None = None
        members: dict[str, bytes] = {}
        problem = ""
        try:
            with tarfile.open(fileobj=stream, mode="r|*") as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
                    named = split_name(member.name) if member.isfile() else None
                    if named is None:
                        continue
                    if named[0] != key:
                        if key is not None:
                            yield key, members
                            count += 1
                        key, members = named[0], {}
                    if is_wanted(named[1]):
                        content = tar.extractfile(member)
                        members[named[1]] = content.read() if content is not None else b""
            if key is not None:
                yield key, members
                count += 1
            while stream.read(1 << 20):  # a command with unread output would fail with a broken pipe
                pass
        except _DAMAGED as error:
            problem = f"cut off ({' '.join(str(error).split()) or type(error).__name__})"
        except OSError as error:
            problem = str(error)
        problems = [text for text in (problem, wait()) if text]
    if problems:
        reason = f"the shard is not whole: {'; '.join(problems)}; the {count} samples before that are used"
        raise Unreadable(shard.name, reason)


@contextmanager
def _open_stream(shard: Shard, timeout: float) -> Iterator[tuple[Any, Callable[[], str]]]:
    """→ the byte stream, and a function that waits for its command and describes its failure."""
    command = shard.command
    if command is None:
        try:
            file = open(shard.url, "rb")  # noqa: SIM115
        except OSError as error:
            raise Unreadable(shard.name, f"the shard cannot be read: {error.strerror}") from None
        with file:
            yield file, lambda: ""
        return
    shown = command[-1] if command[:2] == ["sh", "-c"] else shlex.join(command)
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        except OSError as error:
            raise Unreadable(shard.name, f"{command[0]} cannot be started ({error.strerror}): {shown}") from None
        assert process.stdout is not None
        stream = _TimeoutReader(process.stdout, shown, timeout)

        def wait() -> str:
            if stream.timed_out:
                return ""
            process.stdout.close()  # type: ignore[union-attr]
            try:
                code = process.wait(min(timeout, _EXIT_TIMEOUT))
            except subprocess.TimeoutExpired:
                return f"it did not exit: {shown}"
            stderr.seek(0)
            text = " ".join(stderr.read().decode("utf-8", "replace").split())[-_STDERR_CHARS:]
            return f"exit code {code} of: {shown}" + (f" ({text})" if text else "") if code else ""

        try:
            yield stream, wait
        finally:
            process.stdout.close()
            with suppress(ProcessLookupError):  # including the processes that a shell has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _TimeoutReader:
    """Reads a pipe; raises TimeoutError after `timeout` seconds without a byte."""

    def __init__(self, pipe: IO[bytes], command: str, timeout: float) -> None:
        self._fd, self._command, self._timeout = pipe.fileno(), command, timeout
        self.timed_out = False

    def read(self, count: int) -> bytes:
        parts = []
        while count > 0:
            ready, _, _ = select.select([self._fd], [], [], self._timeout)
            if not ready:
                self.timed_out = True
                raise TimeoutError(f"no byte for {self._timeout:g} s (data.pipe_timeout) from: {self._command}")
            part = os.read(self._fd, count)
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
