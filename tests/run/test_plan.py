"""The checked plan of a run: types, players, references, what is saved, and what a resumed run may change."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kineograph.core.config import nest
from kineograph.core.config_file import dump_yaml, read_yaml
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.run_folder import RunFolder
from kineograph.run.layers import lay_over, read_config
from kineograph.run.plan import make_plan, refuse_changes, resolve_run

TREE = {
    "name": "toy",
    "data": {"size": 16},
    "train": {"lr": 1e-3},
    "stages": {
        "first": {"task": "tests.train.toy_tasks.Duel", "players": {"critic": {"lr": 5e-3}}},
        "second": {"task": "tests.train.toy_tasks.Toy", "codec": "first", "train": {"steps": 7}, "data": {"frames": 3}},
    },
}


def plan_with(path: str, value: object):
    return make_plan(lay_over(deepcopy(TREE), nest(path, value)))


def test_every_stage_is_typed() -> None:
    first, second = make_plan(TREE).stages
    assert (first.name, first.train.steps, second.train.steps) == ("first", 1000, 7)
    assert first.players.keys() == {"generator", "critic"}
    assert (first.players["generator"].lr, first.players["critic"].lr) == (1e-3, 5e-3)
    assert (first.spec.data.shape.frames, second.spec.data.shape.frames, second.spec.data.shape.height) == (1, 3, 16)
    assert second.spec.config.codec == "first"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("task", "clip"), [("vqgan", 0.1), ("cvivit", 0.5), ("causal_vae", 1.0)])
def test_a_codec_of_your_own_has_the_optimizer_of_the_measured_presets(task: str, clip: float) -> None:
    def players(train: dict[str, Any], own: dict[str, Any], **section: Any) -> list[tuple[Any, float | None]]:
        stage = {"task": task, "train": own, **section}
        plan = make_plan({"data": {"source": "moving_digits"}, "train": train, "stages": {"codec": stage}})
        assert make_plan(plan.tree()).tree() == plan.tree()
        return [(player.betas, player.clip) for player in plan.stage("codec").players.values()]

    other = ((0.9, 0.99), 1.0)
    assert players({}, {}) == [((0.9, 0.95), clip), other]
    assert players({"betas": [0.9, 0.999]}, {"clip": None}) == [((0.9, 0.999), None)] * 2
    own = {"generator": {"clip": 2.0}, "discriminator": {"betas": [0.5, 0.9]}}
    assert players({}, {}, players=own) == [((0.9, 0.95), 2.0), ((0.5, 0.9), 1.0)]


def test_the_saved_tree_is_enough_and_survives_yaml() -> None:
    tree = make_plan(TREE).tree()
    back = read_yaml(dump_yaml(tree), "")
    assert make_plan(back).tree() == tree
    refuse_changes(back, tree)


def test_the_saved_tree_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that changes later does not reach a run that was saved before."""
    from kineograph.train.config import TrainConfig

    saved = make_plan(TREE).tree()
    assert saved["stages"]["second"]["train"].keys() == TrainConfig.model_fields.keys()
    assert saved["stages"]["first"]["players"]["generator"]["betas"] == [0.9, 0.99]
    assert "train" not in saved
    assert "data" not in saved


def test_a_resolved_file_is_not_laid_onto_its_preset(tmp_path: Path) -> None:
    tree = make_plan(TREE).tree() | {"preset": "a preset that is gone"}
    RunFolder(tmp_path).write_config(tree)
    assert make_plan(read_config([str(tmp_path / "config.yaml")])).tree() == tree


def test_references_name_earlier_stages() -> None:
    with pytest.raises(
        ConfigError, match=r"stages.second.codec=third: no earlier stage has that name; the earlier stages are first"
    ):
        plan_with("stages.second.codec", "third")
    with pytest.raises(ConfigError, match=r"stages.second.codec=second"):
        plan_with("stages.second.codec", "second")
    plan_with("stages.second.codec", "runs/other/tokenizer")  # another run's


def test_an_empty_config_points_to_the_presets() -> None:
    with pytest.raises(ConfigError, match="kineo presets"):
        make_plan({})


def test_stage_names_are_folder_names() -> None:
    with pytest.raises(ConfigError, match="letters, digits and _"):
        make_plan({"stages": {"a-b": {"task": "tests.train.toy_tasks.Toy"}}})


