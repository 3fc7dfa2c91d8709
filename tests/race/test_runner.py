"""The processes of a race: failing, stopped, killed and taken up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kineograph.core.errors import Stopped
from kineograph.race.runner import CommandFailed, Entry, Judge, Runner


def test_a_command_that_fails_gives_its_code_and_last_line(tmp_path: Path) -> None:
    entry = Entry("muse", 0, tmp_path)
    entry.log.parent.mkdir()
    with pytest.raises(CommandFailed, match=r"kineo presets ended with code 2: .*nothing-like-it"):
        Runner(Judge(1), print)._call(entry, dict(os.environ), ["presets", "nothing-like-it"], (0,))
    assert entry.log.read_text().startswith("$ kineo presets nothing-like-it\n")


def test_a_weak_family_is_judged_and_a_failed_evaluation_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry("muse", 0, tmp_path)
    entry.log.parent.mkdir()
    printed = "tokenizer: fatal: codec_collapsed: too low."
    popen = subprocess.Popen

    def print_and_fail(command: list[str], **options: object) -> subprocess.Popen:
        return popen([sys.executable, "-c", f"print({printed!r}); exit(1)"], **options)

    monkeypatch.setattr(subprocess, "Popen", print_and_fail)
    runner = Runner(Judge(1), print)
    assert runner._call(entry, dict(os.environ), ["evaluate", "x"], (0, 4)) == [printed]
    printed = "error: no space left on the device"
    with pytest.raises(CommandFailed, match="kineo evaluate ended with code 1: no space left"):
        runner._call(entry, dict(os.environ), ["evaluate", "x"], (0, 4))


def test_skipped_metrics_are_named_once() -> None:
    said: list[str] = []
    runner = Runner(Judge(1), said.append)
    for _ in range(2):
        runner._note_skipped(["a table", "skipped fid: run kineo weights get inception-v3"])
    assert said == ["skipped fid: run kineo weights get inception-v3"]


def test_a_stage_that_is_fatally_wrong_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["a table", "tokenizer: fatal: codec_collapsed: too low.", "tokenizer: warning: loss_spike: once."]
    monkeypatch.setattr(Runner, "_train", lambda *_: None)
    monkeypatch.setattr(Runner, "_call", lambda *_: said)
    (tmp_path / "prompts.txt").write_text("a 3\n")
    runner = Runner(Judge(1), print)
    assert runner._race(Entry("muse", 0, tmp_path), {}) is None
    assert runner.findings == {"muse-0": ["tokenizer: codec_collapsed: too low."]}


def test_prompts_are_drawn_again_for_another_run_and_after_a_part_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, called = Entry("muse", 0, tmp_path), []
    (tmp_path / "prompts.txt").write_text("a 3\na 7\n")

    def call(
        runner: Runner, entry: Entry, environment: dict[str, str], words: list[str], fine: tuple[int, ...]
    ) -> list:
        called.append(words[0])
        if words[0] == "sample":
            entry.samples.mkdir(parents=True, exist_ok=True)
            for number in range(2):
                (entry.samples / f"{number}.json").write_text("{}")
        return []

    monkeypatch.setattr(Runner, "_call", call)
    runner = Runner(Judge(1), print)
    monkeypatch.setattr("kineograph.race.runner.read_run", lambda path: SimpleNamespace(state="finished"))
    assert runner._race(entry, {}) is None and called == ["train", "evaluate", "sample"]
    entry.run.mkdir(parents=True)
    (entry.run / "config.yaml").write_text("stages: {}")
    called.clear()
    assert runner._race(entry, {}) is None and called == ["evaluate"]
    (entry.samples / "1.json").unlink()  # drawing was interrupted
    called.clear()
    assert runner._race(entry, {}) is None and called == ["evaluate", "sample"]
    (entry.run / "config.yaml").unlink()  # the run was removed, to train it again
    called.clear()
    assert runner._race(entry, {}) is None and called == ["train", "evaluate", "sample"]


def test_trust_is_passed_on(tmp_path: Path) -> None:
    entry = Entry("muse", 0, tmp_path)
    entry.log.parent.mkdir()
    with pytest.raises(CommandFailed):
        Runner(Judge(1), print, trust=True)._call(entry, dict(os.environ), ["presets", "nowhere"], (0,))
    assert entry.log.read_text().splitlines()[0].endswith("nowhere --trust")


def test_a_signal_stops_all_entries_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def train(self: Runner, entry: Entry, environment: dict[str, str]) -> None:
        started.append(entry.name)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)

    monkeypatch.setattr(Runner, "_train", train)
    finished: list[str] = []
    entries = [Entry("muse", seed, tmp_path) for seed in range(3)]
    with pytest.raises(Stopped, match=r"stopped by SIGTERM.*the same command"):
        Runner(Judge(1), print).run(entries, 1, lambda entry, failure: finished.append(entry.name))
    assert (started, finished) == (["muse-0"], [])


@pytest.mark.slow
def test_a_race_that_is_killed_is_taken_up(tmp_path: Path) -> None:
    """With real processes: the killed one leaves a trainer behind, which the next race waits for."""
    words = [
        sys.executable,
        "-m",
        "kineograph",
        "race",
        "digits",
        "--frames",
        "1",
        "--families",
        "muse,phenaki",
        "--minutes",
        "0.1",
    ]
    words += ["--samples", "2", "--metrics", "caption_accuracy", "--jobs", "2", "--run", str(tmp_path / "race")]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "race" / "runs" / "muse-0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    first.kill()
    first.wait()
    second = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    # A busy machine makes too few steps to learn anything, which is an exit code of its own.
    assert second.returncode == 0 or "no family learned anything" in second.stderr, second.stderr
    record = json.loads((tmp_path / "race" / "race.json").read_text())
    assert record["entries"].keys() == {"muse-0", "phenaki-0"}
    assert all("figures" in entry for entry in record["entries"].values())
    assert (tmp_path / "race" / "sheet.png").exists()
