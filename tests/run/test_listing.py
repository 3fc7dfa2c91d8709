from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from kineograph.core.errors import InputError
from kineograph.evaluate import results_file
from kineograph.evaluate.metric_api import Result
from kineograph.run.listing import format_age, list_runs, print_runs
from kineograph.train import checkpoint
from tests.sample.tiny_task import log, make_run


def one(folder, name):
    return next(row for row in list_runs(folder) if row.name == name)


def test_states_and_steps(tmp_path):
    make_run(tmp_path / "finished", steps=20, step=20)
    half = make_run(tmp_path / "interrupted", "tokenizer", steps=40, step=20)
    log(half, {"stage": "tokenizer", "split": "train", "step": 33, "loss": 1.0})
    stopped = make_run(tmp_path / "stopped", "tokenizer", steps=20, step=20)
    stopped.stopped_marker.write_text("saved\n")
    new = make_run(tmp_path / "new", "tokenizer")
    (new.checkpoints("tokenizer") / "step-00000020").rename(tmp_path / "elsewhere")
    states = {row.name: (row.state, row.stage, row.step, row.steps) for row in list_runs(tmp_path)}
    assert states == {
        "finished": ("finished", "generator", 20, 20),
        "interrupted": ("interrupted", "tokenizer", 20, 40),  # what resuming starts from, not what was logged after it
        "stopped": ("stopped", "generator", 0, 20),
        "new": ("new", "tokenizer", 0, 20),
    }


def test_the_error_of_a_failed_run_is_read_from_its_own_folder_only(tmp_path):
    run = make_run(tmp_path / "failed", "tokenizer", steps=40, step=20)
    run.failed_marker.write_text("disk full\nand more")
    assert (one(tmp_path, "failed").state, one(tmp_path, "failed").problem) == ("failed", "disk full")
    (tmp_path / "secret").write_text("a secret")
    run.failed_marker.unlink()
    run.failed_marker.symlink_to(tmp_path / "secret")
    assert one(tmp_path, "failed").problem == ""
    run.failed_marker.unlink()
    os.mkfifo(run.failed_marker)
    assert one(tmp_path, "failed").problem == ""


def test_a_timed_stage_expects_steps_at_its_speed_so_far(tmp_path):
    run = make_run(tmp_path / "timed", "tokenizer", steps=1000, step=20)
    tree = run.config()
    tree["stages"]["tokenizer"]["train"] = {"minutes": 2.0, "steps": 1000}
    run.write_config(tree)
    assert (one(tmp_path, "timed").step, one(tmp_path, "timed").steps) == (20, 21), "the checkpoint knows no clock"
    for share, steps in ((0.25, 80), (1.0, 20)):
        state = run.checkpoints("tokenizer") / "step-00000020" / "state.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "clock": {"now": share}}))
        row = one(tmp_path, "timed")
        assert (row.stage, row.step, row.steps) == (("tokenizer", 20, steps) if share < 1 else ("generator", 0, 1000))


def test_a_live_process_is_seen(tmp_path):
    run = make_run(tmp_path / "live", "tokenizer", steps=40, step=20)
    log(run, {"stage": "tokenizer", "split": "train", "step": 33, "loss": 1.0})
    code = (
        "import sys, time; from kineograph.core.run_folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).lock(): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        row = one(tmp_path, "live")
        assert (row.state, row.step) == ("running", 33)
    finally:
        holder.kill()
        holder.wait()
    assert one(tmp_path, "live").state == "interrupted"


def test_scores_and_age(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    checkpoint.write_best(run.checkpoints("generator"), 10, 0.25)
    results_file.add_results(
        run, "validation", "generator", 20, {"caption_accuracy": Result({"caption_accuracy": 0.8})}
    )
    row = one(tmp_path, "run")
    assert (row.best, row.accuracy) == (0.25, 0.8)
    tree = json.loads((run.path / "evaluation.json").read_text())
    prompts = {"caption_accuracy": {"values": {"caption_accuracy": 0.1}, "date": "2099-01-01T00:00:00+00:00"}}
    tree["results"]["prompts-mine-0a1b2c"] = {"generator/step-00000020": prompts}
    (run.path / "evaluation.json").write_text(json.dumps(tree))
    assert one(tmp_path, "run").accuracy == 0.8
    assert row.age < 60
    an_hour_ago = time.time() - 3 * 3600
    for path in (run.path, *run.path.rglob("*")):
        os.utime(path, (an_hour_ago, an_hour_ago))
    assert format_age(one(tmp_path, "run").age) == "3 h ago"


def test_broken_folders_are_listed_and_break_nothing(tmp_path, capsys):
    make_run(tmp_path / "good")
    for name, text in {
        "torn": "stages: {tok",
        "list": "- 1",
        "empty": "",
        "odd": "stages: {a: 3}",
        "steps": "stages: {a: {train: {steps: x}}}",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    damaged = make_run(tmp_path / "damaged")
    (damaged.path / "evaluation.json").write_text("{")
    (damaged.checkpoints("generator") / "best.json").write_text("[")
    damaged.metrics_file.write_bytes(b"\xff\xfe{\n[]\n")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file.txt").write_text("x")
    states = {row.name: row.state for row in list_runs(tmp_path)}
    assert states == {
        "good": "finished", "damaged": "finished", "torn": "broken", "list": "broken", "empty": "broken", "odd": "broken", "steps": "broken",
    }  # fmt: skip
    assert "not readable YAML" in one(tmp_path, "torn").problem
    assert "invalid literal" in one(tmp_path, "steps").problem
    print_runs(tmp_path)
    assert capsys.readouterr().out.count("│ broken") == 5


def test_one_run_by_its_own_path_and_no_runs(tmp_path, capsys):
    run = make_run(tmp_path / "mine")
    assert [row.name for row in list_runs(run.path)] == ["mine"]
    (tmp_path / "nothing").mkdir()
    print_runs(tmp_path / "nothing")
    assert "no runs" in capsys.readouterr().out
    with pytest.raises(InputError, match="does not exist: start a run with kineo train PRESET"):
        list_runs(tmp_path / "gone")


def test_listing_runs_needs_no_torch(tmp_path):
    make_run(tmp_path / "a", steps=5)
    code = (
        f"import sys; from kineograph.run.listing import print_runs; print_runs({str(tmp_path)!r}); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert "finished" in done.stdout


def test_pipes_in_a_run_folder_do_not_block(tmp_path):
    run = make_run(tmp_path / "odd", steps=40, step=20)
    best = run.checkpoints("generator") / "best.json"
    for path in (run.metrics_file, run.path / "evaluation.json", best):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert one(tmp_path, "odd").state == "interrupted"
