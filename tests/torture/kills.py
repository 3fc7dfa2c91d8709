"""Kill a run again and again, let it go on, and hold every line of its curve against a run that nobody disturbed."""

from __future__ import annotations

import random
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture import judging, lives
from tests.torture.tiny import CONFIG, write_config

STAGES = list(CONFIG["stages"])
STEPS = CONFIG["train"]["steps"]
LIVES = 6  # of one run that are killed, before one that is not


@dataclass(frozen=True)
class Layout:
    """How many processes train, and how they share the work."""

    name: str
    world: int
    words: tuple[str, ...] = ()

    def environment(self) -> list[dict[str, str]]:
        if self.world == 1:
            return [{}]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [
            {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }
            for rank in range(self.world)
        ]  # fmt: skip


ALONE = Layout("1 process", 1)


@dataclass
class Tally:
    """What came of the kills of one kind of run."""

    name: str
    tolerance: float = 0.0
    kills: int = 0
    runs: int = 0
    continuations: int = 0
    wrong: list[str] = field(default_factory=list)
    ways: Counter = field(default_factory=Counter)
    undone: int = 0  # deaths that came too late: the life had ended
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        return {**vars(self), "ways": dict(self.ways), "wrong_continuations": len(self.wrong)}


def train_once(
    config: Path,
    run: Path,
    layout: Layout,
    log: Path,
    death: lives.Death | None = None,
    rng: random.Random | None = None,
) -> lives.Life:
    """One life of the run: all processes of the layout. A death meets one of them, or at a moment perhaps all."""
    log.unlink(missing_ok=True)
    words = ["train", str(config), "--run", str(run), *layout.words]
    chosen = rng.randrange(layout.world) if rng is not None else 0
    children = [
        lives.start(words, log, run, death if rank == chosen else None, env)
        for rank, env in enumerate(layout.environment())
    ]
    at = death.seconds if death is not None and death.way == "moment" else None
    everyone = rng is None or layout.world == 1 or rng.random() < 0.5
    return lives.wait(children, log, at, children if everyone else [children[chosen]])


def measure(config: Path, run: Path, layout: Layout) -> tuple[lives.Life, int]:
    """The undisturbed run. → its life, and how often the first process touched a file of the run folder."""
    counted = run.parent / f"{run.name}-touches"
    words = ["train", str(config), "--run", str(run), *layout.words]
    log = run.parent / f"{run.name}.log"

    def count() -> None:
        touched = [0]

        def one() -> None:
            touched[0] += 1
            counted.write_text(str(touched[0]))

        lives.at_every_touch(run, one)

    children = [
        lives.start(words, log, run, None, env, count if rank == 0 else None)
        for rank, env in enumerate(layout.environment())
    ]
    life = lives.wait(children, log)
    assert set(life.codes) == {0}, f"the undisturbed run of {layout.name} ended with {life.codes}:\n{life.text}"
    return life, int(counted.read_text())


def torture(
    place: Path, layouts: list[Layout], kills: int, rng: random.Random, deadline: float,
    tell: Callable[[str], None], tolerance: float = 0.0, name: str = "", changes: dict[str, Any] | None = None,
) -> Tally:  # fmt: skip
    """At least `kills` kills, over as many runs as that takes; each life has one of `layouts`, and the first is that of the undisturbed run."""
    place.mkdir(parents=True, exist_ok=True)
    tally = Tally(name or layouts[0].name, tolerance)
    began = time.monotonic()
    config = write_config(place / "tiny.yaml", **(changes or {}))
    reference = place / "undisturbed"
    shutil.rmtree(reference, ignore_errors=True)
    whole, touches = measure(config, reference, layouts[0])
    expected, faults = judging.curve(reference)
    assert not faults and len(expected) > 20, faults
    tell(f"{tally.name}: an undisturbed run takes {whole.seconds:.1f} s and touches {touches} files")
    while tally.kills < kills and time.monotonic() < deadline:
        tally.runs += 1
        run = place / f"run-{tally.runs}"
        shutil.rmtree(run, ignore_errors=True)
        before = len(tally.wrong)
        _one_run(config, run, layouts, tally, expected, reference, whole.seconds, touches, rng)
        if len(tally.wrong) == before:
            shutil.rmtree(run)
        else:  # kept, to be looked at
            tell(f"{tally.name}: {tally.wrong[-1]} ({run})")
        tally.seconds = time.monotonic() - began
        tell(
            f"{tally.name}: {tally.kills} kills, {tally.continuations} continuations, {len(tally.wrong)} wrong, {tally.seconds:.0f} s"
        )
    return tally


def _one_run(
    config: Path, run: Path, layouts: list[Layout], tally: Tally, expected: judging.Curve, reference: Path,
    seconds: float, touches: int, rng: random.Random,
) -> None:  # fmt: skip
    log = run.parent / f"{run.name}.log"
    saved: dict[str, int] = {}
    killed = 0
    for number in range(LIVES + 1):
        layout = rng.choice(layouts)
        left = 1 - sum(saved.values()) / (len(STAGES) * STEPS)
        death = lives.random_death(rng, seconds, touches, left, layout.world) if number < LIVES else None
        life = train_once(config, run, layout, log, death, rng)
        text = (
            f"life {number + 1} of {run.name}, {layout.name}, killed {death}" if death else f"last life of {run.name}"
        )
        found, wrong = judging.curve(run)
        wrong += judging.differences(found, expected, tally.tolerance)
        now = judging.saved_steps(run, STAGES)
        wrong += judging.lost(saved, life.text, now)
        if killed:
            tally.continuations += 1
        if life.hung:
            wrong.append("it hung")
        elif life.killed:
            killed += 1
            tally.kills += 1
            tally.ways[death.way if death else "?"] += 1
        elif set(life.codes) == {0}:
            wrong += judging.weights_differ(run, reference, STAGES, tally.tolerance)
            wrong += judging.missing(found, expected)
            tally.undone += death is not None
            tally.wrong += [f"{text}: {reason}" for reason in wrong]
            return
        else:
            wrong.append(f"it ended with {life.codes}: {life.text[-500:]}")
        tally.wrong += [f"{text}: {reason}" for reason in wrong]
        if wrong:
            return
        saved = now
