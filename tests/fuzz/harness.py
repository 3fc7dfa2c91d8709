"""Runs one case in a process of its own, within limits on time and memory, and says what was wrong with how it ended."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

from kineograph.core.errors import KineoError, Unreadable

SECONDS = 30.0
MEMORY = 3 * 2**30  # of a case, beyond what its process begins with
Target = Callable[[Random, Path], object]


class Finding(NamedTuple):
    target: str
    seed: int
    case: int
    reason: str

    def __str__(self) -> str:
        command = f"python -m tests.fuzz --only {self.target} --seed {self.seed} --case {self.case}"
        return f"{self.target}: {self.reason}\n  again with: {command}"


def run_case(name: str, target: Target, seed: int, case: int, seconds: float = SECONDS) -> Finding | None:
    """Run one case in a forked process. → what was wrong; None if nothing was."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    folder, home = place / "above" / "above" / "inside", place / "home"  # ../../x is seen too
    folder.mkdir(parents=True)
    (home / "tmp").mkdir(parents=True)
    report, first_memory = place / "report", place / "first_memory"
    child = os.fork()
    if not child:
        first_memory.write_text(str(_resident_memory()))  # less than the parent's: mapped files are not counted yet
        _run_child(target, Random(f"{name} {seed} {case}"), folder, home, report)
    try:
        status, usage = _wait(child, seconds)
        if status is None:
            return Finding(name, seed, case, f"took longer than {seconds:g} s")
        if os.WIFSIGNALED(status):
            return Finding(name, seed, case, f"ended by {signal.Signals(os.WTERMSIG(status)).name}")
        if report.exists():
            return Finding(name, seed, case, report.read_text(errors="replace"))
        if usage > MEMORY + int(first_memory.read_text()):
            return Finding(name, seed, case, f"took {usage / 2**30:.1f} GiB")
        allowed = (folder, *folder.parents, home, first_memory)
        strangers = [path.name for path in place.rglob("*") if path.parent in folder.parents and path not in allowed]
        if strangers or list(place.rglob("PWNED")):
            return Finding(name, seed, case, f"wrote outside of its folder, or ran a command: {strangers}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return None


def _run_child(target: Target, rng: Random, folder: Path, home: Path, report: Path) -> None:
    code = 0
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setsid()
        os.chdir(folder)
        os.environ.update(HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"), XDG_STATE_HOME=str(home / ".state"))
        os.environ.update(KINEO_CACHE=str(home), TMPDIR=str(home / "tmp"))
        tempfile.tempdir = str(home / "tmp")
        errors, deeds = io.StringIO(), _watch(folder.parents[2])
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(errors):
                target(rng, folder)
        except (KineoError, Unreadable):
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0, 1, 2, 3, 75):
                deeds.append(f"exit code {stop.code}")
        if "--debug … shows where" in errors.getvalue() or "Traceback" in errors.getvalue():
            deeds.append(errors.getvalue()[-2000:])
        if deeds:
            report.write_text("\n".join(deeds[:5]), errors="replace")
    except BaseException:
        with suppress(Exception):
            report.write_text(traceback.format_exc()[-3000:], errors="replace")
        code = 1
    finally:
        sys.stdout.flush()
        os._exit(code)


_WRITES = ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod")
_COMMANDS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")
_OPEN_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _watch(place: Path) -> list[str]:
    """Note what this process does from now on: writes outside of a folder, commands, connections to other machines."""
    deeds: list[str] = []

    def is_outside(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):  # an open file
            return False
        text = os.path.realpath(os.fsdecode(path))
        return not text.startswith((f"{place}/", "/dev/", "/proc/")) and text != "/"

    def note(event: str, given: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = given
            if isinstance(flags, int) and flags & _OPEN_FOR_WRITING and is_outside(path):
                deeds.append(f"wrote outside of its folder: {path!r}")
        elif event in _WRITES and any(map(is_outside, given)):
            deeds.append(f"wrote outside of its folder: {event} {given}")
        elif event in _COMMANDS:
            deeds.append(f"ran a command: {given[:2]}")
        elif event == "socket.connect" and isinstance(given[1], tuple) and given[1][0] != "127.0.0.1":
            deeds.append(f"connected to {given[1]}")

    sys.addaudithook(note)
    return deeds


def _wait(child: int, seconds: float) -> tuple[int | None, int]:
    """Wait for a case. → exit status and peak memory; None when it took too long and was killed.

    The time in which it waits for a core does not count: on a busy machine it would look like a hang.
    """
    taken, before, cpu = 0.0, time.monotonic(), 0.0
    pause = 0.001
    while taken < seconds:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            with suppress(ProcessLookupError, PermissionError):  # what it started
                os.killpg(child, signal.SIGKILL)
            return status, usage.ru_maxrss * 1024
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)
        now = time.monotonic()
        is_runnable, cpu_now = _read_stat(child)
        taken += cpu_now - cpu if is_runnable else max(now - before, cpu_now - cpu)
        before, cpu = now, cpu_now
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, 0


def _read_stat(child: int) -> tuple[bool, float]:
    """Whether a process runs or waits for a core or a disk now, and the CPU time that it has used, in seconds."""
    fields = Path(f"/proc/{child}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    ticks = sum(int(fields[place]) for place in (11, 12, 13, 14))  # its own, and of children that have ended
    return fields[0] in "RD", ticks / os.sysconf("SC_CLK_TCK")


def _resident_memory() -> int:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