def test_prompts_are_a_list_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a red 3\n\n  a blue 5 \n")
    assert plan_with("prompts", str(path)).tree()["prompts"] == ["a red 3", "a blue 5"]
    assert plan_with("prompts", ["one"]).tree()["prompts"] == ["one"]
    assert make_plan(TREE).prompts == "auto"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        plan_with("prompts", str(path))
    with pytest.raises(ConfigError, match="no such file"):
        plan_with("prompts", str(tmp_path / "gone.txt"))
    with pytest.raises(ConfigError, match="no such file"):
        plan_with("prompts", str(tmp_path))
    path.write_bytes("\ufeffein Käfer\r\nzwei\r\n".encode())
    assert plan_with("prompts", str(path)).tree()["prompts"] == [
        "ein Käfer",
        "zwei",
    ]  # without the mark that Windows puts first
    path.write_bytes("a 3\u2028moves\r\na 5\r\n".encode())
    assert plan_with("prompts", str(path)).tree()["prompts"] == ["a 3\u2028moves", "a 5"]  # a line ends at \n alone
    path.write_bytes("ein Käfer".encode("latin-1"))
    with pytest.raises(InputError, match=r"prompts=.*is not UTF-8 text.*save it as UTF-8"):
        plan_with("prompts", str(path))
    with pytest.raises(ConfigError, match="prompts is an empty list"):
        plan_with("prompts", [])


# Resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.steps", 5000), ("train.keep_last", 9), ("train.workers", 0), ("train.save_every", 3), ("train.log_every", 3),
        ("train.sample_every", 0), ("train.validate_every", 3), ("stages.second.train.steps", 5000), ("prompts", ["a 3"]),
    ],
)  # fmt: skip
def test_lengths_and_cadences_may_change(path: str, value: object) -> None:
    changed = plan_with(path, value).tree()
    assert changed != make_plan(TREE).tree()
    refuse_changes(make_plan(TREE).tree(), changed)


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("seed", 5, "seed"), ("train.lr", 5e-4, "stages.first.train.lr"), ("train.ema.every", 5, "ema.every"),
        ("train.batch_size", 8, "stages.first.train.batch_size"), ("train.accumulate", 2, "train.accumulate"),
        ("data.size", 32, "stages.first.data.size"), ("data.digits", 2, "stages.first.data.digits"), ("train.precision", "bf16", "train.precision"),
        ("stages.second.width", 9, "stages.second.width"), ("stages.first.players.critic.clip", None, "stages.first.players.critic.clip"),
        ("stages.third.task", "tests.train.toy_tasks.Toy", "stages.third"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(path: str, value: object, key: str) -> None:
    with pytest.raises(ConfigError, match=key) as error:
        refuse_changes(make_plan(TREE).tree(), plan_with(path, value).tree())
    assert "--run" in str(error.value)


def begin(run: Path, *arguments: str) -> None:
    """A run folder with a first checkpoint."""
    plan, folder = resolve_run(arguments, run)
    folder.write_config(plan.tree())
    (folder.checkpoints(plan.stages[0].name) / "step-00000001").mkdir(parents=True)


def test_a_run_of_another_preset_is_named(tmp_path: Path) -> None:
    begin(tmp_path / "a", "muse-tiny")
    for other in ("vqgan-tiny", "muse-digits"):
        with pytest.raises(ConfigError, match=f"a holds a run of muse-tiny, not of {other}: .* --run another folder"):
            resolve_run([other], tmp_path / "a")
    resolve_run(["muse-tiny"], tmp_path / "a")
    with pytest.raises(ConfigError, match=r"stages.generator.train.lr differs"):
        resolve_run(["muse-tiny", "train.lr=1"], tmp_path / "a")


def test_a_refused_change_names_the_way_to_a_new_run(tmp_path: Path) -> None:
    begin(tmp_path / "a", "muse-tiny")
    for setting, remedy in (
        ("stages.tokenizer.width=8", f"stages.tokenizer.init={tmp_path}/a/tokenizer to start it from the weights"),
        ("seed=3", f"stages.generator.init={tmp_path}/a/generator"),
        ("stages.generator.init=runs/b/generator", "init starts a new run: give --run another folder"),
        ("stages.more.task=vqgan", "give --run another folder for a new run"),
    ):
        with pytest.raises(ConfigError) as error:
            resolve_run(["muse-tiny", setting], tmp_path / "a")
        assert str(error.value).endswith(remedy) or f"{remedy} " in f"{error.value} "


def test_a_key_of_a_section_inside_a_stage_is_found() -> None:
    with pytest.raises(ConfigError, match=r"unknown key guidance: did you mean stages.generator.sample.guidance\?"):
        resolve_run(["muse-tiny", "guidance=3"])
