import importlib.machinery
import sys
import types

import numpy as np
import pytest

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.data.open_source import (
    BlankSource,
    DataConfig,
    assign_splits,
    open_source,
    parse_data_config,
    select_split,
)

NAMES = [f"a/{index}.png" for index in range(2000)]


def test_shares_and_disjoint():
    parts = assign_splits(NAMES, 0.1, 0.05)
    assert abs(len(parts["validation"]) - 200) < 50
    assert abs(len(parts["test"]) - 100) < 40
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(2000))


def test_depends_on_identity_alone():
    def held(names):
        return {names[index] for index in assign_splits(names, 0.1, 0.0)["validation"]}

    assert held(NAMES) == held(NAMES[::-1])
    assert held(NAMES[:1000]) == held(NAMES) & set(NAMES[:1000])


def test_growing_shares_never_take_validation_into_training():
    small, large = (set(assign_splits(NAMES, share, 0.0)["validation"].tolist()) for share in (0.05, 0.2))
    assert small < large


@pytest.mark.parametrize("count", [2, 3, 5, 9])
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_small_sets_have_both_sides(count, share):
    for offset in range(20):
        names = [f"{offset}-{index}" for index in range(count)]
        parts = assign_splits(names, share, 0.0)
        assert len(parts["train"]) >= 1
        assert len(parts["validation"]) >= 1
        again = assign_splits(names[::-1], share, 0.0)["validation"]
        assert {names[index] for index in parts["validation"]} == {names[::-1][index] for index in again}


def test_three_items_three_splits():
    for offset in range(20):
        parts = assign_splits([f"{offset}-{index}" for index in range(3)], 0.01, 0.01)
        assert [len(parts[name]) for name in ("train", "validation", "test")] == [1, 1, 1]


def test_validation_zero_is_training_data_and_says_so():
    part = select_split(NAMES, "validation", DataConfig(validation=0))
    assert len(part.indices) == 2000
    assert "training data" in part.note


def test_one_item_validates_on_itself_and_says_so():
    part = select_split(["a"], "validation", DataConfig(validation=0.5))
    assert part.indices.tolist() == [0]
    assert "too few" in part.note
    assert select_split(["a"], "train", DataConfig(validation=0.5)).note is None


def test_no_test_split():
    with pytest.raises(InputError, match=r"data.test"):
        select_split(NAMES, "test", DataConfig())


def test_shares_must_leave_something():
    with pytest.raises(ConfigError, match="leave nothing to train on"):
        parse(DataConfig, {"validation": 0.6, "test": 0.5}, "data")


class OwnConfig(DataConfig):
    word: str = "none"


class OwnSource(BlankSource):
    """A user's own source."""

    Config = OwnConfig

    @classmethod
    def open(cls, config, split, seed):
        source = cls(config.shape)
        source.note = f"{config.word} {split} {seed}"
        return source


def test_a_users_own_source_by_dotted_path(monkeypatch):
    module = types.ModuleType("my_sources")
    module.Own = OwnSource
    module.__spec__ = importlib.machinery.ModuleSpec("my_sources", None)
    monkeypatch.setitem(sys.modules, "my_sources", module)
    config = parse_data_config({"source": "my_sources.Own", "size": 8, "word": "mine"})
    source = open_source(config, "test", 3)
    assert source.note == "mine test 3" and source.fields == {"pixels"} and source.skipped == {}
    assert source.fingerprint() is None and source.list_missing_captions() == []
