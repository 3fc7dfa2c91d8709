"""Epochs of a whole run: killed in any phase it comes back into that phase, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from kineograph.core.errors import ConfigError, InputError, Stopped
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Result
from kineograph.evaluate.runner import evaluate
from kineograph.run.listing import list_runs
from kineograph.run.metrics import TrainingMetrics
from kineograph.run.previews import Previews
from kineograph.stage.load import StageLoader
from kineograph.train import checkpoint
from kineograph.train.trainer import Trainer
from tests.run import clip_tasks
from tests.run.clip_tasks import BASE
from tests.train.test_trackers import FakeWandb

EPOCHS: dict[str, Any] = {
    "train__steps": 8,
    "train__batch_size": 4,
    "train__epoch_samples": 10,  # epochs end at steps 3, 5 and 8
    "train__save_every_samples": 8,  # at steps 2, 4, 6 and 8
    "train__keep_last": 1,
    "train__sample_every": 1,
    "train__metrics": ["loss", "tests.run.test_phases.Brightness"],
    "train__evaluation_samples": 3,
    "stages": {**BASE["stages"], "codec": {**BASE["stages"]["codec"], "train": {"metrics": [], "steps": 1}}},
}


class Brightness:
    """Of what is drawn, and of what is real."""

    name: ClassVar[str] = "brightness"
    needs: ClassVar = frozenset({"generated", "real"})

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    @classmethod
    def open(cls, subject: EvalContext) -> Brightness:
        assert not subject.task.training
        return cls()

    def update(self, evidence: EvalBatch) -> None:
        assert evidence.generated is not None and evidence.real is not None
        drawn, real = evidence.generated.flatten(1).mean(1), evidence.real.flatten(1).mean(1)
        self.seen += zip(drawn.tolist(), real.tolist(), strict=True)

    def compute(self) -> Result:
        drawn, real = zip(*self.seen, strict=True)
        return Result({"brightness": sum(drawn) / len(drawn), "real": sum(real) / len(real)}, {"extractor": "the mean"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
    monkeypatch.setattr("kineograph.stage.data.VOCABULARY_CAPTIONS", 200)


def train(folder: Path, name: str = "run", **changes: Any) -> Path:
    return clip_tasks.train(folder, name, **{**EPOCHS, **changes})


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith("time/")} for record in records]


def facts(run: Path) -> dict[str, Any]:
    """Everything that the next step would depend on, and everything that was told."""
    folder = run / "generator" / "checkpoints"
    state = checkpoint.select(folder).state()
    tensors = {
        f"{step}/{name}/{key}": value.tolist()
        for step in checkpoint.saved_steps(folder)
        for name in ("model", "ema", "optimizer")
        for key, value in checkpoint.checkpoint_at(folder, step).tensors(name).items()
    }
    pictures = sorted(
        path.relative_to(run).as_posix()
        for path in run.rglob("samples/**/*")
        if path.suffix != ".json" and path.is_file()
    )
    return {
        "lines": lines(run),
        "best": checkpoint.read_best(folder),
        "kept": checkpoint.saved_steps(folder),
        "state": {key: state[key] for key in ("phase", "samples", "best", "best_step", "stepper")},
        "tensors": tensors,
        "pictures": pictures,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
        patch.setattr("kineograph.stage.data.VOCABULARY_CAPTIONS", 200)
        return facts(train(tmp_path_factory.mktemp("whole")))


def test_an_epoch_saves_validates_evaluates_and_draws(whole: dict[str, Any]) -> None:
    told = [record for record in whole["lines"] if record["stage"] == "generator" and record["split"] == "validation"]
    assert [record["step"] for record in told if "loss" in record] == [3, 5, 8]
    judged = [record for record in told if "metric/brightness" in record]
    assert [record["step"] for record in judged] == [3, 5, 8]
    assert [record["step"] for record in whole["lines"] if record["split"] == "train"][1:] == list(range(1, 9))
    for record in judged:
        assert record.keys() >= {"metric/brightness/real", "metric/loss"}
        assert record["labels"]["brightness"] == {"samples": 2, "extractor": "the mean"}  # all there are
    folders = {"real", *(f"step-{step:08d}" for step in (3, 5, 8))}
    assert {Path(path).parts[2] for path in whole["pictures"]} == folders
    assert whole["state"]["samples"] == 32 and whole["state"]["phase"] == "train"


def test_snapshots_outlive_keep_last(whole: dict[str, Any]) -> None:
    assert whole["kept"] == sorted({2, 4, 6, 8, whole["best"]["step"]})


# Killed ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing catches it, and nothing is saved on its way out."""


