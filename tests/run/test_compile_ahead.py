"""train.compile_ahead: steps run uncompiled until a second process has filled the compile cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import kineograph as kg
from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError
from kineograph.core.notes import discard
from kineograph.core.run_folder import RunFolder
from kineograph.run.compile_ahead import CompileAhead, compile_stages
from kineograph.train.config import TrainConfig
from kineograph.train.stepper import Stepper
from tests.run.calling import kineo
from tests.subprocesses import python_path
from tests.train.toy_tasks import Toy, ToyConfig

QUICK: dict[str, Any] = {
    "data.count": 12, "train.batch_size": 2, "train.validate_every": 0, "train.sample_every": 0, "train.save_every": 1,
    "train.workers": 0, "train.device": "cpu", "train.health": "off", "train.trackers": [],
}  # fmt: skip


def quick_words() -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in QUICK.items()]


# Steps -----------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class CompiledToy(Toy):
    def __init__(self) -> None:
        super().__init__(4, ToyConfig(task="toy"))
        self.body = Body()


def test_steps_are_compiled_from_the_moment_at_which_the_cache_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_body(task: CompiledToy, *options: bool) -> None:
        task.body.compile(backend="eager")

    monkeypatch.setattr("kineograph.train.stepper.compile_task", compile_body)
    filled: list[bool] = []
    task = CompiledToy()
    stepper = Stepper(task, TrainConfig(compile=True, batch_size=4), may_compile=lambda: bool(filled))
    batch = Batch(slots=torch.arange(4), pixels=torch.zeros(4, 1, 1, 2, 2, dtype=torch.uint8))
    counters.clear()
    stepper.step(0, [batch])
    assert stepper.is_waiting and not counters["stats"]["unique_graphs"]
    filled.append(True)
    stepper.step(1, [batch])
    assert not stepper.is_waiting and counters["stats"]["unique_graphs"] == 1


# The second process ----------------------------------------------------------------------------------------------


def test_a_stage_is_compiled_in_the_run_itself_if_the_second_process_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(["false"], **options))
    notes: list[str] = []
    with CompileAhead(RunFolder(tmp_path), ["tokenizer", "generator"], notes.append) as ahead:
        ahead._process.wait()
        assert ahead.is_ready("tokenizer") and ahead.is_ready("tokenizer")
    assert len(notes) == 1 and "tokenizer: was not compiled ahead" in notes[0] and "compile.log" in notes[0]


def test_the_second_process_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(["sleep", "600"], **options))
    with CompileAhead(RunFolder(tmp_path), ["tokenizer"], discard) as ahead:
        assert not ahead.is_ready("tokenizer")
        done = Path(ahead._done.name)
        (done / "tokenizer").touch()
        assert ahead.is_ready("tokenizer")
    assert ahead._process.poll() is not None and not done.exists()


@pytest.mark.parametrize(
    "preset",
    ["phenaki-tiny", "cogvideox-tiny"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("nuwa-tiny", "muse-tiny", "dalle2-tiny")],
)
def test_its_batches_are_those_of_training(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cache is keyed by shapes and dtypes: another batch would compile something else."""
    trained: list[Batch] = []
    steps = Stepper.step

    def keep(self: Stepper, step: int, batches: list[Batch], *rest: Any) -> dict[str, Tensor]:
        trained.append(batches[0])
        return steps(self, step, batches, *rest)

    monkeypatch.setattr(Stepper, "step", keep)
    run = kg.train(preset, run=str(tmp_path / "run"), quiet=True, **{**QUICK, "train.steps": 1})
    from_ahead: list[Batch] = []
    monkeypatch.setattr(Stepper, "step", lambda self, step, batches, *rest: from_ahead.append(batches[0]) or {})
    compile_stages(RunFolder(run), list(RunFolder(run).config()["stages"]), tmp_path)
    assert [describe(batch) for batch in from_ahead] == [describe(batch) for batch in trained]


def describe(batch: Batch) -> dict[str, Any]:
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)} | batch.extra
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


# Refusals --------------------------------------------------------------------------------------------------------


def test_a_dataset_of_the_users_own_is_refused(tmp_path: Path) -> None:
    pixels = [(torch.zeros(1, 3, 32, 32), "a caption")] * 8
    with pytest.raises(ConfigError, match=r"train\.compile_ahead=true reads the data in a second process"):
        kg.train("vqgan-tiny", run=str(tmp_path / "run"), dataset=pixels, **{"train.compile_ahead": True})
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["vqgan-tiny", "train.compile_ahead=true", "--run", tmp_path / "run", "--dry-run", "--processes", 2]
    assert kineo("train", *words) == 2
    assert "train.compile_ahead=true works in one process: set it to false" in capsys.readouterr().err


def test_a_log_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "compile.log").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        CompileAhead(RunFolder(tmp_path), ["tokenizer"], discard)
    assert target.read_text() == "kept"


def test_nothing_to_compile_is_refused() -> None:
    with pytest.raises(ValueError, match="compile_ahead=true has no effect with compile=false"):
        TrainConfig(compile_ahead=True, compile=False)


def test_the_same_weights_every_time_are_refused() -> None:
    with pytest.raises(ValueError, match="compile_ahead=true compiles as soon as"):
        TrainConfig(compile_ahead=True, deterministic=True)


TIMED_RUN = """
import json, sys
from torch._dynamo.utils import counters
import kineograph as kg
from kineograph.train.stepper import Stepper

steps = Stepper.step

def report(self, *arguments):
    waited = self.is_waiting
    result = steps(self, *arguments)
    if waited and not self.is_waiting:
        print(json.dumps(counters["inductor"]))
    return result

Stepper.step = report
kg.train("vqgan-tiny", run=sys.argv[1], quiet=True, **json.loads(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_run_compiles_from_the_cache_that_the_second_process_filled(tmp_path: Path) -> None:
    changes = {"train.compile": True, "train.compile_ahead": True, "train.steps": 20000, "train.minutes": 2}
    command = [sys.executable, "-c", TIMED_RUN, str(tmp_path / "run"), json.dumps(QUICK | changes)]
    env = {**os.environ, "PYTHONPATH": python_path(), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    counted = json.loads(done.stdout)  # when the first steps, which ran uncompiled, were over
    assert counted["fxgraph_cache_hit"] and "fxgraph_cache_miss" not in counted
