"""A convolutional pyramid over single pictures: pixels to a coarse map and back. VQGAN is one; C-ViViT may stand on one."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from kineograph.core.config import Config
from kineograph.nn.conv import ChannelNorm, MapAttention, ResidualBlock, double, halve


class PyramidConfig(Config):
    width: int = Field(64, ge=8)
    """Channels at the finest level."""
    multipliers: tuple[int, ...] = Field((1, 2, 4), min_length=1)
    """Width of each level in units of `width`, fine to coarse; each level after the first halves the map."""
    patch: Literal[1, 2, 4] = 2
    """Pixels on a side that are folded into channels before the first level. A token covers f = patch · 2^(levels − 1) pixels."""
    blocks: tuple[int, ...] = (1,)
    """Residual blocks of the encoder at each level; one number means the same at all."""
    decoder_blocks: tuple[int, ...] | None = None
    """Residual blocks of the decoder at each level, fine to coarse; null: as the encoder."""
    attention: bool = False
    """Self-attention at the coarsest level, in encoder and decoder."""

    @field_validator("blocks", "decoder_blocks", mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _levels(self) -> PyramidConfig:
        for name in ("blocks", "decoder_blocks"):
            given = getattr(self, name)
            if given is not None and len(given) not in (1, len(self.multipliers)):
                levels = len(self.multipliers)
                raise ValueError(f"{name} has {len(given)} numbers for {levels} levels: give one, or one a level")
        return self

    @property
    def factor(self) -> int:
        """Pixels on a side of a token."""
        return self.patch * 2 ** (len(self.multipliers) - 1)

    @property
    def widths(self) -> list[int]:
        return [self.width * multiplier for multiplier in self.multipliers]

    def blocks_at(self, decoder: bool) -> tuple[int, ...]:
        given = self.decoder_blocks if decoder and self.decoder_blocks is not None else self.blocks
        return given * len(self.multipliers) if len(given) == 1 else given


class Encoder(nn.Module):
    """F C H W in [−1, 1] → F widths[-1] h w"""

    def __init__(self, channels: int, config: PyramidConfig) -> None:
        super().__init__()
        self.patch = config.patch
        widths, blocks = config.widths, config.blocks_at(decoder=False)
        layers: list[nn.Module] = [nn.Conv2d(channels * config.patch**2, widths[0], 3, padding=1)]
        layers += [ResidualBlock(widths[0]) for _ in range(blocks[0])]
        for (width, wider), count in zip(pairwise(widths), blocks[1:]):
            layers += [halve(width, wider), *(ResidualBlock(wider) for _ in range(count))]
        if config.attention:
            layers.append(MapAttention(widths[-1]))
        layers.append(ChannelNorm(widths[-1]))
        self.layers = nn.Sequential(*layers)

    def forward(self, pictures: Tensor) -> Tensor:
        folded = F.pixel_unshuffle(pictures, self.patch)
        return self.layers(folded.contiguous(memory_format=torch.channels_last))


class Decoder(nn.Module):
    """F widths[-1] h w → F widths[0] H/patch W/patch: everything but the last layer."""

    def __init__(self, config: PyramidConfig) -> None:
        super().__init__()
        widths, blocks = config.widths, config.blocks_at(decoder=True)
        layers: list[nn.Module] = [MapAttention(widths[-1])] if config.attention else []
        layers += [ResidualBlock(widths[-1]) for _ in range(blocks[-1])]
        for (width, wider), count in reversed(list(zip(pairwise(widths), blocks))):
            layers += [double(wider, width), *(ResidualBlock(width) for _ in range(count))]
        layers += [ChannelNorm(widths[0]), nn.SiLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z.contiguous(memory_format=torch.channels_last))


class ToPixels(nn.Module):
    """The decoder's last layer. It stands alone so that the adaptive weight's gradients go through nothing else."""

    def __init__(self, channels: int, config: PyramidConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.conv = nn.Conv2d(config.widths[0], channels * config.patch**2, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        pictures = F.pixel_shuffle(self.conv(features).float(), self.patch)
        return pictures.contiguous(memory_format=torch.channels_last)

    def weights(self, frames: int) -> list[Tensor]:
        """Those that paint a clip of so many frames: the same for any."""
        return [self.conv.weight]
