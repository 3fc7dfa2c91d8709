"""`kineo export RUN --to safetensors`: every stage's weights, whole or not at all, never over anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kineograph import cli
from kineograph.core.atomic_folder import write_atomically
from kineograph.core.errors import InputError
from kineograph.core.run_folder import RunFolder
from kineograph.interop.export_run import export_safetensors
from kineograph.run.listing import list_runs
from kineograph.train import checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Two trained stages, one of them averaged, and one that was never trained."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    stages = {name: {"task": "tests.train.toy_tasks.Toy"} for name in ("first", "second", "third")}
    folder.write_config({"name": "run", "stages": stages})
    online, mean = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, 6.0])}
    for step in (10, 20):
        tensors = {"model": {"w": online["w"] * step}, "ema": {"w": mean["w"] * step}, "optimizer": {"m": online["w"]}}
        checkpoint.save(folder.checkpoints("first"), step, tensors, {"assets": {"words": "a b"}})
    checkpoint.save(folder.checkpoints("second"), 3, {"model": online}, {})
    checkpoint.write_best(folder.checkpoints("first"), 10, 0.5)
    checkpoint.write_best(folder.checkpoints("second"), 3, 0.5)
    return folder


def test_a_step_is_one_of_the_last_stage(run: RunFolder, tmp_path: Path) -> None:
    export_safetensors(run, tmp_path / "out", which="3")
    steps = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text())["step"] for name in ("first", "second")}
    assert steps == {"first": 20, "second": 3}
    with pytest.raises(InputError, match="no checkpoint of step 10"):
        export_safetensors(run, tmp_path / "other", which="10")


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_averaged_weights_of_every_stage(run: RunFolder, tmp_path: Path) -> None:
    notes: list[str] = []
    files = export_safetensors(run, tmp_path / "out", note=notes.append)
    assert {path.name for path in files} == {
        "run.yaml", "first.safetensors", "first.json", "second.safetensors", "second.json"
    }  # fmt: skip
    assert torch.equal(load_file(tmp_path / "out" / "first.safetensors")["w"], torch.tensor([100.0, 120.0]))
    assert torch.equal(load_file(tmp_path / "out" / "second.safetensors")["w"], torch.tensor([1.0, 2.0]))
    told = json.loads((tmp_path / "out" / "first.json").read_text())
    assert told["step"] == 20 and told["weights"] == "ema" and told["assets"] == {"words": "a b"}
    assert json.loads((tmp_path / "out" / "second.json").read_text())["weights"] == "online"
    assert (tmp_path / "out" / "run.yaml").read_text() == run.config_file.read_text()
    assert any("third" in line for line in notes)
    assert [row.name for row in list_runs(tmp_path)] == [run.path.name], "an export is no run"


def test_online_weights_and_other_checkpoints(run: RunFolder, tmp_path: Path) -> None:
    export_safetensors(run, tmp_path / "online", online=True)
    assert torch.equal(load_file(tmp_path / "online" / "first.safetensors")["w"], torch.tensor([20.0, 40.0]))
    export_safetensors(run, tmp_path / "best", which="best")
    assert torch.equal(load_file(tmp_path / "best" / "first.safetensors")["w"], torch.tensor([50.0, 60.0]))


def test_an_occupied_place_is_refused_and_an_empty_folder_is_taken(run: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_safetensors(run, out)
    before = everything(tmp_path)
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        export_safetensors(run, out)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        export_safetensors(run, tmp_path / "file")
    assert everything(tmp_path) == before | {"file"}


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(run: RunFolder, tmp_path: Path) -> None:
    path = checkpoint.checkpoint_at(run.checkpoints("second"), 3).path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    before = everything(tmp_path)
    with pytest.raises(InputError, match="damaged"):
        export_safetensors(run, tmp_path / "deep" / "out")
    assert everything(tmp_path) == before


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    before = everything(tmp_path)
    with pytest.raises(KeyboardInterrupt), write_atomically(tmp_path / "deep" / "er" / "out") as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "RUN", "--to", "onnx", "out"], "--to onnx"),
        (["export", "nowhere", "--to", "safetensors", "out"], "not a run folder"),
        (["export", "RUN", "--to", "safetensors", "--lora", "out"], "--lora"),
        (["export", "RUN", "--to", "safetensors", "--checkpoint", "7", "out"], "no checkpoint of step 7"),
        (["import", "nowhere", "--from", "onnx"], "--from onnx"),
        (["import", "nowhere", "--from", "diffusers"], "not a folder"),
        (["import", "nowhere", "--from", "sat"], "not a folder"),
        (["import", "nowhere.yaml", "--from", "sat-config"], "does not exist"),
        (["import", "a", "b", "--from", "diffusers"], "one folder"),
    ],
)
def test_mistakes_exit_2_with_nothing_written(
    run: RunFolder, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = everything(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main([str(run.path) if word == "RUN" else word for word in words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert everything(tmp_path) == before


def test_the_command_prints_what_it_wrote(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["export", str(run.path), "--to", "safetensors", str(tmp_path / "out")])
    assert end.value.code == 0
    printed = capsys.readouterr().out.split()
    assert printed and all(Path(line).is_file() for line in printed)
