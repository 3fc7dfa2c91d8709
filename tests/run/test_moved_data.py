"""Data paths are kept absolute, and data that moved are recognised by their items."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from kineograph.core.errors import NoData
from kineograph.stage.data_record import explain_moved_data
from tests.run.calling import kineo, written

CONFIG: dict[str, Any] = {
    "data": {"source": "folder", "folder": "pictures", "size": 16, "validation": 0.25},
    "train": {
        "steps": 2, "batch_size": 2, "save_every": 2, "validate_every": 2, "validation_samples": 2, "sample_every": 0,
        "workers": 0, "trackers": [], "device": "cpu",
    },
    "stages": {
        "codec": {"task": "vqgan", "width": 8, "multipliers": [1], "patch": 2, "quantizer": {"kind": "fsq", "levels": [5, 5]}, "perceptual": {"weight": 0}},
    },
}  # fmt: skip


def write_pictures(folder: Path, seed: int, count: int = 12) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for index in range(count):
        size = 16 + seed + index  # other pictures have other sizes in bytes
        Image.fromarray(rng.integers(0, 255, (size, size, 3), np.uint8)).save(folder / f"{index:03}.png")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of pictures that were named by a relative path."""
    write_pictures(tmp_path / "here" / "pictures", 0)
    monkeypatch.chdir(tmp_path / "here")
    assert kineo("train", written(tmp_path, CONFIG), "--run", tmp_path / "run") == 0
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def read_psnr(run: Path) -> float:
    results = json.loads((run / "evaluation.json").read_text())["results"]["validation"]
    return next(iter(results.values()))["reconstruction"]["values"]["psnr"]


def test_relative_paths_are_kept_absolute(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["stages"]["codec"]["data"]["folder"] == str(tmp_path / "here" / "pictures")
    assert kineo("evaluate", run, "--metrics", "reconstruction", "--samples", 2) == 0
    there = read_psnr(run)
    write_pictures(tmp_path / "there" / "pictures", 1)  # a relative path would mean these
    monkeypatch.chdir(tmp_path / "there")
    assert kineo("evaluate", run, "--metrics", "reconstruction", "--samples", 2) == 0
    assert read_psnr(run) == there
    assert kineo("train", "--run", run, "train.steps=3") == 0


def test_moved_data(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here" / "pictures").rename(tmp_path / "new")
    assert kineo("evaluate", run, "--metrics", "reconstruction", "--samples", 2) == 2
    assert f"if the data were moved, say where: kineo evaluate {run} data.folder=NEW" in capsys.readouterr().err
    assert kineo("train", "--run", run, "train.steps=3") == 2
    assert f"if the data were moved, say where: kineo train --run {run} data.folder=NEW" in capsys.readouterr().err
    assert kineo("evaluate", run, "data.folder=new", "--metrics", "reconstruction", "--samples", 2) == 0
    assert kineo("train", "--run", run, "train.steps=3", "data.folder=new") == 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["stages"]["codec"]["data"]["folder"] == str(tmp_path / "new")
    assert json.loads((run / "data.json").read_text())["codec"]["location"] == {"folder": str(tmp_path / "new")}


def test_a_new_run_gets_no_advice_on_moved_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kineo("train", written(tmp_path, CONFIG), f"data.folder={tmp_path / 'gone'}", "--run", tmp_path / "run") == 2
    assert capsys.readouterr().err.endswith("gone does not exist\n")


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("data.validation_folder=/x does not exist", "data.validation_folder"),
        ("data.mix.dog: data.folder=/x does not exist", "data.mix.dog.folder"),
        ("1 of the 1 shards of data.shards cannot be read (data.max_unreadable=0.2), for example x", "data.shards"),
        ("/x.npy does not exist", "data.folder"),
    ],
)
def test_the_key_of_moved_data_is_named(message: str, key: str) -> None:
    assert str(explain_moved_data(NoData(message), "kineo evaluate RUN")).endswith(
        f"say where: kineo evaluate RUN {key}=NEW"
    )


def test_other_items_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path / "other", 1)
    before = (run / "config.yaml").read_text()
    for words in (
        ("evaluate", run, "data.folder=other"),
        ("train", "--run", run, "train.steps=3", "data.folder=other"),
    ):
        assert kineo(*words) == 2
        error = capsys.readouterr().err
        assert "other holds other items than stage codec was trained on" in error and "pictures" in error
    assert (run / "config.yaml").read_text() == before


def test_items_that_changed_in_their_place_are_noted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(tmp_path / "here" / "pictures" / "000.png", tmp_path / "here" / "pictures" / "new.png")
    assert kineo("train", "--run", run, "train.steps=3") == 0
    assert "codec: the data have changed since training" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.size=32", "only where the data lie can change here: data.folder, data.validation_folder, data.shards"),
        ("data.shards=x", "data.source=folder has no shards"),
        ("train.lr=1", "only where the data lie can change here"),
    ],
)
def test_evaluate_changes_nothing_else(
    run: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    assert kineo("evaluate", run, setting) == 2
    assert message in capsys.readouterr().err
