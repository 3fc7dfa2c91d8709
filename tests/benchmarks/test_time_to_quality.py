"""Time to a caption accuracy: what counts, and a command that is stopped when it is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import time_to_quality
from benchmarks.time_to_quality import Outcome, Watch, format_table

TRAINS = """
import json, sys, time
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run") + 1])
run.mkdir(parents=True)
with open(run / "metrics.jsonl", "a") as file:
    for step in range(1, 400):
        record = {"stage": "generator", "split": "train", "step": step}
        if step % 2 == 0:
            record = {"stage": "generator", "split": "validation", "step": step, "metric/caption_accuracy": step / 10}
        file.write(json.dumps(record) + chr(10))
        file.flush()
        time.sleep(0.05)
"""


def test_measuring_does_not_count_and_other_stages_do_not_decide() -> None:
    outcome = Outcome("muse-tiny", 0)
    watch = Watch(outcome, "generator", 0.9)
    assert not watch.see({"stage": "tokenizer", "split": "train", "step": 1}, 5.0)
    assert not watch.see({"stage": "tokenizer", "metric/caption_accuracy": 1.0, "time/evaluation_seconds": 2.0}, 10.0)
    assert not watch.see({"stage": "generator", "metric/caption_accuracy": 0.8, "time/evaluation_seconds": 3.0}, 20.0)
    assert watch.see({"stage": "generator", "metric/caption_accuracy": 0.95, "time/evaluation_seconds": 1.0}, 30.0)
    assert (outcome.first_step, outcome.reached, outcome.accuracy) == (5.0, 24.0, 0.95)


@pytest.mark.slow
def test_training_is_stopped_at_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "kineo").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/train.py "$@"\n')
    (tmp_path / "kineo").chmod(0o755)
    (tmp_path / "train.py").write_text(TRAINS)
    monkeypatch.setattr(time_to_quality.sys, "executable", str(tmp_path / "kineo"))
    words = ["muse-tiny", "--target", "0.5", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert time_to_quality.main(words) == 0
    assert "| `muse-tiny` | 0 |" in capsys.readouterr().out
    outcome = json.loads(next(tmp_path.glob("*.json")).read_text())["runs"][0]["outcomes"][0]
    assert 0.5 <= outcome["accuracy"] <= 1
    assert 0 < outcome["first_step"] < outcome["reached"] < 15


def test_a_run_that_fails_is_named_with_its_message() -> None:
    table = format_table([Outcome("muse-tiny", 1, exit_code=1, message="it diverged")], 0.95)
    assert "| `muse-tiny` | 1 | – | – | exit code 1: it diverged | 0.0 |" in table


def test_a_target_that_is_no_share_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert time_to_quality.main(["muse-tiny", "--target", "95"]) == 2
    assert "--target 95: caption accuracy is 0 to 1" in capsys.readouterr().err
