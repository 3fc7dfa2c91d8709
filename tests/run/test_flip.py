"""Mirrored pictures whose captions say left or right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kineograph.run.open_data import open_data
from kineograph.run.plan import make_plan


def notes(folder: Path, flip: float, text: str = "learned") -> list[str]:
    tree = {
        "name": "x",
        "data": {"source": "folder", "folder": str(folder), "size": 16, "flip": flip, "validation": 0},
        "train": {"validate_every": 0, "sample_every": 0},
        "stages": {
            "tokenizer": {"task": "vqgan"},
            "generator": {"task": "muse", "codec": "tokenizer", "text": {"kind": text}},
        },
    }
    lines: list[str] = []
    for stage in make_plan(tree).stages:
        open_data(stage, 0, note=lines.append)
    return [line for line in lines if "data.flip" in line]


@pytest.mark.parametrize("caption", ["a dog on the left", "a dog"])
def test_a_stage_that_reads_captions_warns_of_mirrored_sides(tmp_path: Path, caption: str) -> None:
    for number, text in enumerate([caption, "a cat", "a bird"]):
        Image.fromarray(np.full((16, 16, 3), 80 * number, np.uint8)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(text)
    expected = []
    if "left" in caption:
        expected = [
            "warning: generator: data.flip=0.5 mirrors pictures, but not the words of their captions: 1 of 3 captions name a side, "
            "such as 'a dog on the left'; set data.flip=0"
        ]
    assert notes(tmp_path, 0.5) == expected
    assert notes(tmp_path, 0.0) == []
    assert notes(tmp_path, 0.5, text="none") == []
