"""Tar shards: an offset index of files, kept beside the data, and a reader of streams such as pipes.

Samples follow webdataset's rule: consecutive members that share their name up to the first dot (000012.jpg, 000012.txt).
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import select
import shlex
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from kineograph.core.errors import Unreadable
from kineograph.core.run_folder import write_atomic
from kineograph.core.safe_media import MediaLimits, Stopwatch
from kineograph.core.tar_reader import DAMAGED, Readable, TarDamaged, TarReader, decompress, is_compressed
from kineograph.data.probe import map_with_progress, user_cache
from kineograph.data.shards import Shard

_VERSION = 1
_FOLDER = ".kineo-index"
_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_STDERR_CHARS = 300  # of a failed command's stderr, in its error
_MAX_TRAILING = 2**26  # bytes that a command prints behind the end of its tar
_SLOWEST = 1000.0  # bytes a second of a URL
_EXIT_TIMEOUT = 10.0  # seconds a command may take to exit after its output has been read


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
        problem = sparse = ""
        with _open_shard(path) as file:
            status = os.fstat(file.fileno())
            try:
                for member in TarReader(file, file.seek):
                    named = split_name(member.name)
                    if named is None:
                        continue
                    if member.sparse:
                        sparse = sparse or f"holds {member.name}, a sparse file, which is not read"
                        continue
                    key, suffix = named
                    if not keys or keys[-1] != key:
                        keys.append(key)
                    if member.offset + member.size > status.st_size:
                        problem = f"ends inside a member after {len(table)} whole files"
                        table = [row for row in table if row[0] < len(keys) - 1]  # drop the incomplete sample
                        keys.pop()
                        break
                    table.append((len(keys) - 1, kinds.setdefault(suffix, len(kinds)), member.offset, member.size))
            except TarDamaged as error:
                problem = f"{error} after {len(table)} whole files"
                if is_compressed(os.pread(file.fileno(), 6, 0)):
                    problem = "is compressed: unpack it, or let its name end in .tar.gz, .tar.bz2 or .tar.xz"
        columns = np.array(table, np.int64).reshape(-1, 4).T  # 4 M
        return TarIndex(keys, list(kinds), columns, problem or sparse, _file_stamp(status))

    def save(self, path: Path) -> None:
        buffer = io.BytesIO()
        texts = ("\0".join([self.stamp, self.problem, *self.suffixes]), "\0".join(self.keys))
        about, keys = (np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts)
        np.savez(buffer, version=_VERSION, about=about, keys=keys, members=self.members)
        write_atomic(path, buffer.getvalue())

    @staticmethod
    def load(path: Path) -> TarIndex:
        """Raises any exception if there is no usable index: it lies beside the data, and may be anything."""
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("compressed, so it may unpack to any size")
        with np.load(path, allow_pickle=False) as saved:
            if int(saved["version"]) != _VERSION:
                raise ValueError("another version")
            about, keys = (saved[name].tobytes().decode("utf-8", "surrogateescape") for name in ("about", "keys"))
            stamp, problem, *suffixes = about.split("\0")
            index = TarIndex(keys.split("\0") if keys else [], suffixes, saved["members"], problem, stamp)
        index._check(int(stamp.split()[0]))
        return index

    def _check(self, file_size: int) -> None:
        """Raise a ValueError unless the members lie in a file of this size."""
        samples, kinds, offsets, sizes = self.members
        within = [(samples, len(self.keys)), (kinds, len(self.suffixes)), (offsets, file_size), (sizes, file_size + 1)]
        if self.members.dtype != np.int64 or any(((row < 0) | (row >= end)).any() for row, end in within):
            raise ValueError("not an index of this file")


def _file_stamp(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def load_or_build_index(path: str) -> TarIndex:
    """Load the index from beside the data or from the user's cache folder, or build and save it. Raises OSError."""
    stamp = _file_stamp(os.stat(path))
    real = Path(os.path.realpath(path))
    candidates = [real.parent / _FOLDER / f"{real.name}.npz", user_cache("index", path, ".npz")]
    for candidate in candidates:
        with suppress(Exception):
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


