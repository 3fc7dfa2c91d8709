"""Rows stay rows: whatever a clip is read from, a crop to another aspect takes away what is too wide from the width, and what is too high from
the height. Where an implementation takes height for width, shapes may still fit; the pixels do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from kineograph.data.open_source import open_source, parse_data_config
from tests.data.conftest import MakeVideo

FRAMES = 3


def ramps(height: int, width: int) -> np.ndarray:
    """T H W 3: red grows to the right, green downwards, from 0 to 240."""
    red = np.broadcast_to(np.linspace(0, 240, width)[None, :], (height, width))
    green = np.broadcast_to(np.linspace(0, 240, height)[:, None], (height, width))
    frame = np.stack([red, green, np.zeros((height, width))], -1).round().astype(np.uint8)
    return np.broadcast_to(frame, (FRAMES, *frame.shape)).copy()


class Clips(Dataset):
    def __init__(self, clip: np.ndarray) -> None:
        self.clip = torch.from_numpy(clip).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.clip


def read(kind: str, clip: np.ndarray, size: tuple[int, int], folder: Path, make_video: MakeVideo) -> np.ndarray:
    """The clip as a run of this size reads it from a file, an array or a Dataset: T H W 3."""
    shared = {"size": list(size), "frames": FRAMES, "validation": 0}
    if kind == "dataset":
        source = open_source(parse_data_config({"source": "dataset", **shared}), "train", 0, Clips(clip))
    elif kind == "memmap":
        np.save(folder / "videos.npy", clip.transpose(0, 3, 1, 2)[None])
        source = open_source(parse_data_config({"source": "memmap", "folder": str(folder), **shared}), "train", 0)
    else:
        if kind == "gif":
            first, *others = [Image.fromarray(frame) for frame in clip]
            first.save(folder / "a.gif", save_all=True, append_images=others, duration=125)
        elif kind == "png":
            Image.fromarray(clip[0]).save(folder / "a.png")
        else:
            make_video(folder / f"a.{kind}", clip, fps=8)
        source = open_source(parse_data_config({"source": "folder", "folder": str(folder), **shared}), "train", 0)
    pixels = source.read(0, np.random.default_rng(0)).pixels
    assert pixels is not None
    return pixels.permute(0, 2, 3, 1).numpy().astype(float)


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif", "png", "dataset", "memmap"])
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [
        (48, 96, (48, 48)),  # landscape to square
        (96, 48, (48, 48)),  # portrait to square
        (48, 96, (64, 32)),  # landscape to portrait
        (96, 48, (32, 64)),  # portrait to landscape
        (48, 96, (24, 48)),  # the same aspect: all of it
    ],
)
def test_crops_keep_their_axes(
    tmp_path: Path, make_video: MakeVideo, kind: str, height: int, width: int, size: tuple[int, int]
) -> None:
    found = read(kind, ramps(height, width), size, tmp_path, make_video)
    assert found.shape[1:] == (*size, 3)
    scale = max(size[0] / height, size[1] / width)  # until the clip covers the size
    for channel, axis, whole, kept in (
        (0, 2, width, size[1]),
        (1, 1, height, size[0]),
    ):  # red along columns, green along rows
        seen = 240 * min(1.0, kept / scale / whole)  # of the ramp, in the middle
        line = found[0, :, :, channel].mean(axis=0 if axis == 2 else 1)
        across = found[0, :, :, channel].mean(axis=1 if axis == 2 else 0)
        assert abs((line[-1] - line[0]) - seen) < 24, (kind, channel)
        assert abs(line.mean() - 120) < 12, (kind, channel)
        assert np.ptp(across) < 24, (kind, channel)  # nothing of it runs the other way
