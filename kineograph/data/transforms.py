"""Geometry of a sample: turn, crop, resize with antialiasing, flip. Drawn once a sample, so all its frames agree."""

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


@dataclass(frozen=True)
class Placement:
    """Where one sample's picture comes from in its file's frames, and how it is turned and mirrored afterwards."""

    box: tuple[float, float, float, float]  # left, top, right, bottom, in the file's pixels
    size: tuple[int, int]  # width, height to resize to, before turning
    turns: int  # quarter turns, anticlockwise
    mirrored: bool
    canvas: tuple[int, int] | None = None  # width, height with bars around the picture, before turning; None: no bars
    bars: int = 0  # their brightness, 0 … 255

    def apply(self, image: Image.Image) -> np.ndarray:
        """→ H W C, uint8."""
        if self.box != (0, 0, *self.size) or image.size != self.size:
            # reducing_gap: shrink by whole factors first, down to 3 × the size; far faster from large pictures
            image = image.resize(self.size, Image.Resampling.BICUBIC, box=self.box, reducing_gap=3.0)
        pixels = np.asarray(image)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels  # H W C
        if self.canvas is not None:
            pixels = self._barred(pixels, *self.canvas)
        if self.turns:
            pixels = np.rot90(pixels, self.turns)
        return pixels[:, ::-1] if self.mirrored else pixels

    def _barred(self, pixels: np.ndarray, width: int, height: int) -> np.ndarray:
        page = np.full((height, width, pixels.shape[-1]), self.bars, np.uint8)
        top, left = (height - pixels.shape[0]) // 2, (width - pixels.shape[1]) // 2
        page[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
        return page


@dataclass(frozen=True)
class Framing:
    """How pictures of any size become `size` (height, width)."""

    size: tuple[int, int]
    crop: Crop = "center"
    """Which part stays where they cover it: the middle, anywhere, or a random part of random size (`area`, `aspect`)."""
    flip: float = 0.0
    """Probability of mirroring left and right."""
    rotate: bool = False
    """Turn by a random multiple of 90°."""
    resize: Resize = "cover"
    """cover: scaled until they cover it, then cropped; stretch: squeezed into it whole; contain: whole, with bars around."""
    area: tuple[float, float] = (0.75, 1.0)
    """crop=resized: least and largest share of the picture's area that is taken."""
    aspect: tuple[float, float] = (1.0, 1.0)
    """crop=resized: least and largest aspect of what is taken, as a multiple of that of `size`; it is stretched by that much."""
    bars: int = 0
    """resize=contain: brightness of the bars."""

    def place(self, width: int, height: int, rng: np.random.Generator, turned: int = 0) -> Placement:
        """`turned`: quarter turns, anticlockwise, that set the file upright."""
        turns = (turned + (int(rng.integers(4)) if self.rotate else 0)) % 4
        wide, high = (self.size[1], self.size[0]) if turns % 2 == 0 else self.size  # before turning
        span_x, span_y = self._span(width, height, wide, high, rng)
        x, y = rng.random(2) if self.resize == "cover" and self.crop != "center" else (0.5, 0.5)
        left, top = (width - span_x) * x, (height - span_y) * y
        box = (left, top, min(left + span_x, width), min(top + span_y, height))
        size, canvas = (wide, high), None
        if self.resize == "contain":
            scale = min(wide / width, high / height)
            size = (min(wide, max(1, round(width * scale))), min(high, max(1, round(height * scale))))
            canvas = None if size == (wide, high) else (wide, high)
        return Placement(box, size, turns, bool(self.flip and rng.random() < self.flip), canvas, self.bars)

    def _span(self, width: int, height: int, wide: int, high: int, rng: np.random.Generator) -> tuple[float, float]:
        """Width and height of the part of a picture that is taken."""
        if self.resize != "cover":
            return width, height
        scale = max(wide / width, high / height)
        span_x, span_y = min(wide / scale, width), min(high / scale, height)  # the largest part of the wanted aspect
        if self.crop != "resized":
            return span_x, span_y
        share = rng.uniform(*self.area) * width * height / (span_x * span_y)  # of that part's area
        low, most = map(math.log, self.aspect)  # in logarithms, so that 2 is as likely as 1/2
        stretch = math.exp(rng.uniform(low, most) / 2)
        span_x, span_y = span_x * math.sqrt(share) * stretch, span_y * math.sqrt(share) / stretch
        shrink = min(1.0, width / span_x, height / span_y)  # what does not fit is taken as large as it does
        return min(span_x * shrink, width), min(span_y * shrink, height)  # rounding must not lead outside

    @property
    def still(self) -> Framing:
        """The same without chance: for validation and test."""
        return replace(self, crop="center", flip=0.0, rotate=False)

    @property
    def finest(self) -> float:
        """The largest factor by which a crop magnifies, against the plain one: what is decoded must be finer by that much."""
        return (
            1.0
            if self.crop != "resized"
            else max(1.0, math.sqrt(max(self.aspect[1], 1 / self.aspect[0]) / self.area[0]))
        )


def pad(pixels: np.ndarray, frames: int) -> tuple[Tensor, Tensor]:
    """T H W C with T ≤ frames → T C H W of exactly `frames`, the last one repeated, and the mask of the real ones."""
    real = pixels.shape[0]
    clip = np.empty((frames, pixels.shape[3], pixels.shape[1], pixels.shape[2]), np.uint8)
    clip[:real] = rearrange(pixels, "t h w c -> t c h w")
    clip[real:] = clip[real - 1]
    return torch.from_numpy(clip), torch.arange(frames) < real


def fit(pixels: np.ndarray, size: tuple[int, int], channels: int, framing: Framing | None = None) -> np.ndarray:
    """T H W C arrays of another size or colour → `size` (by a centre crop, or `framing`) and `channels`. Alpha: dropped, or made opaque."""
    pixels = recolour(pixels, channels)
    if pixels.shape[1:3] == size:
        return pixels
    place = (framing or Framing(size)).place(
        pixels.shape[2], pixels.shape[1], np.random.default_rng(0)
    )  # a centre crop draws nothing
    return np.stack(
        [
            place.apply(Image.fromarray(np.ascontiguousarray(frame.squeeze(-1) if channels == 1 else frame)))
            for frame in pixels
        ]
    )


def recolour(pixels: np.ndarray, channels: int) -> np.ndarray:
    """… C → … channels (1 gray, 2 gray + alpha, 3 RGB, 4 RGBA)."""
    have = pixels.shape[-1]
    if have == channels:
        return pixels
    alpha = pixels[..., -1:] if have in (2, 4) else None
    colour = pixels if alpha is None else pixels[..., :-1]
    if channels <= 2 and colour.shape[-1] == 3:  # ITU-R 601 luma, as Pillow's "L"
        colour = np.rint(colour @ np.array([0.299, 0.587, 0.114], np.float32))[..., None].astype(np.uint8)
    elif channels >= 3 and colour.shape[-1] == 1:
        colour = repeat(colour, "... 1 -> ... c", c=3)
    if channels in (1, 3):
        return colour
    return np.concatenate([colour, np.full_like(colour[..., :1], 255) if alpha is None else alpha], axis=-1)
