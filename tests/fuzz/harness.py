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
MEMORY = 3 * 2**30  # of a case, beyond what this process has
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
    folder = place / "inside"
    folder.mkdir()
    (place / "home").mkdir()
    report = place / "report"
    own = _resident_memory()
    child = os.fork()
    if not child:
        _run_child(target, Random(f"{name} {seed} {case}"), folder, report)
    try:
        status, usage = _wait(child, seconds)
        if status is None:
            return Finding(name, seed, case, f"took longer than {seconds:g} s")
        if os.WIFSIGNALED(status):
            return Finding(name, seed, case, f"ended by {signal.Signals(os.WTERMSIG(status)).name}")
        if report.exists():
            return Finding(name, seed, case, report.read_text(errors="replace"))
        if usage > MEMORY + own:
            return Finding(name, seed, case, f"took {usage / 2**30:.1f} GiB")
        strangers = sorted(path.name for path in place.iterdir() if path.name not in ("inside", "home", "report"))
        if strangers or list(place.rglob("PWNED")):
            return Finding(name, seed, case, f"wrote outside of its folder, or ran a command: {strangers}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return None


def _run_child(target: Target, rng: Random, folder: Path, report: Path) -> None:
    code = 0
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setsid()
        os.chdir(folder)
        os.environ.update(HOME=str(folder.parent / "home"), XDG_CACHE_HOME=str(folder.parent / "home" / ".cache"))
        os.environ.update(
            XDG_STATE_HOME=str(folder.parent / "home" / ".state"), KINEO_CACHE=str(folder.parent / "home")
        )
        errors = io.StringIO()
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(errors):
                target(rng, folder)
        except (KineoError, Unreadable):
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0, 1, 2, 3, 75):
                report.write_text(f"exit code {stop.code}")
        if "--debug … shows where" in errors.getvalue() or "Traceback" in errors.getvalue():
            report.write_text(errors.getvalue()[-2000:])
    except BaseException:
        with suppress(Exception):
            report.write_text(traceback.format_exc()[-3000:], errors="replace")
        code = 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> tuple[int | None, int]:
    """→ exit status and peak memory; None when it took too long and was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            with suppress(ProcessLookupError, PermissionError):  # what it started
                os.killpg(child, signal.SIGKILL)
            return status, usage.ru_maxrss * 1024
        time.sleep(0.002)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, 0


def _resident_memory() -> int:
    """What this process holds now, and a fork of it begins with."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
