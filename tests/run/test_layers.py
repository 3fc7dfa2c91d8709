"""Presets, files and overrides become one tree: later layers win, and within one the specific wins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kineograph.core.errors import ConfigError
from kineograph.run import layers
from kineograph.run.layers import changed_keys, lay_over, read_config
from kineograph.run.plan import make_plan

TOY, DUEL = "tests.train.toy_tasks.Toy", "tests.train.toy_tasks.Duel"
PRESET = {
    "data": {"source": "moving_digits", "size": 16, "digits": 1, "glyphs": 3},
    "train": {"lr": 1e-3, "steps": 100, "ema": {"decay": 0.9, "every": 2}},
    "stages": {
        "first": {"task": DUEL, "train": {"lr": 2e-3}, "players": {"critic": {"lr": 5e-3, "ema": {"decay": 0.5}}}},
        "second": {"task": TOY, "codec": "first", "data": {"frames": 2, "coloured": False}},
    },
}


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "small.yaml").write_text(yaml.safe_dump(PRESET))
    (folder / "small-more.yaml").write_text(yaml.safe_dump({"preset": "small", "train": {"steps": 200}}))
    monkeypatch.setattr(layers, "PRESETS", folder)
    monkeypatch.chdir(tmp_path)
    return folder


def file(name: str, /, **tree) -> str:
    Path(name).write_text(yaml.safe_dump(tree))
    return name


def planned(*arguments: str, extra: dict | None = None) -> dict:
    return make_plan(read_config(arguments, extra)).tree()


def lrs(tree: dict) -> dict[str, float]:
    found = {name: stage["train"]["lr"] for name, stage in tree["stages"].items()}
    return found | {"critic": tree["stages"]["first"]["players"]["critic"]["lr"]}


# The order of layers ---------------------------------------------------------------------------------------------


def test_within_a_layer_the_specific_wins() -> None:
    assert lrs(planned("small")) == {"first": 2e-3, "second": 1e-3, "critic": 5e-3}


@pytest.mark.parametrize("source", ["folder", "webdataset", "mix"])
def test_gray_digits_say_nothing_about_files(source: str) -> None:
    tree = lay_over({"data": {"source": "moving_digits", "channels": 1}}, {"data": {"source": source}})
    assert "channels" not in tree["data"]


def test_a_number_of_steps_replaces_the_epochs_of_an_earlier_layer() -> None:
    longer = file("longer.yaml", preset="small", train={"epochs": 3}, stages={"first": {"train": {"epochs": 5}}})
    trained = planned(longer, "train.steps=7")["stages"]
    assert [(stage["train"]["steps"], stage["train"]["epochs"]) for stage in trained.values()] == [(7, None)] * 2
    assert planned(longer)["stages"]["first"]["train"]["epochs"] == 5


def test_a_general_value_of_the_command_line_reaches_everyone() -> None:
    assert lrs(planned("small", "train.lr=7e-3")) == {"first": 7e-3, "second": 7e-3, "critic": 7e-3}


def test_the_general_of_a_later_file_beats_the_specific_of_an_earlier_one() -> None:
    later = file("later.yaml", train={"lr": 7e-3})
    assert lrs(planned("small", later)) == {"first": 7e-3, "second": 7e-3, "critic": 7e-3}
    both = file("both.yaml", train={"lr": 7e-3}, stages={"second": {"train": {"lr": 8e-3}}})
    assert lrs(planned("small", both)) == {"first": 7e-3, "second": 8e-3, "critic": 7e-3}


def test_a_stage_value_of_a_later_layer_reaches_its_players() -> None:
    assert lrs(planned("small", "stages.first.train.lr=7e-3")) == {"first": 7e-3, "second": 1e-3, "critic": 7e-3}


def test_the_command_line_goes_left_to_right() -> None:
    assert lrs(planned("small", "stages.second.train.lr=1", "train.lr=2"))["second"] == 2
    assert lrs(planned("small", "train.lr=2", "stages.second.train.lr=1")) == {"first": 2, "second": 1, "critic": 2}
    assert planned("small", "train.steps=1", "train.steps=2")["stages"]["first"]["train"]["steps"] == 2


def test_only_the_leaf_is_replaced() -> None:
    tree = planned("small", "train.ema.every=5")
    assert tree["stages"]["first"]["train"]["ema"] == {"decay": 0.9, "every": 5, "start": 0}
    assert tree["stages"]["first"]["players"]["critic"]["ema"] == {"decay": 0.5, "every": 5, "start": 0}


def test_a_file_extends_a_preset() -> None:
    mine = file("mine.yaml", preset="small", seed=9, train={"lr": 7e-3})
    tree = planned(mine)
    assert lrs(tree) == {"first": 7e-3, "second": 7e-3, "critic": 7e-3}
    assert (tree["name"], tree["preset"], tree["seed"]) == ("mine", "small", 9)
    assert lrs(planned(mine, "train.lr=1")) == {"first": 1, "second": 1, "critic": 1}  # and the command line beats both


def test_a_preset_extends_a_preset() -> None:
    tree = planned("small-more")
    assert (tree["name"], tree["stages"]["first"]["train"]["steps"], lrs(tree)["critic"]) == ("small-more", 200, 5e-3)


def test_python_keys_come_last() -> None:
    assert lrs(planned("small", "train.lr=1", extra={"train.lr": 2, "seed": 4})) == {
        "first": 2,
        "second": 2,
        "critic": 2,
    }


def test_a_list_replaces_a_list_and_null_unsets() -> None:
    tree = planned("small", "train.betas=[0.5, 0.6]", "train.clip=null", "prompts=[a 3, a 4]")
    assert tree["stages"]["second"]["train"]["betas"] == [0.5, 0.6]
    assert tree["stages"]["second"]["train"]["clip"] is None
    assert tree["prompts"] == ["a 3", "a 4"]


def test_reading_changes_no_layer() -> None:
    base = read_config(["small"])
    before = yaml.safe_dump(base)
    lay_over(base, {"train": {"lr": 1}, "data": {"source": "folder"}, "stages": {"first": {"train": {"lr": 3}}}})
    assert yaml.safe_dump(base) == before


# Changing the source ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_a_new_source_drops_the_old_ones_own_keys(order: int) -> None:
    tree = read_config(["small", *["data.source=folder", "data.folder=photos", "data.size=24"][::order]])
    assert tree["data"] == {"source": "folder", "folder": "photos", "size": 24}
    assert tree["stages"]["second"]["data"] == {"frames": 2}
    stages = planned("small", "data.source=folder", "data.folder=photos")["stages"]
    assert {stage["data"]["folder"] for stage in stages.values()} == {str(Path("photos").absolute())}
    assert stages["second"]["data"]["frames"] == 2


def test_the_same_source_again_drops_nothing() -> None:
    for name in ("moving_digits", "moving-digits"):
        tree = planned("small", f"data.source={name}")
        assert tree["stages"]["first"]["data"]["glyphs"] == 3
        assert tree["stages"]["second"]["data"]["coloured"] is False
    mine = file(
        "mine.yaml",
        preset="small",
        data={"source": "folder", "folder": "x"},
        stages={"second": {"data": {"flip": 0.5}}},
    )
    assert planned(mine, "data.source=folder")["stages"]["second"]["data"]["flip"] == 0.5
    assert "flip" not in planned(mine, "data.source=moving_digits")["stages"]["second"]["data"]


def test_one_stage_may_have_another_source() -> None:
    tree = planned("small", "stages.second.data.source=folder", "stages.second.data.folder=x")
    assert tree["stages"]["first"]["data"]["glyphs"] == 3
    assert tree["stages"]["second"]["data"]["source"] == "folder"


def test_a_resolved_config_takes_a_new_source() -> None:
    saved = file("saved.yaml", **planned("small"))
    tree = planned(saved, "data.source=folder", "data.folder=/x")
    assert {stage["data"]["folder"] for stage in tree["stages"].values()} == {"/x"}


def test_a_resolved_config_takes_a_key_of_its_own_source(shelf: Path) -> None:
    """The same command again: the preset that named the source is not read then, the saved stages name it themselves."""
    (shelf / "photos.yaml").write_text(
        yaml.safe_dump({"data": {"source": "folder"}, "stages": {"first": {"task": DUEL}, "second": {"task": TOY}}})
    )
    typed = ["data.folder=x", "data.flip=0.5", "data.size=24"]
    first = planned("photos", *typed)
    saved = file("saved.yaml", **first)
    assert planned(saved, *typed)["stages"] == first["stages"]
    tree = planned(saved, "data.folder=/y", "stages.second.data.folder=/z")
    assert [stage["data"]["folder"] for stage in tree["stages"].values()] == ["/y", "/z"]


# Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smal"], "did you mean small?"),
        (["nothing-like-it"], "the presets are small, small-more"),
        (["gone.yaml"], "gone.yaml does not exist"),
        (["small", "train.stepps=3"], "unknown key train.stepps: did you mean train.steps?"),
        (["small", "trian.steps=3"], "unknown key trian: did you mean train?"),
        (["small", "data.size=-16"], "data.size=-16: height and width must be at least 1 pixel"),
        (["small", "data.siez=3"], "did you mean data.size?"),
        (["small", "stages.second.data.glyps=3"], "did you mean stages.second.data.glyphs?"),
        (["small", "stages.first.train.lrr=3"], "did you mean stages.first.train.lr?"),
        (["small", "stages.first.players.critic.lrr=3"], "did you mean stages.first.players.critic.lr?"),
        (
            ["small", "stages.first.players.judge.lr=3"],
            "the players of tests.train.toy_tasks.Duel are generator, critic",
        ),
        (["small", "stages.first.widht=3"], "did you mean stages.first.width?"),
        (["small", "train.ema.decai=0"], "train.ema.decai: did you mean train.ema.decay?"),
        (["small", "train.lr=fast"], "train.lr='fast': input should be a valid number"),
        (["small", "train.steps=1e3.5"], "train.steps='1e3.5'"),
        (["small", "stages.third.width=3"], "stages.third.task is required"),
        (["small", "stages.frist.width=3"], "stages.frist.task is required and not set: did you mean stages.first?"),
        (["small", "steps=100"], "unknown key steps: did you mean train.steps (or stages.STAGE.train.steps, for one"),
        (["small", "first.width=3"], "unknown key first: did you mean stages.first.width?"),
        (["small", "width=3"], "unknown key width: did you mean stages.first.width or stages.second.width?"),
        (["small", "stages.first.lr=3"], "unknown key stages.first.lr: did you mean stages.first.train.lr?"),
        (["small", "size=3"], "unknown key size: did you mean data.size?"),
        (["small", "data.folder=x"], "data.source=moving_digits has no folder; set data.folder and data.source=folder"),
        (["small", "stages.third.train.nothing=3"], "stages.third.task is required"),
        (["small", "nothing_like_it=3"], "unknown key nothing_like_it: known here: data, evaluate, name"),
        (["runs/gone"], "runs/gone is neither a file nor a run folder"),
        (["presets"], "for pictures or clips, give data.source=folder data.folder=presets"),
        (["small", "stages.first.task=nowhere.flow"], "Python finds no module nowhere: install it, or add the folder"),
        (["small", "stages.first.task=tests.flow"], "stages.first.task=tests.flow is not known"),
        (["small", "stages.first.task=tests.train.toy_tasks.Toi"], "the module tests.train.toy_tasks has no Toi"),
        (["small", "stages.first.task=json"], "the module json sets no TASK"),
        (["small", "stages.first.task=vqgam"], "vqgam"),
        (["small", "train=3"], "train is a section"),
        (["small", "stages=3"], "stages is a section"),
        (["small", "stages.first=3"], "stages.first is a section"),
        (["small", "stages.first.train=3"], "stages.first.train is a section"),
        (["small", "stages.first.players=[critic]"], "stages.first.players is a section"),
        (["small", "stages.first.players.critic=3"], "stages.first.players.critic is a section"),
        (["small", "data=folder"], "data is a section"),
        (["small", "data.source=floder"], "floder"),
        (["small", "seed=-1"], "seed=-1"),
        (["small", "name=a/b"], "name='a/b'"),
    ],
)
def test_mistakes_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(*arguments)
    assert message in str(error.value)
    assert error.value.exit_code == 2


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_flow.py").write_text("x = 1\nimport a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        planned("small", "stages.first.task=my_flow.Flow")
    for part in ("stages.first.task=my_flow.Flow", "a_package_that_is_not_there", "my_flow.py, line 2", "install"):
        assert part in str(error.value)


def test_a_run_folder_is_not_a_preset(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(ConfigError, match=r"is a run folder: .* continue it: kineo train --run"):
        planned(str(tmp_path))


@pytest.mark.parametrize(
    "tree",
    [{"stages": [1]}, {"stages": {"first": 3}}, {"data": 3}, {"train": "fast"}, {"stages": {"first": {"data": [1]}}}],
)
def test_a_file_with_a_value_for_a_section(tree: dict) -> None:
    for arguments in (
        [file("odd.yaml", **tree)],
        [file("odd.yaml", preset="small", **tree)],
        ["small", file("odd.yaml", **tree), "train.lr=1"],
    ):
        with pytest.raises(ConfigError, match="is a section"):
            planned(*arguments)


def test_a_preset_that_extends_itself(shelf: Path) -> None:
    (shelf / "a.yaml").write_text("preset: b")
    (shelf / "b.yaml").write_text("preset: a")
    with pytest.raises(ConfigError, match="extends itself"):
        read_config(["a"])


def test_changed_keys() -> None:
    assert changed_keys({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c", "d"]
