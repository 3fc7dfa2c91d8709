"""Kill a run again and again, resume it, and compare every line of its curve with an undisturbed run."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.subprocesses import free_port
from tests.torture import comparison, processes
from tests.torture.tiny import CONFIG, write_config

STAGES = list(CONFIG["stages"])
STEPS = CONFIG["train"]["steps"]
KILLS_PER_RUN = 6  # before the process that is not killed


@dataclass(frozen=True)
class Layout:
    """How many processes train, and how they share the work."""

    name: str
    world: int
    words: tuple[str, ...] = ()

    def environment(self) -> list[dict[str, str]]:
        if self.world == 1:
            return [{}]
        port = free_port()
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
    """Results of the kills of one kind of run."""

    name: str
    tolerance: float = 0.0
    kills: int = 0
    runs: int = 0
    continuations: int = 0
    wrong: list[str] = field(default_factory=list)
    ways: Counter = field(default_factory=Counter)
    undone: int = 0  # kills that came too late: the process had ended
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        return {**vars(self), "ways": dict(self.ways), "wrong_continuations": len(self.wrong)}


def train_once(
    config: Path,
    run: Path,
    layout: Layout,
    log: Path,
    kill: processes.Kill | None = None,
    rng: random.Random | None = None,
) -> processes.ProcessResult:
    """Start all processes of the layout and wait for them. A kill hits one of them, or at a moment perhaps all."""
    log.unlink(missing_ok=True)
    words = ["train", str(config), "--run", str(run), *layout.words]
    chosen = rng.randrange(layout.world) if rng is not None else 0
    children = [
        processes.start(words, log, run, kill if rank == chosen else None, env)
        for rank, env in enumerate(layout.environment())
    ]
    at = kill.seconds if kill is not None and kill.way == "moment" else None
    everyone = rng is None or layout.world == 1 or rng.random() < 0.5
    return processes.wait(children, log, at, children if everyone else [children[chosen]])


def run_undisturbed(config: Path, run: Path, layout: Layout) -> tuple[processes.ProcessResult, int]:
    """Train without kills. → the result, and how often rank 0 touched a file of the run folder."""
    counted = run.parent / f"{run.name}-touches"
    words = ["train", str(config), "--run", str(run), *layout.words]
    log = run.parent / f"{run.name}.log"

    def count() -> None:
        touched = [0]

        def one() -> None:
            touched[0] += 1
            counted.write_text(str(touched[0]))

        processes.call_at_every_touch(run, one)

    children = [
        processes.start(words, log, run, None, env, count if rank == 0 else None)
        for rank, env in enumerate(layout.environment())
    ]
    result = processes.wait(children, log)
    assert set(result.codes) == {0}, f"the undisturbed run of {layout.name} ended with {result.codes}:\n{result.text}"
    return result, int(counted.read_text())


def kill_runs(
    place: Path, layouts: list[Layout], kills: int, rng: random.Random, deadline: float,
    tell: Callable[[str], None], tolerance: float = 0.0, name: str = "", changes: dict[str, Any] | None = None,
) -> Tally:  # fmt: skip
    """Kill at least `kills` times, over as many runs as that takes, each time with one of `layouts`; the undisturbed run has the first."""
    place.mkdir(parents=True, exist_ok=True)
    tally = Tally(name or layouts[0].name, tolerance)
    began = time.monotonic()
    config = write_config(place / "tiny.yaml", **(changes or {}))
    reference = place / "undisturbed"
    shutil.rmtree(reference, ignore_errors=True)
    whole, touches = run_undisturbed(config, reference, layouts[0])
    expected, faults = comparison.read_curve(reference)
    assert not faults and len(expected) > 20, faults
    tell(f"{tally.name}: an undisturbed run takes {whole.seconds:.1f} s and touches {touches} files")
    while tally.kills < kills and time.monotonic() < deadline:
        tally.runs += 1
        run = place / f"run-{tally.runs}"
        shutil.rmtree(run, ignore_errors=True)
        before = len(tally.wrong)
        _torture_run(config, run, layouts, tally, expected, reference, whole.seconds, touches, rng)
        if len(tally.wrong) == before:
            shutil.rmtree(run)
        else:  # kept, to be looked at
            tell(f"{tally.name}: {tally.wrong[-1]} ({run})")
        tally.seconds = time.monotonic() - began
        tell(
            f"{tally.name}: {tally.kills} kills, {tally.continuations} continuations, {len(tally.wrong)} wrong, {tally.seconds:.0f} s"
        )
    return tally


def _torture_run(
    config: Path, run: Path, layouts: list[Layout], tally: Tally, expected: comparison.Curve, reference: Path,
    seconds: float, touches: int, rng: random.Random,
) -> None:  # fmt: skip
    log = run.parent / f"{run.name}.log"
    saved: dict[str, int] = {}
    killed = 0
    for number in range(KILLS_PER_RUN + 1):
        layout = rng.choice(layouts)
        left = 1 - sum(saved.values()) / (len(STAGES) * STEPS)
        kill = processes.random_kill(rng, seconds, touches, left, layout.world) if number < KILLS_PER_RUN else None
        result = train_once(config, run, layout, log, kill, rng)
        text = (
            f"process {number + 1} of {run.name}, {layout.name}, killed {kill}"
            if kill
            else f"last process of {run.name}"
        )
        found, wrong = comparison.read_curve(run)
        wrong += comparison.find_differences(found, expected, tally.tolerance)
        now = comparison.saved_steps(run, STAGES)
        wrong += comparison.find_lost_steps(saved, result.text, now)
        if killed:
            tally.continuations += 1
        if result.hung:
            wrong.append("it hung")
        elif result.killed:
            killed += 1
            tally.kills += 1
            tally.ways[kill.way if kill else "?"] += 1
        elif set(result.codes) == {0}:
            wrong += comparison.compare_weights(run, reference, STAGES, tally.tolerance)
            wrong += comparison.find_missing(found, expected)
            tally.undone += kill is not None
            tally.wrong += [f"{text}: {reason}" for reason in wrong]
            return
        else:
            wrong.append(f"it ended with {result.codes}: {result.text[-500:]}")
        tally.wrong += [f"{text}: {reason}" for reason in wrong]
        if wrong:
            return
        saved = now
