"""Decoded items in memory: the same samples, and only where they fit."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kineograph.core.config import parse
from kineograph.core.errors import Unreadable
from kineograph.core.memory import MainMemory
from kineograph.core.safe_media import Meter
from kineograph.data import decoded_cache
from kineograph.data.decode import load_media
from kineograph.data.decoded_cache import keep_if_small
from kineograph.data.folder import Folder
from kineograph.data.loader import Loader
from tests.data.conftest import write_video


@pytest.fixture
def media(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.jpg", "c.webp", "d.png"):
        Image.fromarray(rng.integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(tmp_path / name)
    Image.fromarray(rng.integers(0, 255, (60, 80, 4), dtype=np.uint8)).save(tmp_path / "e.png")
    frames = [Image.fromarray(rng.integers(0, 255, (60, 80, 3), dtype=np.uint8)) for _ in range(7)]
    for name in ("f.gif", "g.webp"):
        frames[0].save(
            tmp_path / name, save_all=True, append_images=frames[1:], duration=[50, 100, 150, 50, 80, 40, 90]
        )
    turned = Image.Exif()
    turned[0x0112] = 6
    frames[0].save(tmp_path / "h.jpg", exif=turned)
    return tmp_path


def opened(folder: Path, **options) -> Folder:
    return Folder.open(
        parse(Folder.Config, {"folder": str(folder), "size": [16, 24], "validation": 0} | options, "data"), "train", 0
    )


def read_epochs(source: Folder, workers: int = 0) -> list[bytes]:
    return [
        batch.pixels.numpy().tobytes() for step in Loader(source, 3, 4, workers=workers).steps(0, 6) for batch in step
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crop": "random", "channels": 1},
        {"crop": "resized", "flip": 0.5, "frames": 3, "fps": 10},
        {"rotate": True, "flip": 0.5, "frames": 3},
        {"resize": "contain", "channels": 4},
        {"frames": 2, "skip_frames": 1, "crop": "random"},
        {"buckets": {"sizes": [[16, 24], [24, 16]]}},
    ],
)
def test_samples_are_the_same(media, options, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    expected = read_epochs(opened(media, **options))
    source = opened(media, **options)
    source.keep_decoded(2**30)
    assert read_epochs(source) == expected
    assert source._decoded.used > 0
    assert pickle.loads(pickle.dumps(source))._decoded.used == 0  # a worker begins with nothing


def test_a_second_epoch_opens_no_file(media, monkeypatch):
    source = opened(media, crop="random")
    assert keep_if_small(source, 1).startswith(
        "8 items are kept decoded in memory, about 1 MB; train.keep_decoded=false"
    )
    list(Loader(source, 3, 8).steps(0, 1))
    monkeypatch.setattr(Path, "open", None)
    monkeypatch.setattr("kineograph.data.decode.read_media", None)
    list(Loader(source, 3, 8).steps(1, 4))


def test_items_that_do_not_fit_are_decoded_again(media, monkeypatch):
    """A set is kept as a whole or not at all; a wrong estimate does not exceed the limit."""
    monkeypatch.setattr(decoded_cache, "main_memory", lambda: MainMemory(2**21, 2**21))
    assert keep_if_small(opened(media, crop="random"), 1) is not None  # 20 frames of 80 × 60 × 4 bytes
    assert keep_if_small(opened(media, crop="random"), 2) is None
    assert keep_if_small(opened(media), 2) is not None  # resized, they are small
    monkeypatch.setattr(decoded_cache, "_MAX_FRAMES", 19)
    assert keep_if_small(opened(media), 1) is None
    source = opened(media, crop="random")
    expected = read_epochs(source)
    source.keep_decoded(50_000)
    assert read_epochs(source) == expected
    assert source._decoded.used <= 50_000


def test_an_unreadable_file_stays_unreadable(media):
    (media / "broken.png").write_bytes(b"no picture")
    source = opened(media)
    source.keep_decoded(2**30)
    loader = Loader(source, 3, 9)
    list(loader.steps(0, 2))
    assert set(loader.skipped) == {"broken.png"}


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
@pytest.mark.parametrize("crop", ["center", "random"])
def test_a_file_too_large_to_keep_is_not_decoded_whole(tmp_path, monkeypatch, suffix, crop):
    """An hour of video among small clips would fill the memory before its size is known."""
    path = tmp_path / f"a{suffix}"
    if suffix == ".gif":
        images = [Image.new("RGB", (16, 16), (number, 0, 0)) for number in range(40)]
        images[0].save(path, save_all=True, append_images=images[1:])
    else:
        write_video(path, np.zeros((40, 16, 16, 3), np.uint8))
    counted = []
    count_frame = Meter.count_frame
    monkeypatch.setattr(Meter, "count_frame", lambda *args: (counted.append(1), count_frame(*args)))
    options = opened(tmp_path, size=16, crop=crop)._options
    with pytest.raises(Unreadable, match="more than 3,000 bytes"):
        load_media(path, suffix, "a", options, 3_000)
    assert len(counted) <= 6
