"""Read back what was written: pixels and frame rate."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageSequence

from kineograph.data.channels import to_channels
from kineograph.media.clips import read_frames
from kineograph.media.gif import frame_durations

CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


def read_clip(path: Path | str, channels: int | None = None) -> tuple[torch.Tensor, float]:
    """A picture or clip → pixels T C H W, uint8, and its frames a second; `channels` as asked for, or as the file has."""
    images = [shown.image for shown in read_frames(path)]
    channels = channels or max(CHANNELS.get(image.mode, 3 + image.has_transparency_data) for image in images)
    arrays = [np.asarray(to_channels(image, channels, "black")) for image in images]
    stacked = torch.from_numpy(np.stack([array[..., None] if array.ndim == 2 else array for array in arrays]))
    return rearrange(stacked, "t h w c -> t c h w").contiguous(), _speed(Path(path))


def _speed(path: Path) -> float:
    if path.suffix == ".mp4":
        with av.open(str(path)) as container:
            return float(container.streams.video[0].average_rate)
    with Image.open(path) as file:
        return rate([round(frame.info.get("duration", 0)) // 10 for frame in ImageSequence.Iterator(file)])


def rate(ticks: list[int]) -> float:
    """Frames per second of a GIF with these durations; a round number if it gives the same ones."""
    mean = 100 * len(ticks) / max(1, sum(ticks))
    for simple in (round(mean), round(2 * mean) / 2, round(mean, 1), round(mean, 2)):
        if simple > 0 and frame_durations(len(ticks), simple) == ticks:
            return float(simple)
    return mean