def deadly(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, after: bool) -> None:
    """The n-th call of this kind while `generator` trains is the last thing that the run does; `after` its work, or before it."""
    original: Callable[..., Any] = getattr(owner, name)
    seen = 0

    def dies(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += getattr(self.stage, "name", self.stage) == "generator"
        if seen != nth:
            return original(self, *arguments, **named)
        if after:
            original(self, *arguments, **named)
        raise Killed

    monkeypatch.setattr(owner, name, dies)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("nth", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["first", "last"])
@pytest.mark.parametrize("place", ["_validate", "_evaluate", "show", "_save", "_note_phase"])
def test_killed_in_a_phase(whole: dict, tmp_path: Path, place: str, nth: int, after: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        deadly(patch, *((Previews, "__call__") if place == "show" else (Trainer, place)), nth, after)
        with pytest.raises(Killed):
            train(tmp_path)
    folder = tmp_path / "run" / "generator" / "checkpoints"
    before = checkpoint.latest(folder)
    trained = []
    with pytest.MonkeyPatch.context() as patch:
        step = Trainer._train_step
        patch.setattr(
            Trainer, "_train_step", lambda self, at, *rest: (trained.append(at.step), step(self, at, *rest))[1]
        )
        run = train(tmp_path)
    assert facts(run) == whole
    if place in (
        "_validate",
        "_evaluate",
        "show",
    ):  # no training is repeated: the weights were saved before they were judged
        assert before is not None and before.step == (3 if nth == 1 else 8)
        assert trained == list(range(before.step, 8))


def test_a_cursor_that_cannot_be_read_costs_its_phases_only(whole: dict, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        deadly(patch, Previews, "__call__", 2, after=False)
        with pytest.raises(Killed):
            train(tmp_path)
    found = checkpoint.latest(tmp_path / "run" / "generator" / "checkpoints")
    assert found is not None and found.phase == "sample"
    (found.path / "phase.json").write_text("{")
    assert found.phase == "validate"
    assert facts(train(tmp_path)) == whole


def test_a_signal_between_phases_stops_there(whole: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer._validate

    def signalled(self: Trainer, done: int) -> bool:
        improved = original(self, done)
        if self.stage == "generator":
            self.hooks.stop.signal_name = "SIGTERM"
        return improved

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_validate", signalled)
        with pytest.raises(Stopped, match="at step 3 of generator, saved"):
            train(tmp_path)
    found = checkpoint.latest(tmp_path / "run" / "generator" / "checkpoints")
    assert found is not None and (found.step, found.phase) == (3, "evaluate")
    assert facts(train(tmp_path)) == whole


def test_a_run_that_died_in_its_last_phase_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        deadly(patch, Previews, "__call__", 3, after=False)
        with pytest.raises(Killed):
            train(tmp_path)
    (row,) = list_runs(tmp_path / "run")
    assert (row.state, row.stage, row.step) == ("interrupted", "generator", 8)
    train(tmp_path)
    (row,) = list_runs(tmp_path / "run")
    assert row.state == "finished"


KILLER = """
import os, signal, sys
from kineograph.train.trainer import Trainer
original, seen = Trainer._evaluate, 0
def dies(self, done):
    global seen
    original(self, done)
    seen += self.stage == "generator"
    if seen == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Trainer._evaluate = dies
from kineograph.cli import main
main(sys.argv[1:])
"""


def test_a_process_that_is_killed(whole: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the phase that it died in are written, and not yet noted."""
    with monkeypatch.context() as patch:
        patch.setattr("kineograph.run.train.train", lambda *a, **k: tmp_path)  # the config file only
        train(tmp_path)
    monkeypatch.undo()  # what `quick` saves a subprocess cannot see
    words = [sys.executable, "-c", KILLER, "train", str(tmp_path / "run.yaml"), "--run", str(tmp_path / "run")]
    died = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    judged = [record for record in lines(tmp_path / "run") if "metric/loss" in record]
    assert [record["step"] for record in judged] == [3, 5]
    assert facts(train(tmp_path)) == whole


# What the phases do ----------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_command(whole: dict, tmp_path: Path) -> None:
    run = train(tmp_path)
    found = evaluate(run, EPOCHS["train__metrics"], samples=3, stage="generator", device="cpu", note=lambda line: None)
    last = [record for record in lines(run) if "metric/loss" in record][-1]
    assert last["metric/brightness"] == pytest.approx(found["brightness"], abs=1e-6)
    assert last["metric/loss"] == pytest.approx(found["loss"], abs=1e-6)


def test_evaluation_uses_the_average_and_leaves_the_task_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    original = Trainer._evaluate

    def watched(self: Trainer, done: int) -> None:
        weights = {name: value.clone() for name, value in self.stepper.task.state_dict().items()}
        inner = self.hooks.evaluate
        assert inner is not None
        self.hooks.evaluate = lambda step, task: (
            seen.append((task.training, all(torch.equal(v, weights[n]) for n, v in task.state_dict().items()))),
            inner(step, task),
        )[1]
        original(self, done)
        self.hooks.evaluate = inner
        assert self.stepper.task.training
        assert all(torch.equal(value, weights[name]) for name, value in self.stepper.task.state_dict().items())

    monkeypatch.setattr(Trainer, "_evaluate", watched)
    train(tmp_path, stages__codec__train__metrics=["loss"], train__metrics=["loss"])
    assert len(seen) == 4 and not any(mode for mode, _ in seen)
    assert not seen[-1][1]  # what is judged is not what is trained


def test_a_metric_that_does_not_apply_is_skipped_and_noted_once(tmp_path: Path) -> None:
    told: list[str] = []
    run = train(tmp_path, lines=told, train__metrics=["loss", "reconstruction"])
    assert len([line for line in told if "generator: reconstruction is skipped from here on" in line]) == 1
    assert all("metric/reconstruction/psnr" not in record for record in lines(run))


def test_an_unknown_metric_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.metrics=los is not known: did you mean loss\?"):
        train(tmp_path, train__metrics=["los"])
    assert not (tmp_path / "run").exists()


def test_weights_that_a_metric_lacks_are_noticed_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "empty"))
    with pytest.raises(InputError, match=r"train\.metrics names fid: .*kineo weights get inception-v3.*or remove it"):
        train(tmp_path, train__metrics=["fid"])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # before the first stage


def test_grids_show_real_beside_drawn_of_every_split(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        train__grids=["train", "validation", "test"],
        train__caption_prefix="drawn: ",
        train__metrics=[],
        train__trackers=["tensorboard"],
        data__test=0.2,
        data__frames=1,
        data__stills=0.0,
    )
    folder = run / "generator" / "samples" / "step-00000008"
    words = {
        split: (folder / f"{split}-grid.txt").read_text().splitlines() for split in ("train", "validation", "test")
    }
    assert len({tuple(captions) for captions in words.values()}) == 3
    for split, captions in words.items():
        assert len(captions) == 2 and all(caption.startswith("drawn: ") for caption in captions)
        with Image.open(folder / f"{split}-grid.png") as sheet:
            assert sheet.width > 2 * 96 and sheet.height > 2 * 96  # two columns, real above drawn
    listed = json.loads((folder / "prompts.json").read_text())
    assert not any(item["prompt"].startswith("drawn: ") for item in listed)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard" / "generator"), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Images("generator/grids/test")] == [3, 5, 8]
    assert "generator/grids/train/caption/text_summary" in events.Tags()["tensors"]


def test_a_grid_of_clips_plays(tmp_path: Path) -> None:
    run = train(tmp_path, train__grids=["train"], train__metrics=[])
    folder = run / "generator" / "samples" / "step-00000008"
    with Image.open(folder / "train-grid.gif") as clip:
        assert clip.n_frames == 5  # type: ignore[attr-defined]
    assert (folder / "train-grid.png").is_file()


def test_a_grid_of_a_split_that_is_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.test=0"):
        train(tmp_path, train__grids=["test"])
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_each_point_once_after_a_kill(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        deadly(patch, Trainer, "_evaluate", 1, after=True)
        with pytest.raises(Killed):
            train(tmp_path, train__trackers=["tensorboard"])
    run = train(tmp_path, train__trackers=["tensorboard"])

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard" / "generator"))
    events.Reload()
    assert [event.step for event in events.Scalars("generator/validation/metric/loss")] == [3, 5, 8]
    assert [event.step for event in events.Scalars("generator/validation/loss")] == [3, 5, 8]
    assert [event.step for event in events.Scalars("generator/train/loss")] == list(range(1, 9))


def test_metrics_are_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def run(*_: Any) -> tuple[dict[str, Result], None]:
        found.append(torch.is_autocast_enabled("cpu"))
        return {}, None

    metrics = object.__new__(TrainingMetrics)
    metrics.metrics, metrics.stages = {}, StageLoader(RunFolder("none"))
    monkeypatch.setattr(metrics, "_make_evaluator", lambda task: SimpleNamespace(run=run), raising=False)
    with torch.autocast("cpu", torch.bfloat16):
        metrics(1, Task())
    assert found == [False]


def test_checkpoints_go_to_the_tracker_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setattr("kineograph.train.trackers._import_wandb", lambda: fake)
    wandb: dict[str, Any] = {
        "train__trackers": ["wandb"],
        "train__log_checkpoints": True,
        "train__metrics": [],
        "train__wandb": {"project": "p", "entity": "team"},
    }
    with pytest.MonkeyPatch.context() as patch:
        deadly(patch, Trainer, "_note_phase", 3, after=False)  # step 3 is validated and drawn, and its checkpoint sent
        with pytest.raises(Killed):
            train(tmp_path, **wandb)
    run = train(tmp_path, **wandb)
    sent = [told for told in fake.told if isinstance(told, tuple) and told[0] == "run-generator"]
    assert [aliases[1] for _, _, aliases in sent] == [f"step-{step}" for step in (2, 3, 4, 5, 6, 8)]
    assert all("manifest.json" in files and "model.safetensors" in files for _, files, _ in sent)
    losses = {r["step"]: r["loss"] for r in lines(run) if r["stage"] == "generator" and r["split"] == "validation"}
    improved = {
        f"step-{step}" for step in losses if all(losses[step] < losses[other] for other in losses if other < step)
    }
    assert {aliases[1] for _, _, aliases in sent if "best" in aliases} == improved
    assert len({start["id"] for start in fake.started}) == 1 and fake.started[0]["entity"] == "team"
