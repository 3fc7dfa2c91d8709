"""Geometry and timing of a sample: which frames to take, crop, resize with antialiasing, rotate, flip.

The geometry is drawn once per sample, so all its frames get the same one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from einops import rearrange, repeat
from PIL import Image
from torch import Tensor

Crop = Literal["center", "random", "resized"]
Resize = Literal["cover", "stretch", "contain"]

# Seconds by which a timestamp may be late: containers round to their own clock (webm: 1 ms, GIF: 10 ms).
TOLERANCE = 2e-3
GIF_TOLERANCE = 0.011


@dataclass(frozen=True)
class ImageTransform:
    """The crop box, size, rotation and flip of one sample."""

    box: tuple[float, float, float, float]  # left, top, right, bottom, in the file's pixels
    size: tuple[int, int]  # width, height to resize to, before rotation
    turns: int  # quarter turns, anticlockwise
    mirrored: bool
    canvas: tuple[int, int] | None = None  # width, height including the bars, before rotation; None: no bars
    bars: int = 0  # brightness of the bars, 0 … 255

    def apply(self, image: Image.Image) -> np.ndarray:
        """→ H W C, uint8."""
        return self.orient(self.resample(image))

    def resample(self, image: Image.Image) -> np.ndarray:
        """Crop, resize and add bars. → H W C, uint8, before rotation and flip."""
        if self.box != (0, 0, *self.size) or image.size != self.size:
            # reducing_gap: shrink by whole factors first, down to 3 × the size; far faster for large images
            image = image.resize(self.size, Image.Resampling.BICUBIC, box=self.box, reducing_gap=3.0)
        pixels = np.asarray(image)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels  # H W C
        if self.canvas is not None:
            pixels = self._add_bars(pixels, *self.canvas)
        return pixels

    def orient(self, pixels: np.ndarray) -> np.ndarray:
        """Rotate and flip H W C."""
        if self.turns:
            pixels = np.rot90(pixels, self.turns)
        return pixels[:, ::-1] if self.mirrored else pixels

    def _add_bars(self, pixels: np.ndarray, width: int, height: int) -> np.ndarray:
        canvas = np.full((height, width, pixels.shape[-1]), self.bars, np.uint8)
        top, left = (height - pixels.shape[0]) // 2, (width - pixels.shape[1]) // 2
        canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
        return canvas


@dataclass(frozen=True)
class ResizeCrop:
    """How images of any size become `size` (height, width)."""

    size: tuple[int, int]
    crop: Crop = "center"
    """With resize=cover, the part to keep: the centre, a random position, or a random size too (`area`, `aspect`)."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    rotate: bool = False
    """Rotate by a random multiple of 90°."""
    resize: Resize = "cover"
    """cover: scale until `size` is covered, then crop; stretch: ignore the aspect; contain: the whole image with bars."""
    area: tuple[float, float] = (0.75, 1.0)
    """crop=resized: smallest and largest share of the image's area."""
    aspect: tuple[float, float] = (1.0, 1.0)
    """crop=resized: smallest and largest aspect of the crop, relative to that of `size`."""
    bars: int = 0
    """resize=contain: brightness of the bars."""

    def draw(
        self, width: float, height: int, rng: np.random.Generator, turned: int = 0, pixel_aspect: float = 1.0
    ) -> ImageTransform:
        """Draw the transform of one sample. `turned`: anticlockwise quarter turns that set the file upright; `pixel_aspect`: width of its
        pixels relative to their height."""
        width = width * pixel_aspect
        turns = (turned + (int(rng.integers(4)) if self.rotate else 0)) % 4
        target_w, target_h = (self.size[1], self.size[0]) if turns % 2 == 0 else self.size  # before rotation
        crop_w, crop_h = self._crop_size(width, height, target_w, target_h, rng)
        x, y = rng.random(2) if self.resize == "cover" and self.crop != "center" else (0.5, 0.5)
        left, top = (width - crop_w) * x, (height - crop_h) * y
        right, bottom = min(left + crop_w, width), min(top + crop_h, height)
        box = (left / pixel_aspect, top, right / pixel_aspect, bottom)
        size, canvas = (target_w, target_h), None
        if self.resize == "contain":
            scale = min(target_w / width, target_h / height)
            size = (min(target_w, max(1, round(width * scale))), min(target_h, max(1, round(height * scale))))
            canvas = None if size == (target_w, target_h) else (target_w, target_h)
        return ImageTransform(box, size, turns, bool(self.flip and rng.random() < self.flip), canvas, self.bars)

    def _crop_size(
        self, width: float, height: int, target_w: int, target_h: int, rng: np.random.Generator
    ) -> tuple[float, float]:
        """Width and height of the crop, in the image's pixels."""
        if self.resize != "cover":
            return width, height
        scale = max(target_w / width, target_h / height)
        crop_w, crop_h = min(target_w / scale, width), min(target_h / scale, height)  # the largest of this aspect
        if self.crop != "resized":
            return crop_w, crop_h
        share = rng.uniform(*self.area) * width * height / (crop_w * crop_h)  # of the largest crop's area
        low, high = map(math.log, self.aspect)  # in logarithms, so that 2 is as likely as 1/2
        stretch = math.exp(rng.uniform(low, high) / 2)
        crop_w, crop_h = crop_w * math.sqrt(share) * stretch, crop_h * math.sqrt(share) / stretch
        shrink = min(1.0, width / crop_w, height / crop_h)
        return min(crop_w * shrink, width), min(crop_h * shrink, height)  # rounding must not exceed the image

    @property
    def is_fixed(self) -> bool:
        """Whether `ImageTransform.resample` gives the same pixels in every draw."""
        return (self.resize != "cover" or self.crop == "center") and (not self.rotate or self.size[0] == self.size[1])

    @property
    def deterministic(self) -> ResizeCrop:
        """The same without randomness, for validation and test."""
        return replace(self, crop="center", flip=0.0, rotate=False)

    @property
    def max_zoom(self) -> float:
        """The largest magnification of a random crop relative to the full one."""
        if self.crop != "resized":
            return 1.0
        return max(1.0, math.sqrt(max(self.aspect[1], 1 / self.aspect[0]) / self.area[0]))


