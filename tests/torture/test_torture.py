"""The short version of `make torture`: a few kills and faults of each kind. What is found wrong by the long one belongs here too."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from kineograph.core.run_folder import RunFolder
from kineograph.core.task import task_state_dict
from kineograph.stage.load import StageLoader
from kineograph.train import checkpoint
from tests.torture import comparison, faults, kills, processes
from tests.torture.__main__ import DDP, FSDP, HYBRID, ONE, ROUNDING, WITHOUT_DROPOUT
from tests.torture.elastic import elastic
from tests.torture.tiny import write_config

OFTEN = (faults.full_disk, faults.worker_killed)  # in every round of tests; tests/run/test_resume.py has others


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    processes.import_modules()


def test_a_lone_process_killed_again_and_again(tmp_path: Path) -> None:
    said: list[str] = []
    tally = kills.kill_runs(tmp_path, [kills.ALONE], 4, random.Random(2), time.monotonic() + 600, said.append)
    assert tally.kills >= 4 and tally.continuations >= 4
    assert tally.wrong == []


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_another_layout(tmp_path: Path) -> None:
    """FSDP2 on 2, then 1, then hybrid on 4, then DDP on 2: the curve and every tensor are those of one process, within rounding."""
    config = write_config(tmp_path / "tiny.yaml", train__validate_every=6, train__save_every=3, **WITHOUT_DROPOUT)
    kills.run_undisturbed(config, tmp_path / "undisturbed", kills.ALONE)
    expected, _ = comparison.read_curve(tmp_path / "undisturbed")
    run = tmp_path / "run"
    for steps, layout in zip((3, 6, 9, 12), (FSDP, ONE, HYBRID, DDP), strict=True):
        chosen = kills.Layout(layout.name, layout.world, (*layout.words, f"train.steps={steps}"))
        result = kills.train_once(config, run, chosen, tmp_path / "log")
        assert set(result.codes) == {0}, result.text
        assert checkpoint.latest(run / "toy/checkpoints").is_sharded == (layout.world > 1)
        assert comparison.saved_steps(run, kills.STAGES) == {"duel": steps, "toy": steps}
        opened = StageLoader(RunFolder(run)).load("toy")  # as sampling and judging do
        saved = checkpoint.checkpoint_at(run / "toy/checkpoints", steps).weights()
        assert all(torch.equal(value, saved[name]) for name, value in task_state_dict(opened).items())
    found, wrong = comparison.read_curve(run)
    extra = {("duel", "validation", 3), ("toy", "validation", 3), ("duel", "validation", 9), ("toy", "validation", 9)}
    assert wrong == [] and found.keys() - extra == expected.keys()  # the last step of each result is judged too
    assert comparison.find_differences({key: found[key] for key in expected}, expected, ROUNDING) == []
    assert comparison.compare_weights(run, tmp_path / "undisturbed", kills.STAGES, ROUNDING) == []


@pytest.mark.slow
def test_processes_killed_again_and_again_each_life_in_another_layout(tmp_path: Path) -> None:
    said: list[str] = []
    layouts = [ONE, FSDP, DDP, HYBRID]
    tally = kills.kill_runs(
        tmp_path, layouts, 3, random.Random(3), time.monotonic() + 600, said.append, ROUNDING, changes=WITHOUT_DROPOUT
    )
    assert tally.kills >= 3
    assert tally.wrong == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("undisturbed")
    config = write_config(place / "tiny.yaml")
    kills.run_undisturbed(config, place / "run", kills.ALONE)
    return config, place / "run"


@pytest.mark.parametrize("fault", OFTEN)
def test_a_fault(fault, undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    outcome = fault(faults.Scenario(tmp_path, *undisturbed))
    assert outcome.wrong == []
    assert outcome.codes


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in faults.EVERYWHERE + faults.ALONE_ONLY if fault not in OFTEN])
def test_every_other_fault(fault, undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    assert fault(faults.Scenario(tmp_path, *undisturbed)).wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DDP, FSDP])
def test_torchrun_starts_again_what_was_killed(layout: kills.Layout, tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", **WITHOUT_DROPOUT)
    kills.run_undisturbed(config, tmp_path / "undisturbed", layout)
    (tmp_path / "elastic").mkdir()
    place = faults.Scenario(tmp_path / "elastic", config, tmp_path / "undisturbed", layout)
    assert elastic(place, 2, random.Random(1)).wrong == []


def test_a_wrong_continuation_would_be_seen(undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    """The judge itself: another number, a line too many, too few or twice; steps that were lost; another weight, or another step's."""
    run = undisturbed[1]
    expected, faults_ = comparison.read_curve(run)
    assert not faults_ and comparison.find_differences(expected, expected) == []
    changed = {key: dict(record) for key, record in expected.items()}
    changed["toy", "train", 3]["loss"] += 1e-7
    assert len(comparison.find_differences(changed, expected)) == 1
    assert comparison.find_differences(changed, expected, 1e-4) == []
    changed["toy", "train", 99] = {}
    assert len(comparison.find_differences(changed, expected)) == 2
    assert comparison.find_missing(expected, expected) == [] == comparison.find_differences({}, expected)
    assert len(comparison.find_missing({key: expected[key] for key in list(expected)[1:]}, expected)) == 1
    double = tmp_path / "double"
    double.mkdir()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (double / "metrics.jsonl").write_text("".join([*lines, lines[0]]))
    assert len(comparison.read_curve(double)[1]) == 1
    assert comparison.find_lost_steps({"toy": 4}, "toy: Toy, 0.00 M parameters, on cpu, from step 2\n", {"toy": 6})
    assert comparison.find_lost_steps({"toy": 4}, "toy: Toy, 0.00 M parameters, on cpu, from step 4\n", {"toy": 2})
    assert not comparison.find_lost_steps({"toy": 4}, "toy: Toy, 0.00 M parameters, on cpu, from step 4\n", {"toy": 6})
    assert comparison.compare_weights(run, run, kills.STAGES) == []
    saved = checkpoint.latest(run / "toy/checkpoints")
    assert saved is not None
    tensors = {kind: saved.tensors(kind) for kind in ("model", "ema", "optimizer")}
    tensors["ema"]["last.bias"] += 1e-4
    checkpoint.save(tmp_path / "other/toy/checkpoints", saved.step, tensors, saved.state())
    assert comparison.compare_weights(tmp_path / "other", run, ["toy"]) == ["toy: ema last.bias differs"]
    assert comparison.compare_weights(tmp_path / "other", run, ["toy"], 1e-2) == []
    checkpoint.save(
        tmp_path / "late/toy/checkpoints", saved.step + 1, tensors, saved.state() | {"step": saved.step + 1}
    )
    assert len(comparison.compare_weights(tmp_path / "late", run, ["toy"])) == 1
