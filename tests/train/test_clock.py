"""Stages that end by the clock: on a clock that the test moves, and once on a real one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kineograph.core.device_copy import fetch_floats
from kineograph.core.errors import ConfigError, InputError, Stopped
from kineograph.run.dry_run import dry_run
from kineograph.run.listing import read_run
from kineograph.run.plan import make_plan
from kineograph.train import checkpoint, clock
from kineograph.train import trainer as trainer_module
from kineograph.train.clock import Share, StageClock, next_share, read_share
from kineograph.train.config import EmaConfig, TrainConfig
from kineograph.train.ema import Ema
from kineograph.train.phases import Cursor, due_phases
from kineograph.train.progress_bar import Progress
from kineograph.train.stepper import Stepper
from kineograph.train.trainer import Trainer
from tests.run import clip_tasks
from tests.train.ranks import run_ranks
from tests.train.test_observing import Batches, records, trainer

MINUTE = TrainConfig(
    minutes=1, steps=100, warmup=10, schedule="linear", batch_size=4, log_every=1, save_every=50, validate_every=0, sample_every=0, compile=False
)  # fmt: skip


class Hands:
    """A clock that stands still until the test moves it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(clock.time, "monotonic", lambda: self.now)


@pytest.fixture
def hands() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Hands(patch)


def train_timed(run: Path, hands: Hands, step_seconds: float = 2.0, first: float = 0.0, **changes: Any) -> Trainer:
    """Train on steps of equal length; the first of the process takes `first` seconds more."""
    pending = [first]

    def pass_time(step: int) -> None:
        hands.now += step_seconds + (pending.pop() if pending else 0.0)

    made = trainer(run, MINUTE.model_copy(update=changes), Batches(pass_time))
    made.fit(made.resume())
    return made


def test_a_stage_ends_on_time_with_its_schedule_at_the_end(tmp_path: Path, hands: Hands) -> None:
    train_timed(tmp_path, hands, save_every=20)
    assert hands.now - 1000 == 60
    found = records(tmp_path)
    assert [record["step"] for record in found] == list(range(1, 31))
    rates = [record["lr"] for record in found]
    # Step k begins at share (k − 2) / 29 of the schedule: the first step is not counted, as it compiles.
    expected = [0.0, 0.0, *(k / 29 for k in range(1, 29))]
    for rate, share in zip(rates, expected, strict=True):
        position = 100 * share
        assert rate == pytest.approx(
            3e-4 * (min(1, (position + 1) / 10) if position < 10 else 1 - (position - 10) / 90)
        )
    assert rates[-1] < 0.05 * 3e-4
    assert found[-1]["time/share"] == 1
    assert checkpoint.saved_steps(tmp_path / "checkpoints")[-1] == 30
    assert checkpoint.find_damage(tmp_path / "checkpoints" / "step-00000030") is None


@pytest.mark.parametrize("step_seconds", [0.25, 5.0])
def test_phases_keep_their_share_of_the_stage(tmp_path: Path, hands: Hands, step_seconds: float) -> None:
    train_timed(tmp_path, hands, step_seconds, save_every=25, keep_last=9)
    steps = checkpoint.saved_steps(tmp_path / "checkpoints")
    total = 60 / step_seconds
    assert steps[-1] == total
    assert [step / total for step in steps] == pytest.approx([0.25, 0.5, 0.75, 1], abs=1.5 / total)