def pad_frames(pixels: np.ndarray, frames: int) -> tuple[Tensor, Tensor]:
    """T H W C with T ≤ frames → `frames` C H W with the last frame repeated, and the mask of the real frames."""
    real = pixels.shape[0]
    clip = np.empty((frames, pixels.shape[3], pixels.shape[1], pixels.shape[2]), np.uint8)
    clip[:real] = rearrange(pixels, "t h w c -> t c h w")
    clip[real:] = clip[real - 1]
    return torch.from_numpy(clip), torch.arange(frames) < real


def resize_frames(
    pixels: np.ndarray, size: tuple[int, int], channels: int, resize_crop: ResizeCrop | None = None
) -> np.ndarray:
    """T H W C → the given size (centre crop by default) and channels. Alpha is dropped, or opaque where it is added."""
    pixels = convert_channels(pixels, channels)
    if pixels.shape[1:3] == size:
        return pixels
    rng = np.random.default_rng(0)  # a centre crop draws nothing
    transform = (resize_crop or ResizeCrop(size)).draw(pixels.shape[2], pixels.shape[1], rng)
    frames = (np.ascontiguousarray(frame.squeeze(-1) if channels == 1 else frame) for frame in pixels)
    return np.stack([transform.apply(Image.fromarray(frame)) for frame in frames])


def convert_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """… C → … channels (1 gray, 2 gray + alpha, 3 RGB, 4 RGBA)."""
    current = pixels.shape[-1]
    if current == channels:
        return pixels
    alpha = pixels[..., -1:] if current in (2, 4) else None
    colour = pixels if alpha is None else pixels[..., :-1]
    if channels <= 2 and colour.shape[-1] == 3:  # ITU-R 601 luma, as Pillow's "L"
        colour = np.rint(colour @ np.array([0.299, 0.587, 0.114], np.float32))[..., None].astype(np.uint8)
    elif channels >= 3 and colour.shape[-1] == 1:
        colour = repeat(colour, "... 1 -> ... c", c=3)
    if channels in (1, 3):
        return colour
    return np.concatenate([colour, np.full_like(colour[..., :1], 255) if alpha is None else alpha], axis=-1)


def pick_frames(
    starts: np.ndarray,
    end: float,
    frames: int,
    fps: float | None,
    rng: np.random.Generator,
    tolerance: float = TOLERANCE,
) -> np.ndarray:
    """Indices of the frames on screen at s, s + 1/fps, s + 2/fps …, where s is the start of a random frame.

    By timestamps, so that 30 → 8 fps gives 8 and not 30 // 3 = 10. `starts` are the frames' times in rising order, `end` is the end of the
    last one. The result is shorter than `frames` if the clip is. Without `fps` the frames are consecutive.
    """
    count = len(starts)
    if fps is None:
        window = pick_window(count, frames, rng)
        return np.arange(window.start, window.stop)
    latest = end - (frames - 1) / fps - tolerance
    first = int(rng.integers(max(int(np.searchsorted(starts, latest, side="right")), 1)))
    times = starts[first] + np.arange(frames) / fps
    inside = times < end - tolerance
    inside[0] = True
    return np.searchsorted(starts, times[inside] + tolerance, side="right") - 1


def pick_window(count: int, frames: int, rng: np.random.Generator) -> slice:
    """`frames` consecutive indices of `count` from a random start, or all if there are fewer."""
    first = int(rng.integers(max(count - frames, 0) + 1))
    return slice(first, min(first + frames, count))
