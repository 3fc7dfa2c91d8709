"""Before training: the shares of items that are padded, cropped, enlarged or turned gray."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kineograph.data.fit_summary import summarise_fit
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.run.layers import read_config
from kineograph.run.plan import make_plan


def summarise(**keys: Any) -> str:
    config = parse_data_config({"validation": 0, **keys})
    return "\n".join(summarise_fit(open_source(config, "train", 0), config))


def folder_summary(root: Path, **keys: Any) -> str:
    return summarise(source="folder", folder=str(root), **keys)


def save(path: Path, size: tuple[int, int] = (32, 32), colour: Any = (90, 90, 90), frames: int = 1) -> None:
    pictures = [Image.new("RGB", size, colour) for _ in range(frames)]
    for index, picture in enumerate(pictures):  # Pillow merges equal frames
        picture.putpixel((index, 0), (255, 255, 255))
    options = {"save_all": True, "append_images": pictures[1:], "duration": 100} if frames > 1 else {}
    pictures[0].save(path, **options)


def test_nothing_is_said_if_nothing_is_lost(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    save(tmp_path / "b.png", (36, 32))
    assert folder_summary(tmp_path, size=32) == ""
    assert folder_summary(tmp_path, size=32, channels=1) == ""  # gray, although stored as RGB


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"size": 32}, "50% cropped: more than 20% of the picture lies outside data.size=32 × 32; data.resize=contain"),
        ({"size": 64}, "100% enlarged: smaller than data.size=64 × 64; lower data.size"),
        ({"size": 32, "channels": 1}, "50% turned gray: in colour, and data.channels=1; set data.channels=3"),
        ({"size": 32, "frames": 5}, "100% single pictures: one real frame of data.frames=5; set data.frames=1"),
    ],
)
def test_pictures(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    save(tmp_path / "gray.png")
    save(tmp_path / "wide.png", (64, 32), (200, 10, 10))
    (tmp_path / "broken.png").write_bytes(b"broken")
    assert line in folder_summary(tmp_path, **keys)


def test_a_resize_that_shows_everything_crops_nothing(tmp_path: Path) -> None:
    save(tmp_path / "wide.png", (64, 32))
    for resize in ("contain", "stretch"):
        assert folder_summary(tmp_path, size=32, resize=resize) == ""


def test_clips_in_a_preset_for_pictures(tmp_path: Path) -> None:
    save(tmp_path / "a.gif", frames=4)
    save(tmp_path / "b.png")
    line = "50% clips, of which one frame at a time is used: data.frames=1; a generator of clips needs more"
    assert line in folder_summary(tmp_path, size=32)
    assert "of which one frame" not in folder_summary(tmp_path, size=32, frames=3)


def test_short_clips(tmp_path: Path) -> None:
    save(tmp_path / "short.gif", frames=5)
    save(tmp_path / "long.gif", frames=20)
    line = "50% padded: shorter than data.frames=8 at data.fps=10; lower data.frames, or raise data.fps"
    assert line in folder_summary(tmp_path, size=32, frames=8, fps=10)
    assert "padded" not in folder_summary(tmp_path, size=32, frames=5, fps=10)
    assert "50% padded: shorter than data.frames=8; lower" in folder_summary(tmp_path, size=32, frames=8)


def test_shards(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for index in range(2):
            file = io.BytesIO()
            Image.new("RGB", (64, 32), (200, 0, 0)).save(file, "PNG")
            member = tarfile.TarInfo(f"{index}.png")
            member.size = file.tell()
            file.seek(0)
            tar.addfile(member, file)
    text = summarise(source="webdataset", shards=str(tmp_path), size=32, channels=1)
    assert "100% cropped" in text and "100% turned gray" in text


def test_arrays(tmp_path: Path) -> None:
    clips = np.zeros((4, 6, 3, 16, 16), np.uint8)
    clips[:, :, 0] = 200
    np.save(tmp_path / "videos.npy", clips)
    text = summarise(source="memmap", folder=str(tmp_path), size=32, frames=8, channels=1)
    assert "100% padded" in text and "100% enlarged" in text and "100% turned gray" in text
    assert summarise(source="memmap", folder=str(tmp_path), size=16, frames=6) == ""


def test_generated_items_lose_nothing() -> None:
    assert summarise(source="moving_digits", size=32, frames=9, channels=1) == ""


@pytest.mark.parametrize("preset", ["nuwa-tiny", "phenaki-tiny", "cogvideox-tiny"])
def test_own_files_are_read_in_colour(tmp_path: Path, preset: str) -> None:
    def channels(*settings: str) -> set[int]:
        return {stage.spec.data.channels for stage in make_plan(read_config([preset, *settings])).stages}

    own = ["data.source=folder", f"data.folder={tmp_path}"]
    assert channels() == {1}
    assert channels(*own) == {3}
    assert channels("data.channels=1", *own) == {1}
    assert channels(*own, "data.channels=1") == {1}
    assert channels("data.source=memmap", f"data.folder={tmp_path}") == {1}


def test_the_codec_of_sketches_stays_gray(tmp_path: Path) -> None:
    settings = ["data.source=folder", f"data.folder={tmp_path}", f"data.sketches={tmp_path}"]
    plan = make_plan(read_config(["nuwa-sketch-tiny", *settings]))
    assert sorted(stage.spec.data.channels for stage in plan.stages) == [1, 3, 3]
