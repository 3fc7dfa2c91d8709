"""`kineo race` on one CPU core with budgets of a second: planning, racing, going on, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kineograph import cli
from kineograph.core import trust
from kineograph.core.config_file import dump_yaml, load_file
from kineograph.core.errors import ConfigError, InputError, RunFailed
from kineograph.doctor import speed
from kineograph.race import board, command, plan
from kineograph.race.plan import choose_families, read_data
from kineograph.race.recipe import KINDS, RaceShape, fit_recipe, list_families
from kineograph.race.runner import CommandFailed, Entry, Runner
from kineograph.race.sheet import read_samples
from kineograph.run.layers import find_preset, read_file
from kineograph.run.plan import make_plan

ALL = ["cogvideox", "dalle2", "muse", "nuwa", "phenaki"]
DATA = {"source": "moving_digits", "size": 64, "frames": 1, "grid": 8}


# Recipes -----------------------------------------------------------------------------------------------------------


def test_every_family_with_both_presets_races() -> None:
    assert sorted(list_families()) == ALL
    assert choose_families(["muse", "dalle2", "muse"]) == ["muse", "dalle2"]
    with pytest.raises(InputError, match="did you mean muse"):
        choose_families(["mues"])


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("family", ALL)
def test_a_recipe_fits_the_data_and_the_minutes(family: str, device: str) -> None:
    stages = make_plan(fit_recipe(family, DATA, RaceShape(1, 64, 64), device, 10.0)).stages
    last = stages[-1]
    assert (last.spec.data.frames, last.spec.data.size) == (1, (64, 64))
    assert sum(stage.train.seconds or 0 for stage in stages) == pytest.approx(600, rel=1e-3)
    for stage in stages:
        assert stage.train.sample_every == 0 and stage.train.metrics == () and stage.train.epoch_samples is None


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("family", ALL)
def test_minutes_of_a_preset_are_those_of_the_run(family: str, kind: str) -> None:
    stages = make_plan(read_file(find_preset(f"{family}-{kind}"))).stages
    assert sum(stage.train.minutes_share for stage in stages) == pytest.approx(1)


def test_a_cascade_keeps_its_proportions() -> None:
    tree = fit_recipe("dalle2", {**DATA, "size": 32, "grid": 4}, RaceShape(1, 32, 32), "cpu", 1.0)
    assert tree["stages"]["decoder"]["data"] == {"size": [16, 16], "grid": 2}
    assert tree["stages"]["upsampler"]["low_res_size"] == 16
    assert "data" not in tree["stages"]["upsampler"]


def test_pictures_before_clips_are_left_out_where_all_are_pictures() -> None:
    clips = fit_recipe("phenaki", {**DATA, "frames": 17}, RaceShape(17, 64, 64), "cuda", 10.0)["stages"]
    pictures = fit_recipe("phenaki", DATA, RaceShape(1, 64, 64), "cuda", 10.0)["stages"]
    assert clips["images"]["data"] == {"frames": 1}
    assert list(pictures) == ["tokenizer", "generator"]
    assert "init" not in pictures["generator"]
    assert pictures["generator"]["train"]["minutes_share"] == pytest.approx(0.75)
    assert pictures["generator"]["train"]["batch_size"] == 256, "as the stage that was made for pictures"


def test_a_batch_has_about_as_many_pixels_as_in_the_preset() -> None:
    batches = [
        fit_recipe("muse", {**DATA, "size": size}, RaceShape(1, size, size), "cuda", 1.0)["stages"]["generator"][
            "train"
        ]["batch_size"]
        for size in (32, 64, 128, 256)
    ]
    assert batches == [1024, 256, 64, 16]


def test_short_stages_do_not_encode_all_data_first() -> None:
    def cache(minutes: float) -> str:
        return fit_recipe("muse", DATA, RaceShape(1, 64, 64), "cpu", minutes)["stages"]["generator"]["cache"]

    assert (cache(1.0), cache(10.0)) == ("auto", "if_possible")


def test_a_family_of_pictures_says_why_it_draws_no_clips() -> None:
    for family in ("muse", "dalle2"):
        tree = fit_recipe(family, {**DATA, "frames": 9}, RaceShape(9, 64, 64), "cpu", 1.0)
        with pytest.raises(ConfigError, match=r"data\.frames=9 does not fit"):
            plan._check_plan(tree)


def test_data_of_a_race(tmp_path: Path) -> None:
    clips, pictures = read_data("digits", [], None, None, "cuda"), read_data("digits", [], 1, None, "cuda")
    assert (str(clips.shape), str(pictures.shape)) == ("17 frames of 64 px", "pictures of 64 px")
    for index in range(4):
        Image.new("RGB", (40, 40), (60 * index, 0, 0)).save(tmp_path / f"{index}.png")
    folder = read_data(str(tmp_path), ["validation=0.5"], None, None, "cpu")
    assert folder.shape == RaceShape(1, 32, 32)
    assert folder.data["validation"] == 0.5
    (tmp_path / "data.yaml").write_text(f"data: {{source: folder, folder: {tmp_path}, size: 48}}")
    assert read_data(str(tmp_path / "data.yaml"), [], None, None, "cpu").shape == RaceShape(1, 48, 48)
    assert read_data(str(tmp_path / "data.yaml"), [], None, 64, "cpu").shape == RaceShape(1, 64, 64)
    for words, match in ((("nowhere", []), "neither digits"), (("digits", ["size=8"]), "give a YAML file")):
        with pytest.raises(InputError, match=match):
            read_data(*words, None, None, "cpu")


# Races -------------------------------------------------------------------------------------------------------------


class Commands:
    """Runs the commands of a race in this process, which has torch already; `failing` maps a command's word to its code."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.called: list[str] = []
        self.failing: dict[str, int] = {}
        commands = self

        def call(runner: Runner, entry: Entry, environment: dict[str, str], words: list[str], fine: Any) -> list[str]:
            commands.called.append(f"{words[0]} {entry.name}")
            code = commands.failing.get(words[0], 0)
            if not code:
                try:
                    cli.main(words)
                except SystemExit as end:
                    code = int(end.code or 0)
                if words[0] == "evaluate" and (entry.run / "evaluation.json").is_file():
                    code = 0  # so short a race has fatal findings
            if code not in fine:
                raise CommandFailed(f"kineo {words[0]} ended with code {code}")
            return []

        patch.setattr(Runner, "_call", call)
        patch.setattr(speed, "PROBE_SECONDS", 0.0)
        patch.setattr(board, "YOUNG_STEPS", 0)  # these races are short


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with pytest.MonkeyPatch.context() as patch:
        yield Commands(patch)


