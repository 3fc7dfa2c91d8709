"""The list of runs: what it finds, how it reads their state, and that unchanged runs cost nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kineograph.core.errors import InputError
from kineograph.core.run_folder import RunFolder
from kineograph.studio import runs as module
from kineograph.studio.runs import RunIndex, check_roots, make_id, take_fingerprint
from tests.studio.run_folders import PROMPTS, write_evaluation, write_run


def states(index: RunIndex) -> dict[str, str]:
    return {run.label: run.state for run in index.refresh()}


def test_runs_are_found_with_their_state(tmp_path: Path) -> None:
    write_run(tmp_path / "done")
    write_run(tmp_path / "group" / "cut", steps=500)
    (write_run(tmp_path / "halted", steps=500) / "stopped").touch()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.yaml").write_text("stages: [")
    (tmp_path / "no-run").mkdir()
    found = states(RunIndex([tmp_path]))
    assert found == {"done": "finished", "group/cut": "interrupted", "halted": "stopped", "torn": "broken"}


def test_a_run_folder_itself_is_a_root(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "two")
    assert states(RunIndex([tmp_path / "one"])) == {"one": "finished"}


def test_a_run_shows_progress_score_loss_and_pictures(tmp_path: Path) -> None:
    write_evaluation(write_run(tmp_path / "done"), caption_accuracy=0.5)
    (run,) = RunIndex([tmp_path]).refresh()
    assert (run.row.stage, run.row.step, run.row.steps, run.share) == ("generator", 100, 100, 1.0)
    assert (run.row.best, run.row.accuracy) == (0.4, 0.5)
    assert run.spark[0] == 4.0 and run.spark[-1] == 0.2
    assert run.preview[: len(PROMPTS)] == tuple(f"generator/samples/step-00000100/clip-000{n}.gif" for n in range(2))
    assert run.left is None


def test_a_running_run_says_how_long_it_will_take(tmp_path: Path) -> None:
    path = write_run(tmp_path / "now", steps=500)
    with RunFolder(path).lock():
        (run,) = RunIndex([tmp_path]).refresh()
    assert run.state == "running"
    assert run.left == pytest.approx(0.5 * 400)  # half a second a step


def test_changes_are_seen_and_only_changed_runs_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "one", steps=500)
    write_run(tmp_path / "two")
    index = RunIndex([tmp_path])
    index.refresh()
    read = []
    describe = module.describe_run
    monkeypatch.setattr(module, "describe_run", lambda path, label: read.append(label) or describe(path, label))
    index.refresh()
    assert read == []
    (path / "stopped").touch()
    assert states(index)["one"] == "stopped"
    assert read == ["one"]
    write_run(tmp_path / "three")
    assert set(states(index)) == {"one", "two", "three"}
    assert read == ["one", "three"]


def test_the_end_of_a_process_is_seen_although_no_file_changes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", steps=500)
    index = RunIndex([tmp_path])
    with RunFolder(path).lock():
        assert states(index) == {"one": "running"}
        mark = os.stat(path / ".lock").st_mtime_ns
    assert states(index) == {"one": "interrupted"}
    assert os.stat(path / ".lock").st_mtime_ns == mark


def test_a_line_of_the_log_is_news(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one")
    before = take_fingerprint(path)
    with open(path / "logs" / "rank-0.log", "a") as file:
        file.write("encoding 5 of 10 items\n")
    assert take_fingerprint(path) != before


def test_links_are_not_followed(tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere" / "secret")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    (tmp_path / "runs" / "folder").symlink_to(tmp_path / "elsewhere")
    assert states(RunIndex([tmp_path / "runs"])) == {}


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluation.json", "config.yaml"])
def test_a_pipe_or_a_link_out_of_the_run_is_not_read(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path / "runs" / "odd")
    (path / name).unlink(missing_ok=True)
    if name == "config.yaml":
        (tmp_path / "outside.yaml").write_text("stages: {secret: {task: muse}}")
        (path / name).symlink_to(tmp_path / "outside.yaml")
    else:
        os.mkfifo(path / name)  # reading it would block for ever
    (run,) = RunIndex([tmp_path / "runs"]).refresh()
    assert run.state == "broken"
    assert name in run.row.problem
    assert "secret" not in run.row.problem


def test_ids_do_not_tell_the_path_and_differ_between_runs_of_one_name(tmp_path: Path) -> None:
    one, two = make_id(tmp_path / "a" / "My run!"), make_id(tmp_path / "b" / "My run!")
    assert one != two
    assert one.startswith("my-run-")
    assert make_id(Path("/runs/日本")).isalnum()


def test_a_thousand_runs_are_listed_quickly(tmp_path: Path) -> None:
    source = write_run(tmp_path / "run-0", records=3)
    for number in range(1, 1000):
        path = tmp_path / f"run-{number}"
        (path / "generator").mkdir(parents=True)
        os.link(source / "config.yaml", path / "config.yaml")
        os.link(source / "metrics.jsonl", path / "metrics.jsonl")
    index = RunIndex([tmp_path])
    index._known = {  # as after a first scan, which reads every file
        path: module._Known(
            module.take_fingerprint(path), module.Run(make_id(path), path, label, module.Row(label, "new"), 0.0)
        )
        for path, label in module.find_runs(tmp_path.resolve())
    }
    begin = time.process_time()
    assert len(index.refresh()) == 1000
    assert time.process_time() - begin < 0.3


def test_a_folder_that_does_not_exist_is_refused_and_the_default_one_may_be_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere is not a folder"):
        check_roots([tmp_path / "nowhere"])
    assert check_roots([]) == [Path("runs")]
    assert RunIndex([tmp_path / "runs"]).refresh() == []


def test_a_file_that_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"stage": "generator", "split": "train", "st')
    (run,) = RunIndex([tmp_path]).refresh()
    assert run.state == "finished"
    assert run.spark
