"""Processes that train until they are done or something kills them.

Each is forked from this process, which has imported everything, and runs the real command line. It is killed in one of
three ways: at a moment, at the n-th access to a file of the run folder (every open, rename and removal, counted by an
audit hook), or a few milliseconds into a part of the save.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE = 3.0  # between a launcher's SIGTERM and its SIGKILL
TIMEOUT = 120.0  # seconds after which a process counts as hanging
_BOTH = (("checkpoint", "flush_and_hash"), ("checkpoint", "commit"), ("checkpoint", "prune"), ("checkpoint", "update_state"),
         ("saver", "HostBuffers.copy"))  # fmt: skip
SINGLE_PLACES = (*_BOTH, ("checkpoint", "save_file"))
SHARDED_PLACES = (*_BOTH, ("distributed_checkpoint", "write"), ("saver", "_gather_results"))


@dataclass
class Kill:
    """When a process is killed."""

    way: str  # moment, touch or save
    seconds: float = 0.0
    nth: int = 0
    place: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        if self.way == "moment":
            return f"{self.seconds:.2f} s after its start"
        return f"at touch {self.nth}" if self.way == "touch" else f"inside {'.'.join(self.place)}, {self.nth}"


@dataclass
class ProcessResult:
    """How one process ended, or several that trained together."""

    codes: list[int]
    text: str
    seconds: float
    hung: bool = False
    ended_by_us: list[bool] = field(default_factory=list)  # as a launcher does, after another had ended

    @property
    def killed(self) -> bool:
        """Whether a process was killed as planned."""
        died = [code == -signal.SIGKILL for code in self.codes]
        return not self.hung and any(d and not p for d, p in zip(died, self.ended_by_us, strict=True))


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def import_modules() -> None:
    """Import what the processes need, once."""
    import torch._dynamo  # noqa: F401

    import kineograph.cli
    import kineograph.run.train
    import kineograph.train.distributed_checkpoint  # noqa: F401
    import tests.torture.tiny  # noqa: F401


def limit_work() -> None:
    """Use one thread, and draw no curves, which would take most of a tiny run's time."""
    import torch

    from kineograph.run.previews import Previews

    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # see tests/conftest.py
    Previews.draw_curves = lambda self: None  # type: ignore[method-assign]


def start(
    words: list[str], log: Path, run: Path, kill: Kill | None = None, env: dict[str, str] | None = None,
    before: Callable[[], Any] | None = None,
) -> int:  # fmt: skip
    """Fork a process that runs `kineo WORDS`, its output going to `log`. → its id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)  # whatever the parent has put in their place
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(env or {})
        limit_work()
        if kill is not None:
            arm_kill(kill, run)
        if before is not None:
            before()
        from kineograph.cli import main

        main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        os.write(2, f"Traceback: {type(error).__name__}: {error}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def arm_kill(kill: Kill, run: Path) -> None:
    """Call this in the process to be killed."""
    if kill.way == "touch":
        call_at_touch(run, kill.nth, kill_self)
    elif kill.way == "save":
        _kill_at_call(kill)


def call_at_every_touch(run: Path, then: Callable[[], None]) -> None:
    """Call `then` whenever a file below `run` is opened, renamed, made or removed."""
    inside = f"{run}/"

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(("open", "os.", "shutil.")) and any(
            isinstance(a, str | os.PathLike) and str(a).startswith(inside) for a in arguments
        ):
            then()

    sys.addaudithook(hear)


def call_at_touch(run: Path, nth: int, then: Callable[[], None]) -> None:
    """Call `then` the n-th time."""
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == nth:
            then()

    call_at_every_touch(run, count)


def _kill_at_call(kill: Kill) -> None:
    import importlib

    module = importlib.import_module(f"kineograph.train.{kill.place[0]}")
    *path, name = kill.place[1].split(".")
    for part in path:
        module = getattr(module, part)
    original, seen = getattr(module, name), 0

    def deadly(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == kill.nth:
            if kill.seconds == 0:
                kill_self()
            threading.Timer(kill.seconds, kill_self).start()
        return original(*arguments, **named)

    setattr(module, name, deadly)


def wait(children: list[int], log: Path, kill_at: float | None = None, victims: list[int] | None = None,
         number: int = signal.SIGKILL) -> ProcessResult:  # fmt: skip
    """Wait until all have ended. `victims` get the signal after `kill_at` seconds.

    When one process fails, the others are ended as launchers do: SIGTERM, then SIGKILL after a grace period.
    """
    began = time.monotonic()
    codes: dict[int, int] = {}
    hung = False
    failed: float | None = None
    warned = False
    put_down: set[int] = set()
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[child] = os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - began
        if kill_at is not None and passed >= kill_at:
            kill_at = None
            for child in victims if victims is not None else children:
                if child not in codes:
                    os.kill(child, number)
        failed = passed if failed is None and any(codes.values()) else failed
        if failed is not None and passed - failed > (1 + GRACE if warned else 1):
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL if warned else signal.SIGTERM)
                    put_down.add(child)
            warned = True
        if passed > TIMEOUT and not hung:
            hung = True
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    text = log.read_text(errors="replace") if log.exists() else ""
    ended = [child in put_down for child in children]
    return ProcessResult([codes[child] for child in children], text, time.monotonic() - began, hung, ended)


def random_kill(rng: random.Random, seconds: float, touches: int, left: float = 1.0, world: int = 1) -> Kill:
    """A kill somewhere in a process that would take `seconds` and `touches` files for a whole run, of which `left` remains."""
    way = rng.choice(["moment", "touch", "save"])
    if way == "moment":
        return Kill("moment", seconds=rng.uniform(0, seconds * max(0.4, left)))
    if way == "touch":
        return Kill("touch", nth=rng.randint(1, max(20, round(touches * left))))
    nth = rng.randint(1, max(2, round(10 * left)))
    return Kill(
        "save",
        rng.choice([0.0, rng.uniform(0, 0.004)]),
        nth,
        rng.choice(SINGLE_PLACES if world == 1 else SHARDED_PLACES),
    )
