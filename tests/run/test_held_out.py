"""Items that are held out are looked at before a run begins, as the training items are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kineograph.core.errors import InputError
from kineograph.data import startup_scan
from kineograph.data.open_source import DataConfig, assign_splits
from kineograph.evaluate.runner import evaluate
from tests.run import clip_tasks
from tests.run.clip_tasks import BASE, train

NAMES = [f"p{number:02}.png" for number in range(20)]


def held_out(split: Any, validation: float = 0.2, test: float = 0.0) -> list[str]:
    return [NAMES[index] for index in assign_splits(NAMES, validation, test)[split]]


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of captioned pictures, and BASE on it."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        Image.fromarray(np.full((16, 16, 3), 10 * number, np.uint8)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text(f"gray {number}")
    data = {"source": "folder", "folder": str(folder), "size": 16, "frames": 5, "validation": 0.2}
    tree = {**BASE, "data": data, "train": {**BASE["train"], "batch_size": 4}}
    monkeypatch.setattr(clip_tasks, "BASE", tree)
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
    return folder


def test_a_missing_caption_of_validation_is_refused_at_the_start(tmp_path: Path, base: Path) -> None:
    name = held_out("validation")[-1]
    (base / name).with_suffix(".txt").unlink()
    count = len(held_out("validation"))
    told = rf"stage generator .*reads captions, and 1 of {count} validation items have none \({name}\)"
    with pytest.raises(InputError, match=told):
        train(tmp_path)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=told):
        train(tmp_path, train__validate_every=0, train__sample_every=3)
    with pytest.raises(InputError, match=told):
        train(tmp_path, train__validate_every=0, train__metrics=["loss"], train__evaluate_every=3)
    run = train(tmp_path, train__validate_every=0)  # nothing reads it
    with pytest.raises(InputError, match=told):
        evaluate(run, ["loss"], device="cpu")


def test_a_missing_caption_of_test_is_refused_where_it_is_shown(tmp_path: Path, base: Path) -> None:
    name = held_out("test", test=0.2)[0]
    (base / name).with_suffix(".txt").unlink()
    keys = {"data__test": 0.2, "train__grids": ["test"]}
    with pytest.raises(InputError, match=rf"test items have none \({name}\)"):
        train(tmp_path, train__sample_every=3, **keys)
    train(tmp_path, train__sample_every=0, **keys)


def test_an_unreadable_item_of_validation_is_replaced_and_listed(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = held_out("validation")[0]
    (base / name).write_bytes(b"broken")
    lines: list[str] = []
    run = train(tmp_path, lines=lines, train__steps=1, train__validate_every=100)  # listed before it is validated
    count = len(held_out("validation"))
    assert (
        sum(f"1 of {count} validation items cannot be read and are replaced by others" in line for line in lines) == 1
    )
    assert [json.loads(line)["path"] for line in (run / "skipped.jsonl").read_text().splitlines()] == [name]
    monkeypatch.setattr(startup_scan, "_decode_items", lambda *_: pytest.fail("decoded again"))
    train(tmp_path, train__validate_every=3)
    assert any(json.loads(line).get("split") == "validation" for line in (run / "metrics.jsonl").open())


@pytest.mark.parametrize("buckets", [None, {"sizes": [[16, 16]], "frames": [5]}])
def test_a_validation_split_without_anything_readable_is_refused_at_the_start(
    tmp_path: Path, base: Path, buckets: Any
) -> None:
    (name,) = held_out("validation", validation=1e-6)
    (base / name).write_bytes(b"")
    keys = {"data__validation": 1e-6, "data__buckets": buckets}
    told = rf"no validation item that can be read, {name}: .*0 bytes.*Repair or remove .*raise data\.validation=1e-06"
    with pytest.raises(InputError, match=told):
        train(tmp_path, **keys)
    assert not (tmp_path / "run").exists()
    train(tmp_path, train__validate_every=0, **keys)


def test_unreadable_items_of_both_splits_count_together(tmp_path: Path, base: Path) -> None:
    broken = held_out("validation")[:2]
    for name in broken:
        (base / name).write_bytes(b"broken")
    with pytest.raises(InputError, match=r"2 of 20 items cannot be read \(10%; data\.max_unreadable=0\.05"):
        train(tmp_path, data__max_unreadable=0.05)
    assert len(broken) / len(held_out("validation")) > DataConfig.model_fields["max_unreadable"].default
    train(tmp_path)  # many of the split, and few of all


def test_validation_on_training_data_is_scanned_once(tmp_path: Path, base: Path) -> None:
    (base / NAMES[0]).write_bytes(b"broken")
    lines: list[str] = []
    train(tmp_path, lines=lines, data__validation=0)
    assert sum("cannot be read" in line for line in lines) == 1
