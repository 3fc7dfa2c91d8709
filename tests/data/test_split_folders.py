"""Folders named train, validation and test are the splits; data.validation_folder holds the validation items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kineograph.core.errors import InputError, NoData
from kineograph.data.check import check_folder
from kineograph.data.folder import Folder
from kineograph.data.split_folders import group_by_split_folder
from kineograph.run.plan import make_plan
from kineograph.stage.spec import read_stage


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / name)
        (root / name).with_suffix(".txt").write_text(f"caption of {name}")
    return root


def numbered(folder: str, count: int) -> list[str]:
    return [f"{folder}/{index:02}.png" for index in range(count)]


def names(root: Path, split: Any, **options: Any) -> list[str]:
    source = Folder.open(Folder.Config(folder=str(root), size=8, **options), split, 0)
    return [source.identity(index) for index in range(len(source))]


@pytest.mark.parametrize(("validation", "top"), [("validation", ""), ("Val", ""), ("dev", "images/")])
def test_named_folders_are_the_splits(tmp_path: Path, validation: str, top: str) -> None:
    train, held_out, test = (numbered(f"{top}{name}", 6) for name in ("train", validation, "test"))
    write(tmp_path, *train, *held_out, *test)
    assert names(tmp_path, "train") == train
    assert names(tmp_path, "validation") == held_out
    assert names(tmp_path, "test") == test  # although data.test is 0
    source = Folder.open(Folder.Config(folder=str(tmp_path), size=8), "train", 0)
    assert "(files: train 6, validation 6, test 6)" in (source.note or "")
    assert "data.split_folders=false" in (source.note or "")
    assert any("train 6, validation 6, test 6" in line for line in check_folder(tmp_path).lines())


def test_a_split_without_a_folder_is_held_out_of_training(tmp_path: Path) -> None:
    write(tmp_path, *numbered("train", 20), *numbered("test", 5), "extra/00.png")
    train, held_out = names(tmp_path, "train", validation=0.2), names(tmp_path, "validation", validation=0.2)
    assert sorted([*train, *held_out]) == sorted([*numbered("train", 20), "extra/00.png"])
    assert held_out and names(tmp_path, "test", validation=0.2) == numbered("test", 5)
    write(tmp_path / "other", *numbered("train", 20), *numbered("val", 5))
    with pytest.raises(InputError, match="no test split"):
        names(tmp_path / "other", "test")
    assert 0 < len(names(tmp_path / "other", "test", test=0.2)) < 20
    assert names(tmp_path / "other", "validation", validation=0) == numbered("val", 5)


def test_the_user_may_split_by_share(tmp_path: Path) -> None:
    write(tmp_path, *numbered("train", 20), *numbered("test", 20))
    assert any(name.startswith("test/") for name in names(tmp_path, "train", split_folders=False))


def test_one_such_name_alone_is_a_folder_like_any_other() -> None:
    assert group_by_split_folder(["bus/a.png", "car/a.png", "train/a.png"]) == {}
    assert group_by_split_folder(["a/train/a.png", "a/test/a.png"]) == {}


def test_runs_from_before_split_by_share(tmp_path: Path) -> None:
    data = {"source": "folder", "folder": str(tmp_path), "size": 32}
    stages = {"tokenizer": {"task": "vqgan"}}
    tree = make_plan({"name": "x", "data": data, "stages": stages}).tree()
    assert tree["stages"]["tokenizer"]["data"]["split_folders"] is True
    assert read_stage(tree, "tokenizer").data.model_dump()["split_folders"] is True
    del tree["stages"]["tokenizer"]["data"]["split_folders"]
    assert read_stage(tree, "tokenizer").data.model_dump()["split_folders"] is False


def test_a_validation_folder_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "photos", *numbered("a", 6))
    write(tmp_path / "held-out", *numbered("a", 6))
    options = {"validation_folder": str(tmp_path / "held-out")}
    assert names(tmp_path / "photos", "train", **options) == numbered("a", 6)
    config = Folder.Config(folder=str(tmp_path / "photos"), size=8, **options)
    validation, train = Folder.open(config, "validation", 0), Folder.open(config, "train", 0)
    assert [validation.identity(index) for index in range(6)] == numbered("held-out/a", 6)
    assert validation.caption(0) == "caption of a/00.png"
    assert not set(validation.item_states()) & set(train.item_states())
    assert "data.validation_folder=" in (train.note or "")
    # Moved: the same items under another name.
    digest = validation.items_digest()
    (tmp_path / "held-out").rename(tmp_path / "moved")
    moved = config.model_copy(update={"validation_folder": str(tmp_path / "moved")})
    assert Folder.open(moved, "validation", 0).items_digest() == digest


def test_a_validation_folder_inside_the_folder_is_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path, *numbered("a", 4), *numbered("b", 4))
    assert names(tmp_path, "train", validation_folder=str(tmp_path / "b")) == numbered("a", 4)
    assert names(tmp_path, "validation", validation_folder=str(tmp_path / "b")) == numbered("b", 4)
    with pytest.raises(InputError, match=r"contains data\.folder"):
        names(tmp_path / "a", "train", validation_folder=str(tmp_path))
    with pytest.raises(NoData, match=r"data.validation_folder=.*gone does not exist"):
        names(tmp_path, "validation", validation_folder=str(tmp_path / "gone"))
