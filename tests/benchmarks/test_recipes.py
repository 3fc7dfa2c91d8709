"""Presets over several seeds: what is run, read and tabulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recipes
from benchmarks.recipes import Outcome, format_table, parse_seeds
from kineograph.core.errors import ConfigError


def test_seeds():
    assert parse_seeds("0-2") == [0, 1, 2]
    assert parse_seeds("0,3,7") == [0, 3, 7]
    with pytest.raises(ConfigError, match="--seeds a-b: use a range such as 0-2"):
        parse_seeds("a-b")


@pytest.fixture
def kineo(monkeypatch):
    """Stands in for the command: writes what a run writes. Seed 1 fails in training."""
    calls: list[tuple[str, ...]] = []

    def run(*words: str) -> tuple[int, str]:
        calls.append(words)
        if words[0] == "train":
            folder = Path(words[words.index("--run") + 1])
            folder.mkdir(parents=True)
            seed = int(words[2].removeprefix("seed="))
            record = {"stage": "tokenizer", "split": "validation", "step": 2, "loss": 0.01, "psnr": 30.0 + seed}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            return (1, "error: it diverged") if seed == 1 else (0, "")
        accuracy = {"values": {"caption_accuracy": 0.9}}
        results = {"validation": {"generator/step-2": {"caption_accuracy": accuracy}}}
        (Path(words[1]) / "evaluation.json").write_text(json.dumps({"results": results}))
        return 0, ""

    monkeypatch.setattr(recipes, "_run_kineo", run)
    return calls


def test_a_seed_that_fails_counts_as_zero_and_is_named(kineo, tmp_path, capsys):
    words = [
        "muse-tiny",
        "--seeds",
        "0-2",
        "train.log_every=5",
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path),
    ]
    assert recipes.main(words) == 1
    printed = capsys.readouterr().out
    assert "muse-tiny seed 1" in printed and "exit code 1: error: it diverged" in printed
    assert "| `muse-tiny` | 3 | 2 | 0.000 | 0.900 | 0.900, 0.000, 0.900 |" in printed
    assert all("train.log_every=5" in words for words in kineo if words[0] == "train")
    assert sum(words[0] == "evaluate" for words in kineo) == 2
    (file,) = tmp_path.glob("*recipes*.json")
    assert len(json.loads(file.read_text())["runs"][0]["outcomes"]) == 3


def test_only_one_stage(kineo, tmp_path, capsys):
    words = ["muse-tiny", "--seeds", "0,2", "--only", "tokenizer", "--runs", str(tmp_path), "--out", str(tmp_path)]
    assert recipes.main(words) == 0
    assert all("stages.generator.skip=true" in words for words in kineo)
    assert "| 30.000 | 31.000 | 30.000, 32.000 |" in capsys.readouterr().out
    assert recipes.main([*words[:4], "nothing", *words[5:]]) == 2


def test_findings_are_counted():
    assert "| 2 |" in format_table([Outcome("muse-tiny", 0, findings=["a", "b"])], "caption_accuracy")
