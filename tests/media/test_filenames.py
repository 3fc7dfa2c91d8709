"""No caption overwrites another's file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kineograph.core.errors import InputError
from kineograph.media.filenames import MAX_SLUG, check_writable, reserve_path, slugify


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A red 3 moves left!", "a-red-3-moves-left"),
        ("  sept « bleu », à gauche ", "sept-bleu-à-gauche"),
        ("一只红色的猫 跳", "一只红色的猫-跳"),
        ("../../etc/passwd", "etc-passwd"),
        ("a_b.c\n\td", "a-b-c-d"),
        ("", "unconditional"),
        (" \n", "unconditional"),
        (None, "unconditional"),
    ],
)
def test_slug(caption, expected):
    assert slugify(caption) == expected


def test_slug_of_pictographs_is_neither_empty_nor_shared():
    assert slugify("🎉") != slugify("🐈")
    assert slugify("🎉").isascii()


@pytest.mark.parametrize("caption", ["x" * 300, "word " * 100, "猫" * 200, "猫 " * 200, "é" * 79 + "猫"])
def test_long_captions_are_cut_between_characters(caption):
    name = slugify(caption)
    assert 1 < len(name.encode()) <= MAX_SLUG
    assert not name.endswith("-")
    assert set(name) <= set(slugify(caption[:5])) | set("-猫")


def test_identical_captions_get_files_of_their_own(tmp_path):
    paths = [reserve_path(tmp_path / "new", slugify("a 3"), 0, ".gif") for _ in range(5)]
    assert [path.name for path in paths] == [f"a-3-{n:04d}.gif" for n in range(5)]


def test_another_format_does_not_share_a_sidecar(tmp_path):
    first = reserve_path(tmp_path, "a", 0, ".gif")
    first.with_suffix(".json").touch()
    first.unlink()
    assert reserve_path(tmp_path, "a", 0, ".mp4").name == "a-0001.mp4"
    assert reserve_path(tmp_path, "a", 7, ".png").name == "a-0007.png"


def test_concurrent_callers_never_meet(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: reserve_path(tmp_path, "a", 0, ".gif"), range(64)))
    assert len(set(paths)) == 64


def test_a_name_that_cannot_be_written_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        reserve_path(tmp_path, "x" * 300, 0, ".gif")


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    check_writable(tmp_path)
    check_writable(tmp_path / "yet" / "to come")
    for place in ("file", "file/below"):
        with pytest.raises(InputError, match=r"cannot write to .*file is a file"):
            check_writable(tmp_path / place)
        with pytest.raises(InputError, match="cannot write to"):
            reserve_path(tmp_path / place, "a", 1, ".gif")
