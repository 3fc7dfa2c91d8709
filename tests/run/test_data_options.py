"""Keys of data.* and train.* that change what a run sees and for how long: epochs, order, captions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from kineograph.core.config import merge, nest
from kineograph.core.errors import ConfigError
from kineograph.data.loader import Loader
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.run.listing import list_runs
from kineograph.run.open_data import open_data, resolve_epochs
from kineograph.run.plan import make_plan
from kineograph.stage.spec import Plan
from tests.run import clip_tasks
from tests.run.clip_tasks import BASE, SEEN, train


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, Any]:
    """Data of nine pictures, with one to three captions each."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(9):
        Image.fromarray(np.full((16, 16, 3), 25 * number, np.uint8)).save(folder / f"p{number}.png")
    rows = [
        {"file_name": f"p{n}.png", "text": [f"gray {n}, flat", f"shade {n}", "dull"][: 1 + n % 3]} for n in range(9)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"source": "folder", "folder": str(folder), "size": 16, "frames": 5, "validation": 0.2}


def resolve(**changes: Any) -> tuple[Plan, list[str]]:
    tree = BASE
    for path, value in changes.items():
        tree = merge(tree, nest(path.replace("__", "."), value))
    plan, lines = make_plan(tree), []
    data = {stage.name: open_data(stage, plan.seed, note=lines.append) for stage in plan.stages}
    plan = resolve_epochs(plan, data, lines.append)
    assert all(data[stage.name].stage is stage for stage in plan.stages)
    return plan, lines


@pytest.mark.parametrize(("epochs", "steps"), [(2, 6), (2.5, 8), (0.01, 1)])
def test_epochs_are_a_length(epochs: float, steps: int) -> None:
    plan, lines = resolve(train__epochs=epochs)
    assert [stage.train.steps for stage in plan.stages] == [steps, steps]
    assert f"generator: {epochs:g} epochs of 48 samples are {steps} steps" in lines


def test_small_data_are_validated_by_epochs() -> None:
    """48 items in batches of 16: 20 epochs are 60 steps."""

    def cadence(**changes: Any) -> tuple[int, list[str]]:
        changes = {"train__steps": 1000, "train__validate_every": 500, "train__validate_epochs": 20} | changes
        plan, lines = resolve(**changes)
        return plan.stages[-1].train.validate_every, [line for line in lines if "validation every" in line]

    every, lines = cadence()
    assert every == 60
    expected = "generator: a small data set: validation every 60 steps (20 epochs of 48 samples)"
    assert any(line.startswith(expected) and line.endswith("train.validate_epochs=null: every 500") for line in lines)
    assert cadence(train__validate_epochs=1)[0] == 50  # no more often
    unchanged = {
        "no": {"train__validate_epochs": None},
        "sooner": {"train__validate_every": 40},
        "never": {"train__validate_every": 0},
        "by samples": {"train__epoch_samples": 100},
        "without end": {"data__count": None},
        "large": {"train__validate_epochs": 1000},
        "the training items": {"data__validation": 0},
        "too short": {"train__steps": 60},
    }
    for case, changes in unchanged.items():
        wanted = changes.get("train__validate_every", 500)
        assert cadence(**changes) == (wanted, []), case


def test_epochs_of_data_without_end_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train.epochs=2 needs data of known length.*set train.steps, or set data.count"
    ):
        resolve(train__epochs=2, data__count=None)


def test_a_run_keeps_the_steps_of_its_epochs(tmp_path: Path) -> None:
    run = train(tmp_path, train__epochs=1, data__count=32)
    saved = yaml.safe_load((run / "config.yaml").read_text())["stages"]["generator"]["train"]
    assert (saved["steps"], saved["epochs"]) == (2, None)
    (row,) = list_runs(run)
    assert (row.state, row.step, row.steps) == ("finished", 2, 2)
    train(tmp_path, train__epochs=1, data__count=32)  # the same command: nothing to do
    assert not SEEN


def captions_of(tmp_path: Path, name: str, data: dict[str, Any], **changes: Any) -> list[list[str] | None]:
    """The captions of the generator's training batches."""
    clip_tasks_base = {**BASE, "data": data}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip_tasks, "BASE", clip_tasks_base)
        train(tmp_path, name, train__batch_size=4, **changes)
    return [captions for _, _, captions in SEEN]


def test_captions_do_not_depend_on_a_cache(tmp_path: Path, pictures: dict[str, Any]) -> None:
    data = {**pictures, "caption": "{text} sks", "shuffle_tags": True}
    straight = captions_of(tmp_path, "straight", data, train__steps=4)
    assert len({text for batch in straight for text in batch or ()}) > 5
    assert all(text.endswith(" sks") for batch in straight for text in batch or ())
    assert captions_of(tmp_path, "cached", data, train__steps=4, stages__generator__cache=True) == straight


def test_data_in_order(pictures: dict[str, Any]) -> None:
    source = open_source(parse_data_config({**pictures, "shuffle": False, "validation": 0}), "train", 0)
    batches = [batch for (batch,) in Loader(source, seed=0, batch_size=4).steps(1, 3)]
    brightness = [int(clip[0, 0, 0, 0]) // 25 for batch in batches for clip in batch.pixels]  # type: ignore[union-attr]
    assert brightness == [4, 5, 6, 7, 8, 0, 1, 2]
