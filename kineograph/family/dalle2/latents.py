"""What the decoder diffuses: pixels in [−1, 1], or the latents of a codec."""

from __future__ import annotations

import torch
from torch import Tensor

from kineograph.core.batch import Batch, Shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import Codec
from kineograph.family.dalle2.low_res import shrink

Grid = tuple[int, int]


class Pixels:
    """The pictures themselves."""

    def __init__(self, shape: Shape) -> None:
        self.channels, self.grid = shape.channels, (shape.height, shape.width)

    def read(self, batch: Batch) -> Tensor:
        """B C H W in [−1, 1]."""
        return self.encode(shrink(batch.video[:, 0], self.grid))

    def encode(self, pixels: Tensor) -> Tensor:
        """B C H W in [0, 1]."""
        return inward(pixels)

    def decode(self, x0: Tensor) -> Tensor:
        return outward(x0)


class Latents:
    """A codec's latents: continuous ones as it gives them, those of a codebook before they are rounded to codes."""

    def __init__(self, codec: Codec, name: str, scale: float, shape: Shape) -> None:
        if codec.latent_channels is None:
            raise ConfigError(f"codec={name} gives no latents of pictures: name a stage such as one of vqgan")
        self.codec = codec
        self.scale = scale
        self.size: Grid = (shape.height, shape.width)  # of the pictures
        self.channels = codec.latent_channels
        _, height, width = self.codec.shape_for(1, shape.height, shape.width)
        self.grid: Grid = (height, width)

    @torch.no_grad()
    def read(self, batch: Batch) -> Tensor:
        """B c h w: from a cache, or from the codec."""
        if batch.latents is None:
            return self.encode(shrink(batch.video[:, 0], self.size))
        found = batch.latents[:, 0].float()  # B c h w
        if tuple(found.shape[1:]) != (self.channels, *self.grid):
            raise InputError(
                f"latents of shape {tuple(found.shape[1:])} do not fit this decoder's {(self.channels, *self.grid)}: were they cached at another data.size?"
            )
        return found * self.scale

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        return self.codec.encode_latents(pixels[:, None])[:, 0].float() * self.scale

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        return self.codec.decode_latents((x0 / self.scale)[:, None])[:, 0]


def inward(pixels: Tensor) -> Tensor:
    return pixels * 2 - 1


def outward(pixels: Tensor) -> Tensor:
    return ((pixels + 1) / 2).clamp(0, 1)
