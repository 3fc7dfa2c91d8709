"""Text that no config or caption holds: refused by name, or cleaned in one place, before a run begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from kineograph.cli import main
from kineograph.core.config import parse
from kineograph.core.config_file import load_file
from kineograph.core.distributed import print_note
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.prompt import Prompt
from kineograph.core.run_folder import write_json
from kineograph.core.text_file import MAX_CAPTION, clean_caption, parse_json
from kineograph.data.arrays import read_captions_beside
from kineograph.data.captions import strip_captions
from kineograph.data.check import check_folder
from kineograph.data.dataset import check_value
from kineograph.data.folder import Folder, FolderConfig
from kineograph.run.layers import is_override, read_config
from kineograph.sample.request import SampleRequest
from tests.data.tar_shards import opened, picture, write

HALF = "\ud83d"  # the first half of 😀 in UTF-16


# Captions -------------------------------------------------------------------------------------------------------------


def test_half_an_emoji_is_replaced_in_every_source(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": f"a  dot {HALF}"}))
    folder = Folder.open(FolderConfig(folder=str(tmp_path), size=8), "train", 0)
    assert folder.caption(0) == "a dot \ufffd"
    assert check_folder(tmp_path).captions == ["a dot \ufffd"]

    json_caption = json.dumps({"text": f"{HALF} dot"}).encode()
    write(tmp_path / "t" / "a.tar", [("a.png", picture(1)), ("a.json", json_caption)])
    assert opened(tmp_path / "t").caption(0) == "\ufffd dot"

    np.save(tmp_path / "clips.npy", np.zeros((1, 2, 8, 8), np.uint8))
    (tmp_path / "captions.jsonl").write_text(json.dumps({"text": HALF}))
    assert read_captions_beside(tmp_path / "clips.npy") == [("\ufffd",)]
    assert check_value("caption", HALF, "item") == ("\ufffd",)
    assert clean_caption("\ud83d\ude00 whole") == "😀 whole"


def test_half_an_emoji_in_a_prompt_is_refused():
    with pytest.raises(InputError, match="half a character"):
        SampleRequest("run", prompts=[HALF])


# Config files ---------------------------------------------------------------------------------------------------------

BOMB = "a: &a [1, 1]\n" + "".join(
    f"b{n}: &b{n} [*{'a' if n == 0 else f'b{n - 1}'}, *{'a' if n == 0 else f'b{n - 1}'}]\n" for n in range(40)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"b{n}: &b{n} {{<<: [*{'a' if n == 0 else f'b{n - 1}'}, *{'a' if n == 0 else f'b{n - 1}'}]}}\n" for n in range(40)
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "train: {lr: 1}\nseed: 3\ntrain: {steps: 2}\n", "key train is given twice, again in line 3"),
        ("a.yaml", "train: {lr: 1, lr: 2}", "key lr is given twice"),
        ("a.json", '{"seed": 1, "seed": 2}', "key seed is given twice"),
        ("a.yaml", "[" * 5_000, "nested too deeply"),
        ("a.json", "[" * 50_000, "nested too deeply"),
        ("a.yaml", "a: " + "[" * 60 + "]" * 60, "nested deeper than 50"),
        ("a.yaml", BOMB, "more than 1,000,000 values"),
        ("a.yaml", MERGES, "more than 10,000 keys"),
        ("a.yaml", "a: &a [*a]", "nested deeper|more than"),
        ("a.yaml", '"prompts": ["\\uD83D"]', "half a character"),
        ("a.json", '{"prompts": ["\\ud83d"]}', "half a character"),
        ("a.yaml", 'data: {folder: "a\\0b"}', "zero byte"),
        ("a.yaml", "stages: {1: {task: muse}}", "1 is not the name of a key of stages"),
        ("a.yaml", "name: !!binary aGk=", "name=.* is a bytes"),
        ("a.yaml", "name: !!set {a, b}", "is a set"),
        ("a.yaml", "seed: " + "9" * 5_000, "digits"),
        ("a.yaml", "a: !!timestamp 2026-13-45", "month must be"),
        ("a.yaml", "name: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a.yaml", "a: *nowhere", "undefined alias"),
    ],
)
def test_what_no_config_holds_is_refused_by_name(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_file(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_an_endless_file_is_refused(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="more than 67,108,864 bytes are no config"):
        load_file(tmp_path / name)


def test_merge_keys_and_aliases_still_work(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\n")
    assert load_file(tmp_path / "a.yaml") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}


def test_deep_json_is_a_value_error():
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 200_000)


# Arguments ------------------------------------------------------------------------------------------------------------


def test_a_long_override_is_an_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"prompts=[{'x' * 5_000}]"
    assert is_override(text)
    assert read_config(["muse-tiny", text])["prompts"] == ["x" * 5_000]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "x" * 5_000],
        ["train", "x" * 5_000 + ".yaml"],
        ["train", "vqgan-tiny", "prompts=" + "x" * 5_000],
        ["train", "vqgan-tiny", "--dry-run", "--run", "x" * 5_000],
        ["train", "vqgan-tiny", "name=" + "x" * 5_000],
        ["sample", "x" * 5_000],
        ["cache", "x" * 5_000],
        ["runs", "x" * 5_000],
        ["compare", "x" * 5_000],
        ["data", "check", "x" * 5_000],
        ["import", "x" * 5_000, "--from", "diffusers"],
        ["evaluate", "x" * 5_000],
        ["doctor", "x" * 5_000],
        ["export", "x" * 5_000, "y", "--to", "safetensors"],
        ["data", "make", "moving-digits", "--out", "x" * 5_000, "--count", "1"],
        ["weights", "get", "inception-v3", "--from", "x" * 5_000],
        ["train", "a." * 5_000 + "a=1"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_long_arguments_are_refused(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "unexpected" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_arguments_that_are_not_utf8_are_refused_by_name(tmp_path):
    command = [sys.executable, "-c", "from kineograph.cli import main; main()", "train", b"caf\xe9.yaml"]
    result = subprocess.run(
        command, capture_output=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONUTF8": "1"}
    )
    assert result.returncode == 2
    assert rb"argument 2 is not UTF-8: b'caf\xe9.yaml'" in result.stderr


def test_a_file_name_that_is_not_utf8_can_be_listed(tmp_path):
    write_json(tmp_path / "a.json", {"path": os.fsdecode(b"caf\xe9.png")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"path": os.fsdecode(b"caf\xe9.png")}


def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path, capsys):
    """A name could move the cursor, or set the window's title."""
    (tmp_path / "a\x1b]0;b\x07.png").write_bytes(b"no picture")
    Image.new("RGB", (8, 8)).save(tmp_path / "c\x1b[2J.png")
    shown = "\\x1b[2J.png"
    for words in (["data", "check", str(tmp_path)], ["data", "show", str(tmp_path), "--out", str(tmp_path / "x.png")]):
        with pytest.raises(SystemExit):
            main(words)
    with pytest.raises(SystemExit):
        main(["data", "check", str(tmp_path / "d\x1b[2J.png")])
    print_note(str(tmp_path / "c\x1b[2J.png"))
    (tmp_path / "runs" / "e\x1b[2J.png").mkdir(parents=True)
    (tmp_path / "runs" / "e\x1b[2J.png" / "config.yaml").write_text("stages: {a: {task: vqgan}}")
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path / "runs")])
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert shown in printed.out and shown in printed.err


