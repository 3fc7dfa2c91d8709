"""The images that a decoder diffuses, as pixels or latents, and the low-resolution image that it is conditioned on."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kineograph.core.batch import Batch, Shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.task import Codec
from kineograph.family.dalle2.config import AugmentConfig

Size = tuple[int, int]


def normalize(pixels: Tensor) -> Tensor:
    """[0, 1] → [−1, 1]"""
    return pixels * 2 - 1


class PixelSpace:
    """Diffusion of pixels in [−1, 1]."""

    def __init__(self, shape: Shape) -> None:
        self.channels, self.grid = shape.channels, (shape.height, shape.width)

    def encode_batch(self, batch: Batch) -> Tensor:
        """B C H W in [−1, 1]."""
        return self.encode(downsample(batch.video[:, 0], self.grid))

    def encode(self, pixels: Tensor) -> Tensor:
        return normalize(pixels)

    def decode(self, x0: Tensor) -> Tensor:
        return ((x0 + 1) / 2).clamp(0, 1)


class LatentSpace:
    """Diffusion of a codec's scaled latents; with a codebook, of the values before quantization."""

    def __init__(self, codec: Codec, name: str, scale: float, shape: Shape) -> None:
        if codec.latent_channels is None:
            raise ConfigError(f"codec={name} has no image latents: name a stage such as vqgan")
        self.codec, self.scale = codec, scale
        self.channels = codec.latent_channels
        self.size: Size = (shape.height, shape.width)  # of the images
        _, height, width = codec.shape_for(1, *self.size)
        self.grid: Size = (height, width)

    def encode_batch(self, batch: Batch) -> Tensor:
        """B c h w, from the cache or the codec."""
        if batch.latents is None:
            return self.encode(downsample(batch.video[:, 0], self.size))
        latents = batch.latents[:, 0].float()
        if tuple(latents.shape[1:]) != (self.channels, *self.grid):
            raise InputError(
                f"latents of shape {tuple(latents.shape[1:])} do not fit this decoder's {(self.channels, *self.grid)}: were they cached at another data.size?"
            )
        return latents * self.scale

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """B C H W in [0, 1] → B c h w"""
        return self.codec.encode_latents(pixels[:, None])[:, 0].float() * self.scale

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        return self.codec.decode_latents((x0 / self.scale)[:, None])[:, 0]


# Low-resolution images -------------------------------------------------------------------------------------------


def downsample(pixels: Tensor, size: Size) -> Tensor:
    """B C H W in [0, 1] → B C h w. Antialiased: sampled images are not as sharp as nearest-neighbour ones."""
    return upsample(pixels, size).clamp(0, 1) if tuple(pixels.shape[-2:]) != size else pixels


def upsample(pixels: Tensor, size: Size) -> Tensor:
    """B C h w → B C H W. Antialiased too, since a grid of latents may be smaller than the image."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return F.interpolate(pixels, size, mode="bicubic", antialias=True)


def blur(pixels: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of B C H W with reflected borders."""
    radius = min(math.ceil(3 * sigma), *(side - 1 for side in pixels.shape[-2:]))
    offsets = torch.arange(-radius, radius + 1, device=pixels.device, dtype=pixels.dtype)
    kernel = torch.exp(-(offsets**2) / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    channels = pixels.shape[1]
    padded = F.pad(pixels, (radius,) * 4, mode="reflect")
    columns = F.conv2d(padded, kernel.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return F.conv2d(columns, kernel.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)


def augment(low_res: Tensor, config: AugmentConfig, noise: Noise) -> tuple[Tensor, Tensor]:
    """Blur and noise of training. → B C h w in [−1, 1], and each sample's noise level, B"""
    if config.blur:
        chosen = noise.bernoulli("low-res blur", config.blur)
        low_res = torch.where(chosen[:, None, None, None], blur(low_res, config.blur_sigma), low_res)
    level = noise.uniform("low-res level") * config.noise
    return (add_noise(low_res, level, noise) if config.noise else low_res), level


def add_noise(low_res: Tensor, level: Tensor, noise: Noise) -> Tensor:
    """cos(π s / 2) x + sin(π s / 2) ε at level s, B."""
    angle = (level * (math.pi / 2))[:, None, None, None]
    return angle.cos() * low_res + angle.sin() * noise.normal("low-res noise", *low_res.shape[1:])


def crop_squares(maps: Tensor, size: int, top: Tensor, left: Tensor) -> Tensor:
    """Squares of B C H W that begin at row `top` and column `left`, B each."""
    offsets = torch.arange(size, device=maps.device)
    rows = (top[:, None] + offsets)[:, None, :, None].expand(-1, maps.shape[1], -1, maps.shape[3])
    columns = (left[:, None] + offsets)[:, None, None, :].expand(-1, maps.shape[1], size, -1)
    return maps.gather(2, rows).gather(3, columns)
