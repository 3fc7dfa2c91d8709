"""Endings that are read, and what `kineo data check` says about the others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from kineograph.core.errors import Unreadable
from kineograph.data.check import Report, check_folder
from kineograph.data.folder import Folder
from tests.data.conftest import write_video


def picture(path: Path, **options: Any) -> Path:
    Image.new("RGB", (16, 16), (200, 30, 30)).save(path, **options)
    return path


def reasons(report: Report) -> dict[str, str]:
    return {problem.path: problem.reason for problem in report.problems}


def opened(root: Path, **options: Any) -> Folder:
    return Folder.open(Folder.Config(folder=str(root), validation=0, **options), "train", 0)


@pytest.mark.parametrize(("suffix", "codec"), [(".avif", "avif"), (".jp2", "jpg_2000")])
def test_pictures_of_newer_formats(tmp_path: Path, rng: np.random.Generator, suffix: str, codec: str) -> None:
    if not features.check(codec):
        pytest.skip("this Pillow was built without it")
    picture(tmp_path / f"a{suffix}")
    pixels = opened(tmp_path, size=16).read(0, rng).pixels
    assert pixels is not None
    assert pixels.float().mean((0, 2, 3)).tolist() == pytest.approx([200, 30, 30], abs=8)
    assert not check_folder(tmp_path).problems
    with pytest.raises(Unreadable, match="too large: 16 × 16 pixels"):
        opened(tmp_path, size=16, limits={"pixels": 100}).read(0, rng)
    data = (tmp_path / f"a{suffix}").read_bytes()
    (tmp_path / f"a{suffix}").write_bytes(data[: len(data) // 2])
    assert list(reasons(check_folder(tmp_path))) == [f"a{suffix}"]


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [(".mpg", "mpeg1video"), (".ts", "libx264"), (".flv", "flv"), (".3gp", "libx264"), (".wmv", "wmv2")],
)
def test_clips_in_other_containers(tmp_path: Path, counting: Any, numbers: Any, suffix: str, codec: str) -> None:
    write_video(tmp_path / f"a{suffix}", counting(30, 96, 128), fps=25, codec=codec)
    source = opened(tmp_path, size=32, frames=8)
    assert check_folder(tmp_path).media[0].frames == 30  # all of them, from the first
    for seed in range(6):
        sample = source.read(0, np.random.default_rng(seed))
        assert sample.frame_mask is not None and sample.frame_mask.all()
        shown = numbers(sample.pixels)
        assert shown == list(range(shown[0], shown[0] + 8))


def test_files_that_are_not_read_are_listed_by_ending(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    for name in ("b.heic", "c.HEIC", "d.svg", "e.xml", "README.md", "LICENSE", "a.txt"):
        (tmp_path / name).write_text("x")
    report = check_folder(tmp_path)
    line = "not read: 2 .heic (convert them to PNG or JPEG), 1 .svg (convert them to PNG or JPEG), 1 .xml"
    assert line in report.lines() and not report.problems


def test_a_folder_that_is_read_entirely_says_nothing(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "red"}')
    (tmp_path / "a.txt").write_text("shadowed")
    assert not any("not read" in line for line in check_folder(tmp_path).lines())


def test_captions_in_json_files_are_named(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        picture(tmp_path / name)
    (tmp_path / "a.json").write_text('{"caption": "red", "width": 16}')
    (tmp_path / "b.json").write_text('{"caption": "red"}')
    (tmp_path / "b.txt").write_text("red")  # as img2dataset writes them
    (tmp_path / "captions.json").write_text('{"a.png": "red", "b.png": "red"}')
    (tmp_path / "list.json").write_text('[{"path": "a.png", "text": "red"}]')
    (tmp_path / "workflow.json").write_text('{"prompt": {"1": {}}}')
    found = reasons(check_folder(tmp_path))
    assert found["a.json"] == "a caption in a .json is not read: write the text into a .txt of the same name"
    assert all(
        "captions in a .json are not read: write metadata.jsonl" in found[f"{n}.json"] for n in ("captions", "list")
    )
    assert found.keys() == {"a.json", "captions.json", "list.json", "a.png", "c.png"}


def test_caption_files(tmp_path: Path) -> None:
    for name in "abc":
        picture(tmp_path / f"{name}.png")
    (tmp_path / "a.caption").write_text("of a")
    (tmp_path / "b.caption").write_text("shadowed")
    (tmp_path / "b.txt").write_text("of b")
    (tmp_path / "gone.caption").write_text("of nothing")
    source = opened(tmp_path, size=16)
    assert [source.caption(index) for index in range(3)] == ["of a", "of b", None]
    assert reasons(check_folder(tmp_path)) == {
        "gone.caption": "a caption without image or clip",
        "c.png": "no caption",
    }


COCO = {"info": {}, "images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "caption": "red"}]}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("captions.csv", "image,caption\na.png,red\n", "columns caption, image: .* name it metadata.csv"),
        ("list.tsv", "image\tcaption\na.png\tred\n", "columns caption, image: .* name it metadata.csv"),
        ("captions.csv", "image;caption\na.png;red, round\n", "columns caption, image: .* name it metadata.csv"),
        ("captions.csv", "image\tcaption\na.png\tred\n", "columns caption, image: .* name it metadata.csv"),
        (
            "metadata.csv",
            "file_name;title\na.png;red\n",
            "no column text, caption or prompt, but file_name, title: rename",
        ),
        (
            "metadata.csv",
            "file_name,title\na.png,red\n",
            "no column text, caption or prompt, but file_name, title: rename",
        ),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "title": "red"}',
            "no key text, caption or prompt .* file_name, title",
        ),
        (
            "metadata.jsonl",
            '{"image": "a.png", "id": 3, "description": "red"}\n' * 3,
            "^no key file_name, video, media_path or path in any line, but image, id, description: "
            "rename that of the files, and that of the captions to text$",
        ),
        ("metadata.jsonl", '{"image": "a.png", "text": "red"}\n' * 2, "but image, text: rename that of the files$"),
        ("captions_train2017.json", json.dumps(COCO), "COCO's form are not read: write metadata.jsonl"),
    ],
)
def test_captions_in_unknown_forms_are_problems(tmp_path: Path, name: str, content: str, reason: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / name).write_text(content)
    report = check_folder(tmp_path)
    assert [problem.path for problem in report.problems] == [name]

    assert re.search(reason, report.problems[0].reason)


def test_other_lists_are_no_problem(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "broken.jsonl").write_bytes(b"\xff\x00{")
    (tmp_path / "numbers.csv").write_text("1\n2\n")
    assert not check_folder(tmp_path).problems
