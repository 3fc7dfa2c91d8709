"""Stages that go wrong, through the command: what is said, what is written, and that nothing is trained on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kineograph.core.config import merge
from kineograph.core.errors import RunFailed
from kineograph.core.run_folder import RunFolder
from kineograph.evaluate.runner import evaluate
from kineograph.run.listing import list_runs
from kineograph.stage.load import StageLoader
from kineograph.train import checkpoint
from kineograph.train.stepper import Stepper
from tests.run.calling import kineo
from tests.run.clip_tasks import train as train_clips
from tests.run.dead_runs import CASES, STAGES, Ending, run_case

# Every picture is decoded from one code: at this learning rate the first update ruins the encoder for good.
COLLAPSE: dict[str, Any] = {
    "seed": 0,
    "data": {"source": "moving_digits", "size": 16, "channels": 1, "glyphs": 2, "directions": 4, "count": 200},
    "train": {
        "steps": 100, "batch_size": 4, "warmup": 0, "log_every": 10, "save_every": 100, "validate_every": 0, "validation_samples": 32,
        "sample_every": 0, "workers": 0, "trackers": [], "device": "cpu",
    },
    "stages": {
        "tokenizer": {
            "task": "vqgan", "width": 8, "multipliers": [1], "patch": 4, "quantizer": {"kind": "fsq", "levels": [4, 4, 4]},
            "loss": "l2", "perceptual": {"weight": 0}, "train": {"lr": 10.0, "clip": None},
        },
        "generator": {
            "task": "muse", "codec": "tokenizer", "width": 16, "depth": 1, "heads": 1,
            "text": {"kind": "learned", "width": 16, "depth": 0, "positions": "none", "length": 12}, "train": {"lr": 1e-3, "validate_every": 50},
        },
    },
}  # fmt: skip


def write(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    path = folder / "collapse.yaml"
    path.write_text(yaml.safe_dump(merge(COLLAPSE, changes or {}), sort_keys=False))
    return path


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def findings(run: Path) -> list[tuple[str, str, str]]:
    return [(r["stage"], r["finding"]["name"], r["finding"]["severity"]) for r in records(run) if "finding" in r]


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collapsed")
    assert kineo("train", write(folder), "--run", folder / "run") == 1
    return folder


def test_a_collapsed_tokenizer_ends_the_run_before_its_generator(
    collapsed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = collapsed / "run"
    assert ("tokenizer", "codec_collapsed", "fatal") in findings(run)
    assert {record["stage"] for record in records(run)} == {"tokenizer"}
    assert not (run / "generator" / "checkpoints").exists()
    assert checkpoint.saved_steps(run / "tokenizer" / "checkpoints")[-1] == 100
    # The same command again: it is checked again, nothing is trained.
    monkeypatch.setattr(Stepper, "step", lambda *arguments: pytest.fail("trained"))
    before = findings(run)
    assert kineo("train", write(collapsed), "--run", run) == 1
    message = capsys.readouterr().err
    assert "stage tokenizer: codec_collapsed: explained_variance is" in message and "at least 0.1" in message
    assert "Lower train.lr" in message and "train.health=warn" in message and "Traceback" not in message
    assert findings(run) == before


def test_a_failed_run_is_listed_drawn_and_evaluated_as_such(collapsed: Path, tmp_path: Path) -> None:
    run = collapsed / "run"
    (row,) = list_runs(run)
    assert (row.state, row.stage) == ("failed", "tokenizer")
    assert "tokenizer: codec_collapsed" in row.findings
    assert (run / "curves.png").is_file()
    found = evaluate(run, ["loss"], samples=16, device="cpu", note=lambda line: None)
    assert any(line.startswith("tokenizer: fatal: codec_collapsed: ") for line in found.findings)
    assert found["explained_variance"] < 0.1
    written = json.loads((run / "evaluation.json").read_text())
    assert "codec_collapsed" in [finding["name"] for finding in written["findings"]["tokenizer"]]


def test_commands_that_judge_a_collapsed_run_say_so(collapsed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = collapsed / "run"
    assert kineo("evaluate", run, "--metrics", "loss,fvd", "--samples", 16, "--device", "cpu") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "tokenizer: fatal: codec_collapsed: " in printed and f"wrote {run}/evaluation.json" in printed
    assert kineo("compare", run, run) == 0
    assert "run: tokenizer: codec_collapsed: explained_variance is" in " ".join(capsys.readouterr().out.split())


def test_a_trial_is_evaluated_without_a_fatal_finding(tmp_path: Path) -> None:
    only = {"tokenizer": COLLAPSE["stages"]["tokenizer"]}
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump({**COLLAPSE, "stages": only}, sort_keys=False))
    assert kineo("train", path, "--run", tmp_path / "run", "train.steps=50") == 0
    found = evaluate(tmp_path / "run", ["loss"], samples=16, device="cpu", note=lambda line: None)
    assert any(line.startswith("tokenizer: warning: codec_collapsed: ") for line in found.findings)
    assert found.fatal == []


def test_a_generator_of_another_run_is_warned_of_the_codec(collapsed: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    StageLoader(RunFolder(tmp_path), note=notes.append).load(f"{collapsed}/run/tokenizer")
    assert any(f"warning: {collapsed}/run/tokenizer: codec_collapsed: " in line for line in notes)


def test_evaluation_notices_what_training_did_not_look_for(tmp_path: Path) -> None:
    only = {"train": {"health": "off"}, "stages": {"tokenizer": COLLAPSE["stages"]["tokenizer"]}}
    path = tmp_path / "off.yaml"
    path.write_text(yaml.safe_dump({**COLLAPSE, **only, "train": COLLAPSE["train"] | only["train"]}, sort_keys=False))
    assert kineo("train", path, "--run", tmp_path / "run") == 0
    assert findings(tmp_path / "run") == []
    found = evaluate(tmp_path / "run", ["loss"], samples=16, device="cpu", note=lambda line: None)
    assert any(line.startswith("tokenizer: fatal: codec_collapsed: ") for line in found.findings)


def test_going_on_all_the_same(collapsed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """train.health=warn goes on from the finished tokenizer; its constant tokens are a finding of the generator."""
    run = tmp_path / "run"
    shutil.copytree(collapsed / "run", run)
    assert kineo("train", write(collapsed), "--run", run, "train.health=warn") == 0
    said = capsys.readouterr().err
    assert "fatal: constant_tokens: tokens/distinct is 1" in said
    assert checkpoint.saved_steps(run / "generator" / "checkpoints")[-1] == 100
    assert findings(run).count(("generator", "constant_tokens", "fatal")) == 1
    (row,) = list_runs(run)
    assert row.state == "finished" and "generator: constant_tokens" in row.findings
    # Back to stop: a finished stage with a fatal finding is not trained on.
    assert kineo("train", write(collapsed), "--run", run, "train.health=stop") == 1
    assert "stage tokenizer: codec_collapsed" in capsys.readouterr().err


# The Trainer ---------------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Stepper.step

    def poisoned(self: Stepper, *arguments: Any) -> Any:
        values = step(self, *arguments)
        with torch.no_grad():
            next(self.task.parameters()).fill_(torch.nan)
        return values

    monkeypatch.setattr(Stepper, "step", poisoned)
    with pytest.raises(RunFailed, match=r"stage codec: nonfinite_weights: .* hold nan or inf: gain"):
        train_clips(tmp_path, train__steps=1, train__validate_every=0)
    assert ("codec", "nonfinite_weights", "fatal") in findings(tmp_path / "run")


def test_no_finding_in_a_healthy_run_of_a_few_steps(tmp_path: Path) -> None:
    run = train_clips(tmp_path)
    assert findings(run) == []


# All families --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("black pictures", "blank_data"), ("lr 0", "no_learning_rate"), ("lr 1e-9", "no_learning_rate")],
)
def test_a_run_that_cannot_learn_ends_at_once(trained: Path, fault: str, expected: str) -> None:
    ending = run_case(trained, "vqgan", fault, name=f"at-once-{expected}")
    assert ending.code == 1 and ending.findings == {expected: "fatal"}


@pytest.mark.slow
@pytest.mark.parametrize("family", STAGES)
def test_a_healthy_run_has_no_findings(trained: Path, family: str) -> None:
    ending = run_case(trained, family, None, name=f"healthy-{family}")
    assert ending.code == 0 and ending.findings == {}


WARNED = {"one_caption"}  # what a person may want


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fault"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_no_dead_run_ends_in_silence(trained: Path, family: str, fault: str) -> None:
    ending: Ending = run_case(trained, family, fault)
    assert not ending.is_silent
    assert ending.code == 1 or fault in ("one caption", "lr too high")


@pytest.mark.slow
def test_a_vae_whose_posterior_is_its_prior(trained: Path) -> None:
    ending = run_case(trained, "causal_vae", None, "stages.causal_vae.kl=1e4", name="prior-posterior")
    assert ending.code == 1 and ending.findings["posterior_collapsed"] == "fatal"


@pytest.mark.slow
def test_learning_a_few_pictures_by_heart(trained: Path) -> None:
    words = ["data.count=16", "train.steps=400", "train.lr=4e-3", "train.schedule=constant"]
    ending = run_case(trained, "nuwa", None, *words, name="by-heart")
    assert ending.findings.get("overfitting") == "warning"


@pytest.mark.slow
def test_a_discriminator_that_has_won(trained: Path) -> None:
    """The generator stands still, so that telling its pictures from real ones is easy."""
    words = [
        "stages.vqgan.adversarial={start: 0, width: 8, penalty: 0}", "stages.vqgan.players.generator.lr=0",
        "stages.vqgan.players.discriminator.lr=1e-2", "train.log_every=1",
    ]  # fmt: skip
    ending = run_case(trained, "vqgan", None, *words, name="saturated")
    assert ending.findings.get("discriminator_saturated") == "warning"


def test_a_run_that_ends_with_an_error_is_listed_with_it_until_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    changes = {
        "stages": {"tokenizer": {"train": {"steps": 4, "save_every": 2, "lr": 1e-4}}, "generator": {"skip": True}}
    }
    config = write(tmp_path, changes)
    step, calls = Stepper.step, []

    def fail_once(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError("of a layer\nand more")
        return step(*arguments, **options)

    monkeypatch.setattr(Stepper, "step", fail_once)
    assert kineo("train", config, "--run", run) == 1
    (row,) = list_runs(run)
    assert (row.state, row.step, row.problem) == ("failed", 2, "ZeroDivisionError: of a layer")
    assert 'raise ZeroDivisionError("of a layer' in (run / "logs" / "rank-0.log").read_text()
    capsys.readouterr()
    assert kineo("runs", run) == 0
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert kineo("train", config, "--run", run) == 0
    (row,) = list_runs(run)
    assert (row.state, row.step, row.problem) == ("finished", 4, "")
    assert not RunFolder(run).failed_marker.exists()
