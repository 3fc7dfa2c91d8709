"""The state machine without a model: every sample trained once, phases in order, and the same sequence from wherever it is taken up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kineograph.train.config import TrainConfig
from kineograph.train.phases import (
    ORDER,
    Cursor,
    advance,
    due_phases,
    is_finished,
    is_logged,
    is_snapshot,
    skip_removed_phases,
)


def walk(config: TrainConfig, cursor: Cursor = Cursor()) -> list[Cursor]:  # noqa: B008  frozen
    """Everything that a run does from `cursor` on."""
    done = []
    while not is_finished(config, cursor):
        done.append(cursor)
        cursor = advance(config, cursor)
    return done


def steps(config: TrainConfig, phase: str) -> list[int]:
    return [cursor.step for cursor in walk(config) if cursor.phase == phase]


cadences = st.integers(0, 9)
configs = st.builds(
    lambda tracked, **keys: TrainConfig(**keys, trackers=("wandb",) if tracked else (), log_checkpoints=tracked),
    tracked=st.booleans(),
    steps=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    log_every=st.integers(1, 9),
    save_every=st.integers(1, 9),
    validate_every=cadences,
    evaluate_every=cadences,
    sample_every=cadences,
    metrics=st.sampled_from([(), ("loss",)]),
    epoch_samples=st.none() | st.integers(1, 60),
    save_every_samples=st.none() | st.integers(1, 60),
)


@settings(max_examples=200, deadline=None)
@given(configs)
def test_every_sample_is_trained_once_and_phases_keep_their_order(config: TrainConfig) -> None:
    done = walk(config)
    assert [cursor.step for cursor in done if cursor.phase == "train"] == list(range(config.steps))
    for before, after in pairwise(done):
        if after.phase == "train":
            assert after.step == before.step + (before.phase == "train")
        else:
            assert ORDER.index(after.phase) > (0 if before.phase == "train" else ORDER.index(before.phase))
    for step in range(1, config.steps + 1):
        assert tuple(c.phase for c in done if c.step == step and c.phase != "train") == due_phases(config, Cursor(step))
    assert steps(config, "save")[-1] == config.steps


@settings(max_examples=200, deadline=None)
@given(configs, st.data())
def test_taken_up_anywhere_it_goes_on_alike(config: TrainConfig, data: st.DataObject) -> None:
    done = walk(config)
    place = data.draw(st.integers(0, len(done) - 1))
    assert walk(config, skip_removed_phases(config, done[place])) == done[place:]


@settings(max_examples=200, deadline=None)
@given(configs, configs, st.data())
def test_another_cadence_on_resume_never_trains_a_sample_twice(old: TrainConfig, new: TrainConfig, data: Any) -> None:
    cursor = data.draw(st.sampled_from(walk(old)))
    trained = [c.step for c in walk(new, skip_removed_phases(new, cursor)) if c.phase == "train"]
    assert trained == list(range(cursor.step, new.steps))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 300))
def test_epochs_end_once_for_each_so_many_samples(count: int, batch: int, epoch: int) -> None:
    config = TrainConfig(steps=count, batch_size=batch, epoch_samples=epoch)
    ends = steps(config, "validate")
    assert ends[-1] == count
    # The n-th end is the first step that has trained n epochs' samples: batches that do not divide an epoch never drift.
    expected = sorted({-(-number * epoch // batch) for number in range(1, count * batch // epoch + 1)} | {count})
    assert ends == expected
    assert steps(config, "sample") == steps(config, "save") == ends


def test_steps_as_ever() -> None:
    config = TrainConfig(steps=10, save_every=3, validate_every=4, sample_every=5, log_every=3)
    assert steps(config, "save") == [3, 6, 9, 10]
    assert steps(config, "validate") == [4, 8, 10]
    assert steps(config, "sample") == [5, 10]
    assert steps(config, "evaluate") == steps(config, "publish") == []
    assert [step for step in range(1, 11) if is_logged(config, step)] == [1, 3, 6, 9, 10]
    never = TrainConfig(steps=10, validate_every=0, sample_every=0, save_every=5)
    assert {cursor.phase for cursor in walk(never)} == {"train", "save", "check"}
    assert steps(never, "check") == [10]
    assert steps(never.model_copy(update={"health": "off"}), "check") == []


def test_an_epoch_goes_through_all_phases_and_0_leaves_one_out() -> None:
    config = TrainConfig(steps=6, batch_size=4, epoch_samples=12, metrics=("loss",), save_every=1, validate_every=2)
    assert due_phases(config, Cursor(3)) == ("save", "validate", "evaluate", "sample")
    assert due_phases(config, Cursor(1)) == due_phases(config, Cursor(2)) == ()
    assert due_phases(config.model_copy(update={"validate_every": 0}), Cursor(3)) == ("save", "evaluate", "sample")
    assert due_phases(config.model_copy(update={"metrics": ()}), Cursor(3)) == ("save", "validate", "sample")


def test_snapshots_are_saved_and_known_again() -> None:
    config = TrainConfig(steps=20, batch_size=3, save_every=100, save_every_samples=16)
    found = [step for step in range(1, 21) if is_snapshot(config, step)]
    assert found == [6, 11, 16]  # 18, 33 and 48 samples
    assert steps(config, "save") == [*found, 20]
    assert not any(is_snapshot(TrainConfig(), step) for step in range(5000))


def test_lines_of_a_phase_that_is_entered_again_are_not_kept() -> None:
    train = {"split": "train", "step": 8}
    validation = {"split": "validation", "step": 8, "loss": 1.0}
    metric = {"split": "validation", "step": 8, "metric/fid": 2.0}
    finding = {"split": "health", "step": 8, "phase": "validate", "finding": {"name": "codec_collapsed"}}
    last = {"split": "health", "step": 8, "phase": "check", "finding": {"name": "codec_collapsed"}}
    later = {"split": "train", "step": 9}
    for phase, kept in (
        ("train", [train, validation, metric, finding, last]),
        ("save", [train]),
        ("validate", [train]),
        ("evaluate", [train, validation, finding]),
        ("sample", [train, validation, metric, finding]),
        ("publish", [train, validation, metric, finding]),
        ("check", [train, validation, metric, finding]),
    ):
        cursor = Cursor(8, phase)  # type: ignore[arg-type]
        records = (train, validation, metric, finding, last, later)
        assert [record for record in records if cursor.covers(record)] == kept
        assert all(cursor.covers(record | {"step": 7}) for record in (train, validation, metric))


def test_checkpoints_are_logged_where_files_are_kept_only() -> None:
    with pytest.raises(ValidationError, match="log_checkpoints=true needs the tracker wandb"):
        TrainConfig(log_checkpoints=True)
    config = TrainConfig(log_checkpoints=True, trackers=("wandb",), steps=4, save_every=2, validate_every=3)
    assert steps(config, "publish") == [2, 3, 4]
