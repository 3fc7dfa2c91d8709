"""Encoder and decoder of a causal 3-D VAE. Module names are those of diffusers' AutoencoderKLCogVideoX, so its weights load."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from kineograph.core.config import Config, Positive
from kineograph.nn.causal_conv import (
    CausalConv,
    CausalResidual,
    Downsample,
    GroupNorm,
    LatentNorm,
    PastFrames,
    Upsample,
    init_causal_weights,
)

Memory = tuple[list[Tensor], list[list[PastFrames]]]
"""Past frames kept for the next chunk: of the network's own convolutions, and of the residual blocks of each level."""


class CausalVAEShape(Config):
    """Shape of the networks; the defaults are the released VAE."""

    widths: tuple[Positive, ...] = Field((128, 256, 256, 512), min_length=1)
    """Channels of each level, fine to coarse; each level after the first downsamples by 2: a latent's side is 2^(levels − 1) pixels."""
    layers: int = Field(3, ge=1, le=1000)
    """Residual blocks of each level of the encoder; the decoder has one more."""
    latent_channels: int = Field(16, ge=1, le=65536)
    """Channels of the latents."""
    temporal: Literal[1, 2, 4] = 4
    """Frames of a latent, except the first frame, which is coded alone: clips have 1 + k · temporal frames."""
    groups: int = Field(32, ge=1)
    """Groups of the group norms."""
    norm: Literal["chunk", "frame"] = "chunk"
    """Frames over which norms take their statistics. chunk: those coded together, as in the released VAE; frame: each alone, so that
    no latent depends on a later frame or on the chunks."""

    @model_validator(mode="after")
    def _check_shape(self) -> CausalVAEShape:
        for width in self.widths:
            if width % self.groups:
                raise ValueError(f"widths={list(self.widths)}: {width} is not a multiple of groups={self.groups}")
        if self.temporal > self.spatial:
            raise ValueError(
                f"temporal={self.temporal} downsamples time at {self.temporal.bit_length() - 1} levels, and widths={list(self.widths)} "
                f"have only {len(self.widths) - 1}: give more widths, or a smaller temporal"
            )
        return self

    @property
    def spatial(self) -> int:
        """Side of a latent in pixels."""
        return 2 ** (len(self.widths) - 1)

    @property
    def halvings(self) -> int:
        """Levels that downsample time."""
        return self.temporal.bit_length() - 1


class Level(nn.Module):
    """Residual blocks, then a down- or upsampler under the name of its keyword."""

    def __init__(self, blocks: list[CausalResidual], **resize: nn.Module) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(blocks)
        self.resize = tuple(resize)
        for name, layer in resize.items():
            self.add_module(name, nn.ModuleList([layer]))

    def forward(
        self, x: Tensor, past: list[PastFrames] | None, z: Tensor | None = None
    ) -> tuple[Tensor, list[PastFrames]]:
        kept = []
        for index, block in enumerate(self.resnets):
            x, seen = block(x, past and past[index], z)
            kept.append(seen)
        for name in self.resize:
            x = getattr(self, name)[0](x, past is None)
        return x, kept


class Encoder(nn.Module):
    """A chunk of B C T H W in [−1, 1] → mean and log-variance, B 2c t h w"""

    def __init__(self, channels: int, shape: CausalVAEShape) -> None:
        super().__init__()
        norm, widths = (shape.groups, shape.norm), shape.widths
        self.conv_in = CausalConv(channels, widths[0])
        self.down_blocks = nn.ModuleList()
        for level, (before, width) in enumerate(pairwise([widths[0], *widths])):
            blocks = [CausalResidual(before if i == 0 else width, width, *norm) for i in range(shape.layers)]
            last = level == len(widths) - 1
            self.down_blocks.append(
                Level(blocks) if last else Level(blocks, downsamplers=Downsample(width, level < shape.halvings))
            )
        self.mid_block = Level([CausalResidual(widths[-1], widths[-1], *norm) for _ in range(2)])
        self.norm_out = GroupNorm(widths[-1], *norm)
        self.conv_out = CausalConv(widths[-1], 2 * shape.latent_channels)
        init_causal_weights(self)
        with torch.no_grad():  # start with little noise in the latents
            self.conv_out.conv.bias[shape.latent_channels :] = -4.0  # type: ignore[index]

    def forward(self, x: Tensor, past: Memory | None) -> tuple[Tensor, Memory]:
        kept = []
        x, first_past = self.conv_in(x, past and past[0][0])
        for index, level in enumerate((*self.down_blocks, self.mid_block)):
            x, seen = level(x, past and past[1][index])
            kept.append(seen)
        x, end = self.conv_out(F.silu(self.norm_out(x)), past and past[0][1])
        return x, ([first_past, end], kept)


class Decoder(nn.Module):
    """A chunk of B c t h w → features B widths[0] T H W, the input of `conv_out`; separate, so that the adaptive weight's
    gradients pass through nothing else."""

    def __init__(self, channels: int, shape: CausalVAEShape) -> None:
        super().__init__()
        norm, widths = (shape.groups, shape.norm, shape.latent_channels), shape.widths[::-1]
        self.conv_in = CausalConv(shape.latent_channels, widths[0])
        self.mid_block = Level([CausalResidual(widths[0], widths[0], *norm) for _ in range(2)])
        self.up_blocks = nn.ModuleList()
        for level, (before, width) in enumerate(pairwise([widths[0], *widths])):
            blocks = [CausalResidual(before if i == 0 else width, width, *norm) for i in range(shape.layers + 1)]
            last = level == len(widths) - 1
            self.up_blocks.append(
                Level(blocks) if last else Level(blocks, upsamplers=Upsample(width, level < shape.halvings))
            )
        self.norm_out = LatentNorm(widths[-1], shape.latent_channels, shape.groups, shape.norm)
        self.conv_out = CausalConv(widths[-1], channels)
        init_causal_weights(self)

    def forward(self, z: Tensor, past: Memory | None) -> tuple[Tensor, Memory]:
        kept = []
        x, first_past = self.conv_in(z, past and past[0][0])
        for index, level in enumerate((self.mid_block, *self.up_blocks)):
            x, seen = level(x, past and past[1][index], z)
            kept.append(seen)
        return F.silu(self.norm_out(x, z, past is None)), ([first_past], kept)
