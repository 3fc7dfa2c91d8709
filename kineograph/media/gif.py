"""Animated GIFs with exactly the frames and the timing that were asked for.

Pillow compresses and decodes the frames; the few bytes around them are written here, because its own animation writer merges equal
neighbours into one longer frame, and then a clip of 16 frames may come back as 11.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import GifImagePlugin, Image

SHORTEST = 2  # hundredths of a second; viewers play anything shorter at a tenth of a second
_PALETTE_SAMPLE = 16_384  # pixels that the shared palette is fitted to: k-means on more is slow and changes nothing


def durations(frames: int, fps: float, tick: int = 100) -> list[int]:
    """Ticks (hundredths of a second) a frame: differences of rounded times, so that rounding never adds up."""
    ends = [round(tick * (index + 1) / fps) for index in range(frames)]
    return [max(SHORTEST, end - start) for start, end in zip([0, *ends], ends)]


def rate(ticks: list[int], tick: int = 100) -> float:
    """Frames a second of a clip with these durations; a short number where that would give the same ones."""
    mean = tick * len(ticks) / max(1, sum(ticks))
    for simple in (round(mean), round(2 * mean) / 2, round(mean, 1), round(mean, 2)):
        if simple > 0 and durations(len(ticks), simple, tick) == ticks:
            return float(simple)
    return mean


def write_gif(path: Path, frames: np.ndarray, fps: float) -> None:
    """T H W C uint8, C = 1 … 4, loops for ever. Alpha becomes transparent or not, at one half."""
    colours, alpha = (frames[..., :-1], frames[..., -1]) if frames.shape[-1] in (2, 4) else (frames, None)
    indices, palette = index_colours(colours, 256 if alpha is None else 255)
    options: dict[str, Any] = {}
    if alpha is not None:
        indices = np.where(alpha < 128, 255, indices).astype(np.uint8)
        options = {"transparency": 255, "disposal": 2}  # each frame starts from nothing
    height, width = indices.shape[1:]
    with path.open("wb") as file:
        file.write(b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0))  # 0xF7: a global table of 256 colours
        file.write(palette.tobytes().ljust(768, b"\0"))
        file.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")  # loop for ever
        for frame, ticks in zip(indices, durations(len(indices), fps)):
            image = Image.fromarray(frame)
            file.writelines(GifImagePlugin.getdata(image, duration=ticks * 10, **options))
        file.write(b"\x3b")


def index_colours(frames: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """T H W C (1 or 3) → indices T H W and a palette shared by all frames, N 3: exact where `limit` colours are enough.

    One palette for all frames, and no dithering: either would make still areas flicker.
    """
    if frames.shape[-1] == 1:
        grey = frames[..., 0]
        levels = np.flatnonzero(np.bincount(grey.ravel(), minlength=256))
        if len(levels) > limit:  # only with alpha, where one index is taken: the two darkest greys become one
            grey, levels = np.maximum(grey, levels[1]), levels[1:]
        return np.searchsorted(levels, grey).astype(np.uint8), np.repeat(levels[:, None], 3, axis=1).astype(np.uint8)
    packed = frames.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)  # T H W
    colours = np.unique(packed)
    if len(colours) <= limit:
        palette = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.uint8)
        return np.searchsorted(colours, packed).astype(np.uint8), palette
    flat = frames.reshape(-1, 3)
    sample = flat[:: -(-len(flat) // _PALETTE_SAMPLE) | 1]  # an odd stride does not stay in a few columns
    palette = _fit(sample, limit)
    carrier = Image.new("P", (1, 1))
    carrier.putpalette(palette.tobytes())
    nearest = [
        np.asarray(Image.fromarray(frame).quantize(palette=carrier, dither=Image.Dither.NONE)) for frame in frames
    ]
    return np.stack(nearest), palette


def _fit(sample: np.ndarray, limit: int) -> np.ndarray:
    """A palette for pixels N 3: colours that fill an area (a page, a background) exactly, the rest by median cut and k-means."""
    colours, counts = np.unique(sample, axis=0, return_counts=True)
    frequent = np.argsort(counts)[::-1][: limit // 8]
    exact = colours[frequent[counts[frequent] > len(sample) // 200]]
    fitted = Image.fromarray(sample[None]).quantize(limit - len(exact), method=Image.Quantize.MEDIANCUT, kmeans=1)
    rest = np.asarray(fitted.getpalette("RGB"), dtype=np.uint8).reshape(-1, 3)
    return np.concatenate([exact, rest])[:limit]
