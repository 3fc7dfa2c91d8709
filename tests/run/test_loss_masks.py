"""data.masks in runs: stages that cannot use masks refuse them, and no cache hides them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from kineograph.core.errors import ConfigError
from kineograph.data.open_source import open_source
from kineograph.run.cache import check_cachable
from kineograph.run.layers import read_config
from kineograph.run.plan import make_plan
from tests.run.calling import kineo


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(tmp_path / f"{number}.png")
        Image.new("L", (32, 32), 255).save(tmp_path / f"{number}-mask.png")
        (tmp_path / f"{number}.txt").write_text(f"shade {number}")
    return ["data.source=folder", f"data.folder={tmp_path}", "data.masks=true"]


def test_a_stage_that_predicts_tokens_refuses_masks(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert kineo("train", "muse-tiny", *data, "--run", run) == 2
    assert "stage generator (muse) cannot use data.masks=true" in (error := capsys.readouterr().err)
    assert "set stages.generator.data.masks=false" in error and not run.exists()


def test_masks_are_not_cached(data: list[str]) -> None:
    stage = make_plan(read_config(["cogvideox-tiny", *data, "data.frames=5", "stages.generator.cache=true"])).stages[-1]
    with pytest.raises(
        ConfigError, match=r"cache=true: a cache holds no loss masks \(data.masks=true\); or set it to false"
    ):
        check_cachable(stage, open_source(stage.spec.data, "train", 0))
