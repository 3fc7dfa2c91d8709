"""Parts of a video: data.start, data.end, data.skip_frames and data.cut read the frames that they should, and no split shares a video."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kineograph.core.errors import ConfigError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source
from kineograph.data.check import check_folder
from kineograph.data.folder import Folder, FolderConfig
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.data.startup_scan import scan
from kineograph.data.trim import CutConfig, Trim
from tests.data.conftest import write_video
from tests.data.tar_shards import write

FPS, COUNT = 10, 40  # a clip of 4 s


def ramp(count: int = COUNT) -> np.ndarray:
    """Frame n is a flat gray of 5 n."""
    return np.stack([np.full((16, 16, 3), 5 * number, np.uint8) for number in range(count)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same clip as MP4 and GIF, and a picture."""
    home = tmp_path / "clips"
    home.mkdir()
    write_video(home / "a.mp4", ramp(), FPS)
    frames = [Image.fromarray(frame) for frame in ramp()]
    frames[0].save(home / "b.gif", save_all=True, append_images=frames[1:], duration=1000 // FPS)
    frames[9].save(home / "c.png")
    return home


def opened(split: str = "train", **keys: object) -> Source:
    tree = {"source": "folder", "size": 16, "frames": 5, "validation": 0, "max_unreadable": 1, **keys}
    return open_source(parse_data_config(tree), split, 0)  # type: ignore[arg-type]


def frames_seen(source: Source, index: int, draws: int = 25) -> set[int]:
    """Numbers of the frames in many draws of one item."""
    seen: set[int] = set()
    for draw in range(draws):
        sample = source.read(index, numpy_rng(draw))
        assert sample.pixels is not None and sample.frame_mask is not None
        means = sample.pixels[sample.frame_mask].float().mean(dim=(1, 2, 3))
        seen |= {round(float(mean) / 5) for mean in means}
    return seen


@pytest.mark.parametrize(
    ("keys", "first", "last"),
    [
        ({"start": 1}, 10, 39),
        ({"end": 2.5}, 0, 24),
        ({"end": -1}, 0, 29),
        ({"skip_frames": 3}, 3, 36),
        ({"start": 1, "end": -1, "skip_frames": 2}, 12, 27),
        ({"start": 1, "end": 1.5}, 10, 14),
        ({"start": 1, "fps": 10}, 10, 39),
    ],
)
@pytest.mark.parametrize("index", [0, 1], ids=["mp4", "gif"])
def test_only_frames_inside_are_read(folder: Path, keys: dict[str, float], first: int, last: int, index: int) -> None:
    source = opened(folder=str(folder), **keys)
    seen = frames_seen(source, index)
    assert min(seen) >= first and max(seen) <= last
    assert len(seen) >= min(last - first + 1, 8) and isinstance(source, Folder)
    assert source.measure(index).frames == last - first + 1
    assert frames_seen(source, 2, 1) == {9}  # a picture is whole


def test_a_clip_of_which_nothing_is_left_is_counted(folder: Path) -> None:
    write_video(folder / "short.mp4", ramp(8), FPS)
    source = opened(folder=str(folder), start=1)
    (skipped,) = scan(source, 1.0)
    assert skipped.path == "short.mp4" and "nothing is left of its 0.8 s with data.start=1" in skipped.reason
    with pytest.raises(Unreadable, match="nothing is left"):
        source.read(3, numpy_rng(0))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"start": 5, "end": 3}, "data.*end=3 with start=5 leaves nothing"),
        ({"end": 0}, "end=0"),
        ({"cut": {"seconds": 1, "overlap": 1}}, "overlap=1 must be less than seconds=1"),
        ({"cut": {}}, "data.cut.seconds is required"),
    ],
)
def test_keys_that_leave_nothing_are_refused(folder: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(folder=str(folder), **keys)


def test_shards_are_trimmed_too(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "0.tar", [("0.mp4", (folder / "a.mp4").read_bytes())])
    source = opened(source="webdataset", shards=str(tmp_path / "0.tar"), start=1, end=-1)
    seen = frames_seen(source, 0)
    assert min(seen) >= 10 and max(seen) <= 29


def test_cuts() -> None:
    assert CutConfig(seconds=2).spans(0, 5) == [(0, 2), (2, 4)]
    assert CutConfig(seconds=2, overlap=0.5).spans(1, 6.5) == [(1, 3), (2.5, 4.5), (4, 6)]
    assert CutConfig(seconds=9).spans(0, 5) == [(0, 5)]
    assert Trim(start=1).span(4, 10, (0.5, 3)) == (1, 3)


def test_a_long_clip_is_cut_into_items(folder: Path) -> None:
    (folder / "a.txt").write_text("a ramp")
    source = opened(folder=str(folder), cut={"seconds": 1.5, "overlap": 0.5}, start=0.5)
    names = [source.identity(index) for index in range(len(source))]
    assert names == [
        "a.mp4@0.5-2", "a.mp4@1.5-3", "a.mp4@2.5-4", "b.gif@0.5-2", "b.gif@1.5-3", "b.gif@2.5-4", "c.png",
    ]  # fmt: skip
    assert "data.cut: 2 clips are cut into 6 of 1.5 s" in str(source.note)
    for index, (first, last) in enumerate([(5, 19), (15, 29), (25, 39)]):
        seen = frames_seen(source, index)
        assert min(seen) >= first and max(seen) <= last
    assert source.caption(0) == source.caption(2) == "a ramp"
    assert "2 s at their ends are left out" in str(opened(folder=str(folder), cut={"seconds": 1.5}).note)
    digests = {opened(folder=str(folder), cut={"seconds": s}).items_digest() for s in (1, 2)}
    assert len(digests) == 2


def test_captioned_parts_are_cut_inside(folder: Path) -> None:
    rows = [
        {"file_name": "a.mp4", "start": 0, "end": 2, "text": "dark"},
        {"file_name": "a.mp4", "start": 2, "text": "bright"},
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = opened(folder=str(folder), cut={"seconds": 0.8})
    found = {source.identity(index): source.caption(index) for index in range(5)}
    assert found == {
        "a.mp4@0-0.8": "dark", "a.mp4@0.8-1.6": "dark", "a.mp4@2-2.8": "bright", "a.mp4@2.8-3.6": "bright",
        "b.gif@0-0.8": None,
    }  # fmt: skip


def test_no_video_is_in_two_splits(tmp_path: Path) -> None:
    home = tmp_path / "clips"
    home.mkdir()
    for number in range(6):
        write_video(home / f"{number}.mp4", ramp(20), FPS)
    keys = {"folder": str(home), "cut": {"seconds": 0.5}, "validation": 0.4}
    parts = []
    for split in ("train", "validation"):
        source = opened(split, **keys)
        parts.append({source.identity(index).partition("@")[0] for index in range(len(source))})
        assert len(source) == 4 * len(parts[-1])
    assert not parts[0] & parts[1] and len(parts[0] | parts[1]) == 6


def test_the_check_counts_cuts(folder: Path) -> None:
    config = FolderConfig(folder=str(folder), cut=CutConfig(seconds=1), start=3)
    lines = check_folder(folder, config).lines()
    assert any("data.cut: 2 clips are cut into 2 of 1 s" in line for line in lines)
    report = check_folder(folder, FolderConfig(folder=str(folder), start=5))
    assert {path for path, _ in report.problems} == {"a.mp4", "b.gif"}