def test_text_without_end_is_no_caption():
    """A tokenizer would take gigabytes for it."""
    text = "x" * (MAX_CAPTION + 1)
    assert len(clean_caption(text)) == len(strip_captions([text])[0]) == MAX_CAPTION
    with pytest.raises(InputError, match="1,048,577 characters: shorten it to at most 1,048,576"):
        SampleRequest("run", prompts=[text])
    with pytest.raises(ConfigError, match="a prompt has at most 1,048,576"):
        parse(Prompt, {"prompt": text}, "prompts.0")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "captions.txt"])
def test_captions_that_do_not_fit_into_memory_are_named(tmp_path, name):
    """A file with holes takes no space on the disk."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    np.save(tmp_path / "clips.npy", np.zeros((2, 8, 8), np.uint8))
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(
        InputError, match=rf"{name} has 1,099,511,627,776 bytes, and no more than 4,294,967,296 are read"
    ):
        if name == "captions.txt":
            read_captions_beside(tmp_path / "clips.npy")
        else:
            Folder.open(FolderConfig(folder=str(tmp_path), validation=0), "train", 0)
    check_folder(tmp_path)


@pytest.mark.parametrize("first", ["file_name,text\n", ""])
def test_a_csv_of_one_endless_field_is_named(tmp_path, first):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text(f'{first}"a.png,{"x" * 200_000}')
    with pytest.raises(InputError, match=r"metadata.csv, line \d, is no CSV: field larger than field limit"):
        Folder.open(FolderConfig(folder=str(tmp_path), validation=0), "train", 0)
    assert any("is no CSV" in problem.reason for problem in check_folder(tmp_path).problems)