RACE: dict[str, Any] = {
    "families": ["muse"], "minutes": 0.03, "frames": 1, "samples": 3, "metrics": "caption_accuracy,reconstruction,reconstructed_captions",
}  # fmt: skip


def write_small_plan(folder: Path) -> None:
    """An edited plan, so small that its steps take milliseconds on a busy machine."""
    shape = read_data("digits", [], 1, None, "cpu")
    tree = fit_recipe("muse", shape.data, shape.shape, "cpu", RACE["minutes"])
    tree["data"]["count"] = 200
    tree["stages"]["tokenizer"] |= {"width": 8}
    tree["stages"]["generator"] |= {"width": 16, "depth": 1}
    for stage in tree["stages"].values():
        stage["train"] |= {"batch_size": 4, "validation_samples": 4}
    (folder / "plans").mkdir(parents=True)
    (folder / "plans" / "muse.yaml").write_text(dump_yaml(tree))


@pytest.fixture(scope="module")
def raced(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A race whose first judging failed, and that was then taken up with a board."""
    folder = tmp_path_factory.mktemp("race")
    write_small_plan(folder / "race")
    commands.failing = {"evaluate": 1}
    with pytest.raises(RunFailed, match="muse-0 failed"):
        command.race("digits", run=folder / "race", **RACE, note=lambda line: None)
    record = json.loads((folder / "race" / "race.json").read_text())
    assert record["entries"]["muse-0"]["failure"] == "kineo evaluate ended with code 1"
    commands.failing = {}
    commands.called.clear()
    return command.race("digits", run=folder / "race", **RACE, board=folder / "board.md", note=lambda line: None)


def test_an_interrupted_race_goes_on_without_training_again(raced: Path, commands: Commands) -> None:
    assert commands.called == ["evaluate muse-0", "sample muse-0"]
    assert len(list((raced / "runs").iterdir())) == 1


def test_race_json_holds_every_figure(raced: Path) -> None:
    entry = json.loads((raced / "race.json").read_text())["entries"]["muse-0"]
    assert entry["figures"].keys() >= {
        "caption accuracy", "codec PSNR", "samples/s", "M parameters", "GiB", "steps", "minutes",
    }  # fmt: skip
    assert 0 <= entry["figures"]["caption accuracy"] <= 1
    assert 0.03 <= entry["figures"]["minutes"] < 1
    assert entry["figures"]["samples/s"] > 0
    assert entry["bounds"].keys() == {"ceiling", "chance", "codec"}
    assert entry["bounds"]["ceiling"] > entry["bounds"]["chance"]


def test_sheet_prompts_and_plan_are_written(raced: Path) -> None:
    prompts = (raced / "prompts.txt").read_text().splitlines()
    assert len(prompts) == 6
    assert len(list((raced / "samples" / "muse-0").glob("*.json"))) == 6
    with Image.open(raced / "sheet.png") as sheet:
        assert sheet.height > 6 * 96 and sheet.width > 2 * 96
    assert load_file(raced / "plans" / "muse.yaml")["train"] == {"minutes": 0.03}


def test_the_board_has_the_table_with_its_bounds(raced: Path) -> None:
    text = (raced.parent / "board.md").read_text()
    assert text.startswith("# Leaderboard\n")
    for words in (
        "## digits: pictures of 32 px, 0.03 minutes, CPU",
        "| muse |",
        "| real held-out items |",
        "| chance |",
    ):
        assert words in text
    assert "reconstructions by the codec of muse" in text


def test_a_finished_race_runs_nothing_and_another_one_is_refused(raced: Path, commands: Commands) -> None:
    commands.called.clear()
    command.race("digits", run=raced, **RACE, note=lambda line: None)
    assert commands.called == []
    for change in ({"minutes": 1.0}, {"size": 40}):
        with pytest.raises(InputError, match="holds a race with"):
            command.race("digits", run=raced, **{**RACE, **change}, note=lambda line: None)


def test_with_other_weights_all_are_judged_again(
    raced: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.called.clear()
    with monkeypatch.context() as patch:
        patch.setattr(command, "list_available", lambda: ["inception-v3"])
        command.race("digits", run=raced, **RACE, note=lambda line: None)
    assert commands.called == ["evaluate muse-0"]
    command.race("digits", run=raced, **RACE, note=lambda line: None)
    assert commands.called == ["evaluate muse-0"] * 2


def test_an_edited_plan_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_fit_time", lambda family, tree, *rest: tree)
    asked = {**RACE, "minutes": 60.0, "plan_only": True}
    command.race("digits", run=tmp_path / "race", **asked, note=lambda line: None)
    file = tmp_path / "race" / "plans" / "muse.yaml"
    file.write_text(file.read_text().replace("width: 128", "width: 64"))
    command.race("digits", run=tmp_path / "race", **asked, note=lambda line: None)
    assert load_file(file)["stages"]["generator"]["width"] == 64


def test_plans_of_other_minutes_or_of_another_device_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_fit_time", lambda family, tree, *rest: tree)
    asked = {**RACE, "minutes": 60.0, "plan_only": True}
    command.race("digits", run=tmp_path / "race", **asked, note=lambda line: None)
    with pytest.raises(InputError, match=r"holds a race with minutes 60.0, and this one has 5.0"):
        command.race("digits", run=tmp_path / "race", **{**asked, "minutes": 5.0}, note=lambda line: None)
    file = tmp_path / "race" / "race.json"
    file.write_text(file.read_text().replace('"device": "CPU"', '"device": "a GPU"'))
    with pytest.raises(InputError, match=r"was raced on a GPU, and this machine has CPU"):
        command.race("digits", run=tmp_path / "race", **asked, note=lambda line: None)


@pytest.mark.parametrize(
    "data",
    [
        {"source": "webdataset", "shards": "pipe:touch MARK"},
        {"source": "subprocess.Popen", "arguments": {"args": ["touch", "MARK"]}},
    ],
)
def test_a_plan_from_elsewhere_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_all_trusted", False)
    write_small_plan(tmp_path / "race")
    file, mark = tmp_path / "race" / "plans" / "muse.yaml", tmp_path / "ran"
    tree = load_file(file)
    tree["stages"]["tokenizer"]["data"] = json.loads(json.dumps(data).replace("MARK", str(mark)))
    file.write_text(dump_yaml(tree))
    with pytest.raises(InputError, match=r"muse.yaml would run code that was never typed on this machine"):
        command.race("digits", run=tmp_path / "race", **RACE, plan_only=True, note=lambda line: None)
    assert not mark.exists()


@pytest.mark.parametrize(
    "record",
    [
        {"request": 3},
        {"request": {}, "entries": [1], "unable": "x"},
        {"request": {}, "entries": {"a": 1, "b": {"family": "../../x"}, "c": {"family": "muse", "figures": {"FID": "x"}}}, "unable": {"nuwa": 3}},
        {"request": {}, "entries": {"d": {"family": "muse", "bounds": [3]}, "e": {"family": "muse", "failure": {}}}},
    ],
)  # fmt: skip
def test_an_odd_record_is_left_out(tmp_path: Path, record: Any) -> None:
    (tmp_path / "race.json").write_text(json.dumps(record))
    read = command.read_record(tmp_path / "race.json")
    assert not read.get("entries") and not read.get("unable")


def test_samples_of_a_race_are_read_by_the_allow_list(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")  # Ghostscript would read it
    (tmp_path / "a.json").write_text(json.dumps({"prompt": "x", "file": "a.png"}))
    with pytest.raises(InputError, match=r"a.png cannot be read|not a video"):
        read_samples(tmp_path)


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        ("digits", {"minutes": 1e-6}, r"--minutes 1e-06 is too short: stage tokenizer of muse .* give --minutes 0\.\d+ or more"),
        ("digits", {"frames": 5}, "no family can race on 5 frames of 32 px; add --frames 1"),
        ("digits", {"families": ["museum"]}, "did you mean muse"),
        ("digits", {"metrics": "beauty"}, "beauty"),
        ("digits", {"board": Path("board.txt")}, "end its name with .md"),
        ("PICTURES", {}, "reads captions, and .* have none .*put a .txt beside each"),
    ],
)  # fmt: skip
def test_what_cannot_race_is_refused_and_nothing_is_written(
    commands: Commands, tmp_path: Path, data: str, changes: dict[str, Any], words: str
) -> None:
    if data == "PICTURES":
        data = str(tmp_path / "pictures")
        Path(data).mkdir()
        for index in range(40):
            Image.new("RGB", (40, 40), (6 * index, 0, 0)).save(Path(data) / f"{index}.png")
    with pytest.raises((InputError, ConfigError), match=words):
        command.race(data, run=tmp_path / "race", **{**RACE, **changes}, note=lambda line: None)
    assert not (tmp_path / "race").exists()


def test_a_family_that_fails_ends_no_other_and_joins_the_race(
    raced: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_fit_time", lambda family, tree, *rest: tree)
    monkeypatch.setattr(commands, "failing", {"train": 1})
    with pytest.raises(RunFailed, match=r"^phenaki-0 failed"):
        command.race("digits", run=raced, **{**RACE, "families": ["phenaki"]}, note=lambda line: None)
    entries = json.loads((raced / "race.json").read_text())["entries"]
    assert "figures" in entries["muse-0"]
    assert entries["phenaki-0"]["failure"] == "kineo train ended with code 1"
    with Image.open(raced / "sheet.png") as sheet:
        assert sheet.width > 2 * 96, "muse is still on the sheet"