def test_a_gpu_counts_whole_though_the_host_waits_for_it_only_when_it_logs(
    tmp_path: Path, hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = [0.0]

    def wait_for_device() -> None:
        hands.now, queued[0] = hands.now + queued[0], 0.0

    def launch(step: int) -> None:
        hands.now, queued[0] = hands.now + 0.1, queued[0] + 1.9

    def fetch(values: dict[str, torch.Tensor]) -> dict[str, float]:
        wait_for_device()
        return fetch_floats(values)

    def draw(step: int, stepper: Stepper) -> Callable[[], None]:
        wait_for_device()
        hands.now += 0.1  # a pause
        return lambda: None

    monkeypatch.setattr(trainer_module, "fetch_floats", fetch)
    config = MINUTE.model_copy(update={"log_every": 2, "sample_every": 9})
    made = trainer(tmp_path, config, Batches(launch), draw_samples=draw)
    made.timer.wait_for_device = wait_for_device  # type: ignore[method-assign]
    made.fit(Cursor())
    found = records(tmp_path)[1:]
    assert len(found) > 10
    for record in found:
        assert record["time/share"] == pytest.approx(record["time/elapsed"] / 60, abs=0.1)
        assert record["time/step_ms"] == pytest.approx(2000)


def test_compilation_counts_and_leaves_the_warm_up_whole(tmp_path: Path, hands: Hands) -> None:
    train_timed(tmp_path, hands, first=30.0)
    found = records(tmp_path)
    assert len(found) == 15
    assert [record["lr"] for record in found[:3]] == pytest.approx([3e-5, 3e-5, 3e-4 * (100 / 14 + 1) / 10])
    assert found[-1]["lr"] < 0.1 * 3e-4


def test_a_stage_without_time_for_two_steps_makes_one(tmp_path: Path, hands: Hands) -> None:
    train_timed(tmp_path, hands, first=100.0)
    assert checkpoint.saved_steps(tmp_path / "checkpoints") == [1]


def test_a_stopped_stage_goes_on_with_what_is_left(tmp_path: Path, hands: Hands) -> None:
    made = trainer(tmp_path, MINUTE, Batches(lambda step: setattr(hands, "now", hands.now + 2)))
    made.hooks.stop.agree = lambda: made.clock.seconds() >= 20  # type: ignore[method-assign]
    made.hooks.stop.signal_name = "SIGTERM"
    with pytest.raises(Stopped, match="step 10"):
        made.fit(Cursor())
    hands.now += 10_000  # the machine was off
    began = hands.now
    train_timed(tmp_path, hands)
    assert hands.now - began == 40
    found = records(tmp_path)
    assert [record["step"] for record in found] == list(range(1, 31))
    assert found[-1]["lr"] < 0.06 * 3e-4
    shares = [record["time/share"] for record in found]
    assert shares == sorted(shares)
    assert shares[10] == shares[9], "the first step of a process compiles"
    assert train_timed(tmp_path, hands).saved_step == 30, "a finished stage trains no step"


def test_more_minutes_go_on_from_a_finished_stage(tmp_path: Path, hands: Hands) -> None:
    train_timed(tmp_path, hands)
    began = hands.now
    train_timed(tmp_path, hands, minutes=2.0)
    assert hands.now - began == 60
    assert records(tmp_path)[30]["lr"] == pytest.approx(3e-4 * (1 - 40 / 90)), "half of the longer schedule"


def test_shares_of_a_checkpoint_fit_the_time_that_the_stage_has_now() -> None:
    state = {"elapsed": 30.0, "clock": {"before": 0.25, "now": 0.5, "seconds": 60.0}}
    assert read_share(state, 60.0) == Share(0.25, 0.5)
    assert read_share(state, 120.0) == Share(0.125, 0.25)
    assert read_share(state, 15.0) == Share(1.0, 1.0)
    assert read_share({"elapsed": 15.0}, 60.0) == Share(0.25, 0.25), "it was trained by steps"
    assert read_share(state, None) == Share()
    for broken in (
        {"now": 0.5},
        {"before": 0.1, "now": math.nan, "seconds": 1.0},
        {"before": 0, "now": "x", "seconds": 1},
    ):
        with pytest.raises(InputError, match="clock"):
            read_share({"elapsed": 1.0, "clock": broken}, 60.0)


def test_the_schedule_spreads_over_the_time_that_is_left() -> None:
    share, left = 0.0, 10.0
    for _ in range(10):
        left -= 1
        share = next_share(share, 1.0, left)
        assert share == pytest.approx(1 - left / 10)
    assert next_share(0.2, 1.0, 1.0) == pytest.approx(0.6), "after a pause it goes faster"
    assert next_share(0.2, 0.0, 5.0) == 0.2
    assert next_share(0.2, 3.0, -1.0) == 1.0


def test_the_average_spans_the_same_share_of_the_stage() -> None:
    """A weight that grows from 0 to 1 over the stage, in 100 steps or in 1,000."""

    def average(steps: int, pace: float) -> float:
        p = nn.Parameter(torch.zeros(()))
        ema = Ema({"p": p}, EmaConfig(decay=0.9))
        for step in range(1, steps + 1):
            with torch.no_grad():
                p.fill_(step / steps)
            ema.update(step, step * pace, pace)
        return float(ema.average["p"])

    by_steps = average(1000, 1)
    assert average(100, 10) == pytest.approx(by_steps, abs=0.01)
    assert abs(average(100, 1) - by_steps) > 0.05, "which steps alone would not give"


def test_a_copy_until_start_follows_the_schedule() -> None:
    p = nn.Parameter(torch.zeros(()))
    ema = Ema({"p": p}, EmaConfig(decay=0.9, start=50))
    p.data.fill_(1.0)
    ema.update(1, position=50, pace=50)
    assert float(ema.average["p"]) == 1


def test_the_first_process_decides_for_all() -> None:
    def work(rank: int) -> list[float]:
        watch = StageClock()
        shares = [0.0]
        for _ in range(4):
            time.sleep(0.01 * (1 + 3 * rank))
            shares.append(watch.end_step(shares[-1], 1.0))
        return shares

    first, second = run_ranks(2, work)
    assert first == second
    assert 0 < first[-1] < 0.5


def test_due_phases_are_found_wherever_a_step_leaps() -> None:
    config = TrainConfig(minutes=1, steps=100, save_every=10, validate_every=30, sample_every=0)
    assert due_phases(config, Cursor(3, "train", Share(0.0, 0.09))) == ()
    assert due_phases(config, Cursor(3, "train", Share(0.09, 0.1))) == ("save",)
    assert due_phases(config, Cursor(3, "train", Share(0.05, 0.65))) == ("save", "validate")
    assert due_phases(config, Cursor(3, "train", Share(0.95, 1.0))) == ("save", "validate", "check")


def test_lines_of_a_timed_stage_say_how_much_time_is_left(capsys: pytest.CaptureFixture) -> None:
    Progress("codec", None).numbers(12, 0.5, 100.0, 0.25, 45.0)
    assert "codec  step 12, 25% done  loss 0.5  100 samples/s  0:45 left" in capsys.readouterr().err


# Configs and whole runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"minutes": 0}, "train.minutes=0"),
        ({"minutes": -1}, "train.minutes=-1"),
        ({"minutes": "soon"}, "train.minutes='soon'"),
        ({"minutes": 10**7}, "train.minutes=10000000"),
        ({"minutes": 1, "minutes_share": 0}, "train.minutes_share=0"),
        ({"minutes": 1, "minutes_share": 1.5}, "train.minutes_share=1.5"),
        ({"minutes": 1, "deterministic": True}, "set steps instead of minutes, or deterministic=false"),
    ],
)
def test_times_that_are_none_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan({**clip_tasks.BASE, "train": {**clip_tasks.BASE["train"], **keys}})


def test_a_run_of_two_stages_shares_its_minutes(tmp_path: Path) -> None:
    """On a real clock: each stage takes its share, `kineo runs` and --dry-run know it, and a second call trains nothing."""
    times = {"train__minutes": 0.05, "train__validate_every": 0, "train__log_every": 5}
    shares = {"stages__codec__train__minutes_share": 0.25, "stages__generator__train__minutes_share": 0.75}
    run = clip_tasks.train(tmp_path, **times, **shares)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for stage, seconds in (("codec", 0.75), ("generator", 2.25)):
        last = [line for line in lines if line["stage"] == stage and line["split"] == "train"][-1]
        assert last["time/share"] == 1
        assert seconds <= last["time/elapsed"] < seconds + 5
    row = read_run(run)
    assert (row.state, row.step) == ("finished", row.steps)
    told: list[str] = []
    dry_run([], run, out=told.append)
    assert any("generator: finished at step" in line for line in told)
    told.clear()
    dry_run([str(tmp_path / "run.yaml")], tmp_path / "other", out=told.append)
    assert any("(train.minutes), enough for about" in line for line in told)
