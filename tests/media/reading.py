"""What was written, read back: pixels and speed."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageSequence

from kineograph.data.decode import to_channels
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
        lengths = []
        for frame in ImageSequence.Iterator(file):
            frame.load()  # only then does WebP tell its duration
            lengths.append(round(frame.info.get("duration", 0)))
    return rate([length // 10 for length in lengths]) if path.suffix == ".gif" else rate(lengths, tick=1000)


def rate(ticks: list[int], tick: int = 100) -> float:
    """Frames a second of a clip with these durations; a short number where that would give the same ones."""
    mean = tick * len(ticks) / max(1, sum(ticks))
    for simple in (round(mean), round(2 * mean) / 2, round(mean, 1), round(mean, 2)):
        if simple > 0 and frame_durations(len(ticks), simple, tick) == ticks:
            return float(simple)
    return mean
