"""The smaller picture that a super-resolution stage enlarges: made from a larger one, spoiled in training, laid under the noise."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kineograph.core.config import Config
from kineograph.core.noise import Noise

Size = tuple[int, int]


class AugmentConfig(Config):
    blur: float = Field(0.5, ge=0, le=1)
    """Share of training samples whose smaller picture is blurred, as drawn ones tend to be."""
    blur_sigma: float = Field(0.6, gt=0)
    """Radius of the blur, in pixels of the smaller picture."""
    noise: float = Field(0.0, ge=0, lt=1)
    """Most noise that is mixed into the smaller picture, 1 being noise alone; the network is told how much. 0: none."""


def shrink(pixels: Tensor, size: Size) -> Tensor:
    """B C H W in [0, 1] → B C h w. Antialiased: nearest pixels would be a sharper picture than any that is drawn."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 1)


def enlarge(pixels: Tensor, size: Size) -> Tensor:
    """B C h w → B C H W (antialiased too, should a map of latents be the smaller one)."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return F.interpolate(pixels, size, mode="bicubic", antialias=True)


def blur(pixels: Tensor, sigma: float) -> Tensor:
    """B C H W, by a Gaussian; borders are mirrored."""
    radius = min(math.ceil(3 * sigma), *(side - 1 for side in pixels.shape[-2:]))
    places = torch.arange(-radius, radius + 1, device=pixels.device, dtype=pixels.dtype)
    kernel = torch.exp(-(places**2) / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    channels = pixels.shape[1]
    padded = F.pad(pixels, (radius,) * 4, mode="reflect")
    tall = F.conv2d(padded, kernel.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return F.conv2d(tall, kernel.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)


def spoil(small: Tensor, config: AugmentConfig, noise: Noise) -> tuple[Tensor, Tensor]:
    """What training shows of the smaller picture (B C h w in [−1, 1]), and how much noise each row got, B."""
    if config.blur:
        chosen = noise.bernoulli("low-res blur", config.blur)
        small = torch.where(chosen[:, None, None, None], blur(small, config.blur_sigma), small)
    level = noise.uniform("low-res level") * config.noise
    return (add_noise(small, level, noise) if config.noise else small), level


def add_noise(small: Tensor, level: Tensor, noise: Noise) -> Tensor:
    """cos(π s / 2) x + sin(π s / 2) ε at level s, B."""
    angle = (level * (math.pi / 2))[:, None, None, None]
    return angle.cos() * small + angle.sin() * noise.normal("low-res noise", *small.shape[1:])


def cut(maps: Tensor, size: int, top: Tensor, left: Tensor) -> Tensor:
    """Squares of B C H W that begin at row `top` and column `left`, B each."""
    places = torch.arange(size, device=maps.device)
    rows = (top[:, None] + places)[:, None, :, None].expand(-1, maps.shape[1], -1, maps.shape[3])
    columns = (left[:, None] + places)[:, None, None, :].expand(-1, maps.shape[1], size, -1)
    return maps.gather(2, rows).gather(3, columns)
