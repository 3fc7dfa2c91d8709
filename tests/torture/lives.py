"""Lives of a run: processes that train until they are done, or until something kills them.

Each is forked from this process, which has imported everything: a life costs a fraction of a second, and is a real process that runs the real
command line. Where it dies is chosen in three ways: at a moment (the clock), at the n-th time that it touches a file of the run folder
(every open, rename, removal; counted by an audit hook), or a few milliseconds into a part of the save.
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
PATIENCE = 120.0  # seconds after which a life counts as hanging
_BOTH = (("checkpoint", "flush_and_hash"), ("checkpoint", "commit"), ("checkpoint", "prune"), ("checkpoint", "update_state"),
         ("saver", "HostBuffers.copy"))  # fmt: skip
ALONE = (*_BOTH, ("checkpoint", "save_file"))
TOGETHER = (*_BOTH, ("distributed_checkpoint", "write"), ("saver", "_gather_results"))


@dataclass
class Death:
    """How a life shall end before its time."""

    way: str  # moment, touch or save
    seconds: float = 0.0
    nth: int = 0
    place: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        if self.way == "moment":
            return f"{self.seconds:.2f} s after its start"
        return f"at touch {self.nth}" if self.way == "touch" else f"inside {'.'.join(self.place)}, {self.nth}"


@dataclass
class Life:
    """What became of one process, or of several that trained together."""

    codes: list[int]
    text: str
    seconds: float
    hung: bool = False
    put_down: list[bool] = field(default_factory=list)  # by us, in a launcher's place, after another had ended

    @property
    def killed(self) -> bool:
        """Whether a process died as it was meant to."""
        died = [code == -signal.SIGKILL for code in self.codes]
        return not self.hung and any(d and not p for d, p in zip(died, self.put_down, strict=True))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def warm() -> None:
    """Import what a life needs, once."""
    import torch._dynamo  # noqa: F401

    import kineograph.cli
    import kineograph.run.train
    import kineograph.train.distributed_checkpoint  # noqa: F401
    import tests.torture.tiny  # noqa: F401


def lighten() -> None:
    """Inside a life: one thread, and no curves drawn, which would be most of a tiny run's time."""
    import torch

    from kineograph.run.previews import Previews

    torch.set_num_threads(1)
    Previews.curves = lambda self: None  # type: ignore[method-assign]


def start(
    words: list[str], log: Path, run: Path, death: Death | None = None, env: dict[str, str] | None = None,
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
        lighten()
        if death is not None:
            arm(death, run)
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


def arm(death: Death, run: Path) -> None:
    """Inside the process that is to die."""
    if death.way == "touch":
        at_touch(run, death.nth, die)
    elif death.way == "save":
        _at_call(death)


def at_every_touch(run: Path, then: Callable[[], None]) -> None:
    """Call `then` whenever a file below `run` is opened, renamed, made or removed."""
    inside = f"{run}/"

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(("open", "os.", "shutil.")) and any(
            isinstance(a, str | os.PathLike) and str(a).startswith(inside) for a in arguments
        ):
            then()

    sys.addaudithook(hear)


def at_touch(run: Path, nth: int, then: Callable[[], None]) -> None:
    """Call `then` the n-th time."""
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == nth:
            then()

    at_every_touch(run, count)


def _at_call(death: Death) -> None:
    import importlib

    module = importlib.import_module(f"kineograph.train.{death.place[0]}")
    *path, name = death.place[1].split(".")
    for part in path:
        module = getattr(module, part)
    original, seen = getattr(module, name), 0

    def deadly(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == death.nth:
            if death.seconds == 0:
                die()
            threading.Timer(death.seconds, die).start()
        return original(*arguments, **named)

    setattr(module, name, deadly)


def wait(children: list[int], log: Path, kill_at: float | None = None, victims: list[int] | None = None,
         number: int = signal.SIGKILL) -> Life:  # fmt: skip
    """Until all have ended; `victims` get the signal after `kill_at` seconds. Of a group whose member has ended badly the others are
    ended as launchers do: SIGTERM, and SIGKILL after a grace period."""
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
        if passed > PATIENCE and not hung:
            hung = True
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    text = log.read_text(errors="replace") if log.exists() else ""
    ended = [child in put_down for child in children]
    return Life([codes[child] for child in children], text, time.monotonic() - began, hung, ended)


def random_death(rng: random.Random, seconds: float, touches: int, left: float = 1.0, world: int = 1) -> Death:
    """Somewhere in a life that takes `seconds` and `touches` files when the whole run is still to be made; `left` of it is."""
    way = rng.choice(["moment", "touch", "save"])
    if way == "moment":
        return Death("moment", seconds=rng.uniform(0, seconds * max(0.4, left)))
    if way == "touch":
        return Death("touch", nth=rng.randint(1, max(20, round(touches * left))))
    nth = rng.randint(1, max(2, round(10 * left)))
    return Death("save", rng.choice([0.0, rng.uniform(0, 0.004)]), nth, rng.choice(ALONE if world == 1 else TOGETHER))
