"""What a user or a folder can do to a command: an error with a name, and nothing lost."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch
import yaml

from kineograph.cli import main
from kineograph.core.config import merge, nest
from kineograph.core.errors import ConfigError, InputError, RunFailed
from kineograph.core.health import read_findings
from kineograph.core.run_folder import RunFolder
from kineograph.data.startup_scan import write_skipped
from kineograph.evaluate.compare import compare
from kineograph.evaluate.sheets import SampleSheets, _Entry
from kineograph.media.clips import write_clip
from kineograph.media.curves import read_records
from kineograph.media.grids import wrap_text
from kineograph.race.sheet import write_sheet
from kineograph.run.listing import list_runs, print_runs
from kineograph.run.plan import make_plan, resolve_run
from kineograph.run.resume_from import fetch_checkpoints
from kineograph.train import checkpoint
from kineograph.train.metrics_file import MetricsFile
from kineograph.train.rank_log import RankLog
from tests.sample.tiny_task import make_run


def test_one_broken_run_does_not_end_the_list(tmp_path, capsys):
    make_run(tmp_path / "good")
    odd = [
        "[", "stages: 3", "stages: {a: 1}", "stages: {a: {task: 1, train: {steps: [1]}}}", "stages: {a: {task: x, train: 7}}",
        "a: 1\na: 2", "stages: {'../..': {task: x}}", "stages: {'[/x]': {task: x, train: {steps: []}}}", "[" * 3000,
    ]  # fmt: skip
    for number, text in enumerate(odd):
        (tmp_path / f"[odd{number}]").mkdir(parents=True)
        (tmp_path / f"[odd{number}]" / "config.yaml").write_text(text)
    for name, content in {
        "evaluation.json": {"results": {"a": {"b": {"caption_accuracy": 1}}}},
        "metrics.jsonl": [1],
    }.items():
        run = make_run(tmp_path / name.partition(".")[0])
        (run.path / name).write_text(json.dumps(content))
    rows = {row.name: row.state for row in list_runs(tmp_path)}
    assert rows["good"] != "broken"
    assert sum(state == "broken" for state in rows.values()) >= len(odd) - 1
    print_runs(tmp_path)
    assert "good" in capsys.readouterr().out


def test_odd_evaluations_are_none(tmp_path):
    run = make_run(tmp_path / "run")
    record = {"values": {"caption_accuracy": 0.5}, "labels": {}, "date": "x"}
    place = f"{list(run.config()['stages'])[-1]}/step-00000001"
    for odd, expected in (
        ({place: {"caption_accuracy": record}}, 0.5),
        ({place: {"caption_accuracy": record | {"labels": {"drawn from": 3}}}}, 0.5),
        ([], None),
        ({place: []}, None),
        ({place: {"caption_accuracy": []}}, None),
        ({place: {"caption_accuracy": {"values": []}}}, None),
        ({place: {"caption_accuracy": record | {"labels": 3}}}, None),
    ):
        (run.path / "evaluation.json").write_text(json.dumps({"results": {"validation": odd}}))
        assert compare([run.path]).runs[0].cells["caption accuracy"].value == expected
        assert [row.state for row in list_runs(tmp_path)] != ["broken"]


@pytest.mark.parametrize("name", [".", "..", "a/b", "", "x" * 300])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(ConfigError, match="name="):
        resolve_run(["vqgan-tiny", f"name='{name}'"])


@pytest.mark.parametrize("name", ["a", ".hidden", "a.b", "..a", "a b"])
def test_names_of_folders_are_taken(name):
    assert resolve_run(["vqgan-tiny", f"name='{name}'"])[1].path.name == name


def test_the_root_is_no_run_folder(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "vqgan-tiny", "--run", "/"])
    assert stop.value.code == 2
    assert "root of the file system" in capsys.readouterr().err


def save_one(folder):
    config = {"stages": {"only": {"task": "vqgan"}}}
    state = {"stage": "only", "config": make_plan(config).tree()}
    checkpoint.save(folder / "only" / "checkpoints", 1, {"model": {"w": torch.zeros(1)}}, state)
    return folder / "only" / "checkpoints" / "step-00000001"


@pytest.mark.timeout(20)
def test_a_parent_of_the_run_is_not_copied_into_itself(tmp_path):
    save_one(tmp_path / "runs" / "old")
    with pytest.raises(InputError, match="holds the run folder itself"):
        fetch_checkpoints([str(tmp_path / "runs")], tmp_path / "runs" / "new", print)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["old"]


@pytest.mark.timeout(20)
def test_pipes_in_a_checkpoint_folder_are_refused(tmp_path):
    path = save_one(tmp_path / "old")
    os.mkfifo(path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        fetch_checkpoints([str(path)], tmp_path / "new" / "run", print)
    assert not (tmp_path / "new").exists()


def test_missing_weights_of_a_metric_are_refused_before_the_first_stage(tmp_path, capsys):
    tree = {
        "preset": "muse-tiny",
        "stages": {"generator": {"train": {"metrics": ["fid"], "evaluate_every": 1}}},
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(SystemExit) as stop:
        main(["train", str(tmp_path / "a.yaml"), "--run", str(tmp_path / "run"), "train.steps=1"])
    assert stop.value.code == 2
    assert "train.metrics names fid: the weights inception-v3 are not on this machine" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    run = RunFolder(tmp_path)
    kept = ["config.yaml", ".lock", ".scan/x", "a/.hidden", ".evaluation.json.7", "a/samples/s/x.gif", ".v1.2"]
    gone = [
        ".config.yaml.123", "a/.best.json.9", "a/checkpoints/.x.1", "a/checkpoints/step-00000001/.phase.json.4",
        "a/samples/s/.12ab.part.gif", "a/.fetching-x/file",
    ]  # fmt: skip
    for name in [*kept, *gone]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    run.remove_leftovers()
    assert [name for name in gone if (tmp_path / name).exists()] == []
    assert [name for name in kept[:-1] if not (tmp_path / name).exists()] == []


@pytest.mark.parametrize("text", ["x" * 1_000_000, "a b " * 250_000, "\u0301" * 300_000])
def test_the_layout_of_a_caption_is_linear_in_its_length(text):
    began = time.monotonic()
    assert len(wrap_text(text, 200)) <= 8
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_metrics_that_never_end_are_none(tmp_path, make):
    run = make_run(tmp_path / "run")
    run.metrics_file.unlink(missing_ok=True)
    make(run.metrics_file)
    assert MetricsFile(run.metrics_file).read() == []
    assert [row.name for row in list_runs(tmp_path)] == ["run"]


def test_links_in_a_run_lead_no_writer_elsewhere(tmp_path):
    """Logs and metrics are appended to."""
    target = tmp_path / "target"
    target.write_text("mine")
    run = RunFolder(tmp_path / "run")
    (run.path / "logs").mkdir(parents=True)
    (run.path / "logs" / "rank-0.log").symlink_to(target)
    log = RankLog(run.path)
    log.write("theirs")
    log.close()
    run.metrics_file.symlink_to(target)
    with pytest.raises(RunFailed, match="cannot write"):
        MetricsFile(run.metrics_file).write({"stage": "a", "split": "train", "step": 1})
    assert target.read_text() == "mine"


def test_odd_lines_of_skipped_items_are_left_out(tmp_path):
    path = tmp_path / "skipped.jsonl"
    path.write_bytes(b'{"path": "a", "reason": "b"}\n[1]\n{\n{"path": 1}\n\xff\n')
    assert write_skipped(path, {"c": "d"}) == 2
    assert [json.loads(line)["path"] for line in path.read_text().splitlines()] == ["a", "c"]


def test_pictures_replace_links(tmp_path):
    """Sheets of an evaluation or a race have names that a folder from elsewhere can hold as links."""
    (tmp_path / "target").write_text("mine")
    sheets = SampleSheets()
    sheets.samples.append(_Entry(0, [torch.rand(1, 3, 16, 16)], "a 3"))
    for name in ("generator.png", "sheet.png"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    sheets.write(tmp_path, "generator", 8.0)
    clip = torch.rand(1, 3, 16, 16)
    write_clip(tmp_path / "a.png", clip, 8.0)
    (tmp_path / "a.json").write_text(json.dumps({"file": "a.png", "prompt": "a 3"}))
    write_sheet(tmp_path / "sheet.png", ["a 3"], [clip], {"muse": tmp_path})
    assert (tmp_path / "target").read_text() == "mine"
    assert not (tmp_path / "generator.png").is_symlink()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluation.json", "skipped.jsonl", "failed"])
def test_files_with_holes_do_not_fill_the_memory(tmp_path, name, capsys):
    """A terabyte that takes no space on the disk."""
    run = make_run(tmp_path / "run")
    with open(run.path / name, "wb") as file:
        file.write(
            b'{"stage": "generator", "split": "train", "step": 3, "loss": 1.0}\n' if name == "metrics.jsonl" else b""
        )
        file.truncate(2**40)
    print_runs(tmp_path)
    assert "run" in capsys.readouterr().out
    assert [record["step"] for record in MetricsFile(run.metrics_file).read()] == [3] * (name == "metrics.jsonl")
    assert list(read_findings(run.metrics_file)) == []
    if name == "skipped.jsonl":
        assert write_skipped(run.path / name, {"a": "b"}) == 1
    if name == "metrics.jsonl":
        assert len(list(read_records(run.metrics_file))) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "x"), ("seed", float("inf")), ("sample", 3), ("data", [1]), ("stages.x.data", 3), ("stages.x.train", [1]),
        ("stages.x.train", None), ("stages.x.players", True), ("stages.x.train.steps", float("nan")), ("stages.x.train.steps", {"a": 1}),
    ],
)  # fmt: skip
def test_a_saved_config_of_another_form_is_damage(tmp_path, key, value):
    """Commands read parts of it without parsing the rest."""
    tree = merge({"stages": {"x": {"task": "muse", "train": {"steps": 3}}}}, nest(key, value))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(InputError, match=rf"config.yaml is damaged: {key} must "):
        RunFolder(tmp_path).config()


@pytest.mark.parametrize("key", ["data", "train", "players", "players.model"])
def test_a_section_that_is_no_mapping_is_refused(key):
    tree = {"data": {"source": "moving_digits"}, "stages": {"x": {"task": "clip"}}}
    with pytest.raises(ConfigError, match=rf"stages\.x\.{key}=3: give a mapping of keys to values"):
        make_plan(merge(tree, nest(f"stages.x.{key}", 3)))
