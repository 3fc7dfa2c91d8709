"""A tar that comes through a pipe, sample by sample: what was whole before the pipe died is used, and how it died is told."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from lzma import LZMAError
from typing import IO, Any

from kineograph.core.errors import Unreadable
from kineograph.data.shards import Shard
from kineograph.data.tar_index import split_name

_TAIL = 300  # characters of what a command said last
_GRACE = 10.0  # seconds that a command may take to end once nobody reads it any more
_BROKEN = (tarfile.TarError, EOFError, zlib.error, LZMAError)


def samples(shard: Shard, timeout: float, wanted: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key and members (ending → content) of each sample. Ends with Unreadable where the shard did not end well."""
    whole = 0
    with _opened(shard, timeout) as (stream, end):
        key: str | None = None
        members: dict[str, bytes] = {}
        try:
            with tarfile.open(fileobj=stream, mode="r|*") as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header it has seen
                    named = split_name(member.name) if member.isfile() else None
                    if named is None:
                        continue
                    if named[0] != key:
                        if key is not None:
                            yield key, members
                            whole += 1
                        key, members = named[0], {}
                    if wanted(named[1]):
                        content = tar.extractfile(member)
                        members[named[1]] = content.read() if content is not None else b""
            if key is not None:
                yield key, members
                whole += 1
            while stream.read(1 << 20):  # a command whose output nobody reads would end with an error of its own
                pass
            problem = ""
        except _BROKEN as error:
            problem = f"cut off ({' '.join(str(error).split()) or type(error).__name__})"
        except (TimeoutError, OSError) as error:
            problem = str(error)
        ending = end()
    if problem or ending:
        told = "; ".join(filter(None, [problem, ending]))
        raise Unreadable(shard.name, f"the shard is not whole: {told}; the {whole} samples before that are used")


@contextmanager
def _opened(shard: Shard, timeout: float) -> Iterator[tuple[Any, Callable[[], str]]]:
    """→ the bytes, and a function that waits for the end and tells what went wrong."""
    command = shard.command
    if command is None:
        try:
            file = open(shard.place, "rb")  # noqa: SIM115
        except OSError as error:
            raise Unreadable(shard.name, f"the shard cannot be read: {error.strerror}") from None
        with file:
            yield file, lambda: ""
        return
    shown = command[-1] if command[:2] == ["sh", "-c"] else shlex.join(command)
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=True
            )
        except OSError as error:
            raise Unreadable(shard.name, f"{command[0]} cannot be started ({error.strerror}): {shown}") from None
        stream = _Watched(process.stdout, shown, timeout)  # type: ignore[arg-type]
        release = _end_with_us(process.pid)

        def end() -> str:
            if stream.silent:
                return ""
            process.stdout.close()  # type: ignore[union-attr]
            try:
                code = process.wait(min(timeout, _GRACE))
            except subprocess.TimeoutExpired:  # ended by the caller
                return f"it did not end: {shown}"
            if not code:
                return ""
            said.seek(0)
            words = " ".join(said.read().decode("utf-8", "replace").split())[-_TAIL:]
            return f"exit code {code} of: {shown}" + (f" ({words})" if words else "")

        try:
            yield stream, end
        finally:
            process.stdout.close()  # type: ignore[union-attr]
            with suppress(ProcessLookupError):  # with all that a shell has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            release()


def _end_with_us(group: int) -> Callable[[], None]:
    """See that a process group ends even if this process is killed, and so cannot end it: a command that waits for a server writes nothing, and
    would never notice that nobody reads it. A watcher reads a pipe that this process alone holds open, and so outlives it by a moment.
    → a function that lets the watcher go."""
    theirs, ours = os.pipe()
    script = 'read -r _; kill -s KILL -- "-$1"'
    watcher = subprocess.Popen(
        ["sh", "-c", script, "sh", str(group)],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs)

    def release() -> None:
        watcher.kill()
        watcher.wait()
        os.close(ours)

    return release


class _Watched:
    """A pipe's output that does not wait for ever."""

    def __init__(self, pipe: IO[bytes], command: str, timeout: float) -> None:
        self.handle, self.command, self.timeout = pipe.fileno(), command, timeout
        self.silent = False

    def read(self, count: int) -> bytes:
        parts = []
        while count > 0:
            ready, _, _ = select.select([self.handle], [], [], self.timeout)
            if not ready:
                self.silent = True
                raise TimeoutError(f"no byte for {self.timeout:g} s (data.pipe_timeout) from: {self.command}")
            part = os.read(self.handle, count)
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