def _open_shard(path: str) -> IO[bytes]:
    """Open a regular file: a pipe or device would block, or never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file")
    return open(path, "rb", buffering=0)


# Streams ----------------------------------------------------------------------------------------------------------


def stream_samples(
    shard: Shard, timeout: float, is_wanted: Callable[[str], bool], limits: MediaLimits
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and members (suffix → content) of each sample. Raises Unreadable at the end of a damaged shard."""
    count, clock = 0, None
    with _open_stream(shard, timeout) as (stream, wait):
        key: str | None = None
        members: dict[str, bytes] = {}
        problem = ""
        try:
            clock = _SampleClock(decompress(stream), limits if shard.command is None else None)
            tar = TarReader(clock)
            for member in tar:
                named = split_name(member.name)
                if named is None or member.sparse:
                    continue
                if named[0] != key:
                    if key is not None:
                        yield key, members
                        count += 1
                        clock.restart()
                    key, members = named[0], {}
                if is_wanted(named[1]) and member.size <= limits.bytes:
                    members[named[1]] = tar.read(member)
            if key is not None:
                yield key, members
                count += 1
            trailing = 0
            while shard.command is not None and (
                rest := stream.read(1 << 20)
            ):  # unread, it would fail with a broken pipe
                trailing += len(rest)
                if trailing > _MAX_TRAILING:
                    raise TarDamaged(f"more than {_MAX_TRAILING:,} bytes behind its end")
        except (TarDamaged, *DAMAGED) as error:
            problem = f"cut off ({' '.join(str(error).split()) or type(error).__name__})"
        except OSError as error:
            problem = str(error)
        failure = wait()
        if failure and clock is not None and clock.is_empty:  # not even a header: the address, credentials, the network
            raise Unreadable(shard.name, f"the shard cannot be read: {failure}; check the address and your credentials")
        problems = [text for text in (problem, failure) if text]
    if problems:
        reason = f"the shard is not whole: {'; '.join(problems)}; the {count} samples before that are used"
        raise Unreadable(shard.name, reason)


@contextmanager
def _open_stream(shard: Shard, timeout: float) -> Iterator[tuple[Any, Callable[[], str]]]:
    """→ the byte stream, and a function that waits for its command and describes its failure."""
    command = shard.command
    if command is None:
        try:
            file = _open_shard(shard.url)
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
        rate = 0 if shard.url.startswith("pipe:") else _SLOWEST  # a command may take its time
        stream = _TimeoutReader(process.stdout, shown, timeout, rate)

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


class _SampleClock:
    """Raises TimeoutError when one sample takes more than data.limits.seconds: a few megabytes may unpack to hours of zeros.

    Without limits it never does: a command has a timeout of its own.
    """

    def __init__(self, file: Readable, limits: MediaLimits | None) -> None:
        self._file, self._seconds = file, limits.seconds if limits is not None else math.inf
        self.is_empty = True
        self.restart()

    def restart(self) -> None:
        self._stopwatch = Stopwatch()

    def read(self, count: int) -> bytes:
        if self._stopwatch.seconds() > self._seconds:
            raise TimeoutError(f"a sample takes more than {self._seconds:g} s to unpack (data.limits.seconds)")
        data = self._file.read(count)
        self.is_empty = self.is_empty and not data
        return data


class _TimeoutReader:
    """Reads a pipe; raises TimeoutError after `timeout` seconds without a byte, or of waiting for fewer than `rate` bytes a second."""

    def __init__(self, pipe: IO[bytes], command: str, timeout: float, rate: float) -> None:
        self._fd, self._command, self._timeout, self._rate = pipe.fileno(), command, timeout, rate
        self._waited, self._received = 0.0, 0
        self.timed_out = False

    def read(self, count: int) -> bytes:
        parts = []
        while count > 0:
            began = time.monotonic()
            ready, _, _ = select.select([self._fd], [], [], self._timeout)
            if not ready:
                self.timed_out = True
                raise TimeoutError(f"no byte for {self._timeout:g} s (data.pipe_timeout) from: {self._command}")
            part = os.read(self._fd, count)
            self._check_rate(time.monotonic() - began, len(part))
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _check_rate(self, waited: float, received: int) -> None:
        self._waited, self._received = self._waited + waited, self._received + received
        if self._waited > self._timeout:
            if self._received < self._rate * self._waited:
                self.timed_out = True
                raise TimeoutError(
                    f"{self._received:,} bytes in {self._waited:.0f} s (data.pipe_timeout) from: {self._command}"
                )
            self._waited, self._received = 0.0, 0
