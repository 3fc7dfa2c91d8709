"""Presets tell about themselves in their header, and each is a config that parses."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kineograph.core.errors import ConfigError
from kineograph.run import layers, presets
from kineograph.run.plan import make_plan
from tests.run.calling import kineo

HEAD = """\
# Summary: digits in colour
# Command: kineo train digits
# Hardware: one GPU with
#   8 GiB
# Time: 3 minutes
# Expect: accuracy: 0.9 or so
#
# A remark that is not part of Expect.
name: digits
# Time: a comment further down is not the header's
stages:
  tokenizer: {task: vqgan}
  base: {task: muse}
  critic: {task: muse.critic}
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of the shipped presets."""
    monkeypatch.setattr(layers, "PRESETS", tmp_path)
    return tmp_path


def test_header_and_stages_are_read(shelf: Path) -> None:
    (shelf / "digits.yaml").write_text(HEAD)
    (found,) = presets.list_presets()
    assert found.family == "muse"
    assert found.stages == ("tokenizer", "base", "critic")
    assert found.hardware == "one GPU with 8 GiB"
    assert found.time == "3 minutes"
    assert found.expect == "accuracy: 0.9 or so"


@pytest.mark.parametrize("key", presets.KEYS)
def test_a_missing_line_is_named(shelf: Path, key: str) -> None:
    (shelf / "digits.yaml").write_text(
        "".join(line for line in HEAD.splitlines(True) if not line.startswith(f"# {key}"))
    )
    with pytest.raises(ConfigError, match=f"# {key}:"):
        presets.list_presets()


def test_stages_of_an_extended_preset_are_shown(shelf: Path) -> None:
    (shelf / "digits.yaml").write_text(HEAD)
    (shelf / "digits-more.yaml").write_text(
        HEAD.split("name:")[0] + "preset: digits\nstages:\n  upscaler: {task: muse}\n"
    )
    more = presets.read_preset(shelf / "digits-more.yaml")
    assert more.stages == ("tokenizer", "base", "critic", "upscaler")


def test_the_table_says_it_all(shelf: Path, capsys: pytest.CaptureFixture) -> None:
    (shelf / "digits.yaml").write_text(HEAD)
    presets.print_presets()
    printed = capsys.readouterr().out
    for text in (
        "digits",
        "muse",
        "tokenizer → base → critic",
        "one GPU with 8 GiB",
        "3 minutes",
        "accuracy: 0.9 or so",
        "digits in colour",
    ):
        assert text in printed
    assert max(map(len, printed.splitlines())) <= 100


# What ships ------------------------------------------------------------------------------------------------------


def test_there_are_presets() -> None:
    assert {"vqgan-tiny", "muse-tiny", "muse-digits", "muse-base"} <= set(layers.preset_names())


@pytest.mark.parametrize("name", layers.preset_names())
def test_shipped_preset(name: str) -> None:
    preset = presets.read_preset(layers.PRESETS / f"{name}.yaml")  # every header line is there
    program, command, *words = shlex.split(preset.command)
    assert (program, command, words[0]) == ("kineo", "train", name)
    plan = make_plan(layers.read_config(words))  # as the header says
    assert plan.name == name
    assert plan.preset == name
    assert [stage.name for stage in plan.stages] == list(preset.stages)
    # The saved config alone makes the same plan.
    assert make_plan(plan.tree()).tree() == plan.tree()


def test_one_preset_is_printed_as_its_file(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shelf / "digits.yaml").write_text(HEAD)
    assert kineo("presets", "digits") == 0
    assert capsys.readouterr().out == HEAD
    assert kineo("presets", "digit") == 2
    assert "did you mean digits?" in capsys.readouterr().err


def test_listing_presets_needs_no_torch() -> None:
    code = (
        "import sys; from kineograph.run.presets import list_presets; list_presets(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
