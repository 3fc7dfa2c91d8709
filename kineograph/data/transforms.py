"""Geometry of a sample: turn, cover-resize with antialiasing, crop, flip. Drawn once a sample, so all its frames agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from einops import rearrange, repeat
from PIL import Image
from torch import Tensor

Crop = Literal["center", "random"]


@dataclass(frozen=True)
class Placement:
    """Where one sample's picture comes from in its file's frames, and how it is turned and mirrored afterwards."""

    box: tuple[float, float, float, float]  # left, top, right, bottom, in the file's pixels
    size: tuple[int, int]  # width, height to resize to, before turning
    turns: int  # quarter turns, anticlockwise
    mirrored: bool

    def apply(self, image: Image.Image) -> np.ndarray:
        """→ H W C, uint8."""
        if self.box != (0, 0, *self.size) or image.size != self.size:
            # reducing_gap: shrink by whole factors first, down to 3 × the size; far faster from large pictures
            image = image.resize(self.size, Image.Resampling.BICUBIC, box=self.box, reducing_gap=3.0)
        pixels = np.asarray(image)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels  # H W C
        if self.turns:
            pixels = np.rot90(pixels, self.turns)
        return pixels[:, ::-1] if self.mirrored else pixels


@dataclass(frozen=True)
class Framing:
    """How pictures of any size become `size` (height, width): scaled until they cover it, then cropped."""

    size: tuple[int, int]
    crop: Crop = "center"
    flip: float = 0.0
    """Probability of mirroring left and right."""
    rotate: bool = False
    """Turn by a random multiple of 90°."""

    def place(self, width: int, height: int, rng: np.random.Generator, turned: int = 0) -> Placement:
        """`turned`: quarter turns, anticlockwise, that set the file upright."""
        turns = (turned + (int(rng.integers(4)) if self.rotate else 0)) % 4
        wide, high = (self.size[1], self.size[0]) if turns % 2 == 0 else self.size  # before turning
        scale = max(wide / width, high / height)
        span_x, span_y = min(wide / scale, width), min(high / scale, height)
        x, y = rng.random(2) if self.crop == "random" else (0.5, 0.5)
        left, top = (width - span_x) * x, (height - span_y) * y
        box = (left, top, min(left + span_x, width), min(top + span_y, height))
        return Placement(box, (wide, high), turns, bool(self.flip and rng.random() < self.flip))

    @property
    def still(self) -> Framing:
        """The same without chance: for validation and test."""
        return Framing(self.size)


def pad(pixels: np.ndarray, frames: int) -> tuple[Tensor, Tensor]:
    """T H W C with T ≤ frames → T C H W of exactly `frames`, the last one repeated, and the mask of the real ones."""
    real = pixels.shape[0]
    clip = np.empty((frames, pixels.shape[3], pixels.shape[1], pixels.shape[2]), np.uint8)
    clip[:real] = rearrange(pixels, "t h w c -> t c h w")
    clip[real:] = clip[real - 1]
    return torch.from_numpy(clip), torch.arange(frames) < real


def fit(pixels: np.ndarray, size: tuple[int, int], channels: int) -> np.ndarray:
    """T H W C arrays of another size or colour → `size` (centre crop) and `channels`. Alpha: dropped, or made opaque."""
    pixels = recolour(pixels, channels)
    if pixels.shape[1:3] == size:
        return pixels
    place = Framing(size).place(
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
