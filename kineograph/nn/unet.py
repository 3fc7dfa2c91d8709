"""U-Net for diffusion: residual blocks modulated by a vector (time, image embedding), attention at the coarse levels.

Feature maps stay in channels_last memory, which attention reads as a sequence of pixels without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from kineograph.core.config import BlockCount, Config, Positive
from kineograph.core.errors import ConfigError
from kineograph.nn.attention import CrossAttention, Memory, SelfAttention
from kineograph.nn.conv import ChannelNorm, upsample_conv, zero_init
from kineograph.nn.norms import norm_layer
from kineograph.nn.positions import sincos_embedding
from kineograph.nn.transformer import init_weights

MapNorm = Literal["group", "channel"]


class UnetConfig(Config):
    width: int = Field(128, ge=8, le=65536)
    """Channels at the finest level."""
    multipliers: tuple[Positive, ...] = Field((1, 2, 3, 4), min_length=1)
    """Width of each level in units of `width`, fine to coarse; each level after the first halves the map."""
    blocks: tuple[BlockCount, ...] = (2,)
    """Residual blocks per level of the encoder (the decoder has one more); one number applies to all levels."""
    self_attention: tuple[bool, ...] | None = None
    """Levels with self-attention; one value applies to all; null: all but the finest."""
    cross_attention: tuple[bool, ...] | None = None
    """Levels with cross-attention to text and image tokens; null: as self_attention. The middle always has it."""
    middle_attention: bool = True
    """Self-attention between the two middle blocks. Without it the cost is linear in the number of pixels."""
    head_width: int = Field(64, ge=8, le=65536)
    """Maximum channels per attention head; the number of heads follows from the level's width."""
    norm: MapNorm = "group"
    """group: GroupNorm. channel: LayerNorm over the channels of each pixel."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the last convolution of each residual block."""
    patch: Literal[1, 2, 4] = 1
    """Fold patches of this size into channels (pixel unshuffle): cheaper, slightly coarser."""
    efficient: bool = False
    """Downsample before the first level, for the large images of a cascade."""

    @field_validator("blocks", "self_attention", "cross_attention", mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _levels(self) -> UnetConfig:
        levels = len(self.multipliers)
        for name in ("blocks", "self_attention", "cross_attention"):
            values = getattr(self, name)
            if values is not None and len(values) not in (1, levels):
                raise ValueError(
                    f"{name} has {len(values)} values for {levels} levels: give one value, or one per level"
                )
        return self

    @property
    def widths(self) -> list[int]:
        return [self.width * multiplier for multiplier in self.multipliers]

    @property
    def factor(self) -> int:
        """Height and width must be multiples of this."""
        return self.patch * 2 ** (len(self.multipliers) - 1 + self.efficient)

    def at_levels(self, name: str) -> tuple[Any, ...]:
        """`blocks`, `self_attention` or `cross_attention` as one value per level."""
        values = getattr(self, name)
        levels = len(self.multipliers)
        if values is None:
            return self.at_levels("self_attention") if name == "cross_attention" else (False,) + (True,) * (levels - 1)
        return values * levels if len(values) == 1 else values

    def check_size(self, height: int, width: int, key: str = "data.size") -> None:
        if height % self.factor or width % self.factor:
            fitting = [max(1, round(side / self.factor)) * self.factor for side in (height, width)]
            raise ConfigError(
                f"{key}={height}×{width} does not fit a U-Net that downsamples {self.factor} times: "
                f"use multiples of {self.factor}, such as {fitting[0]}×{fitting[1]}, or fewer multipliers"
            )


def _build_norm(kind: MapNorm, width: int) -> nn.Module:
    if kind == "channel":
        return ChannelNorm(width)
    groups = next(count for count in range(min(32, max(width // 4, 1)), 0, -1) if width % count == 0)
    return nn.GroupNorm(groups, width)


class ResidualBlock(nn.Module):
    """x + conv(silu((1 + scale) · norm(conv(silu(norm(x)))) + shift)), scale and shift from the vector; initialised to the identity."""

    def __init__(self, channels: int, width: int, vector: int, config: UnetConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = _build_norm(config.norm, channels), _build_norm(config.norm, width)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.modulation = nn.Linear(vector, 2 * width)
        self.drop = nn.Dropout(config.dropout)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.straight = nn.Conv2d(channels, width, 1) if channels != width else nn.Identity()
        zero_init(self.conv2)

    def forward(self, x: Tensor, vector: Tensor, skipped: Tensor | None = None) -> Tensor:
        """x: B C H W; vector: B V; skipped: B S H W, concatenated to x."""
        if skipped is not None:
            x = torch.cat([x, skipped], dim=1)
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.modulation(vector)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm2(h) * (1 + scale) + shift)
        return self.straight(x) + self.conv2(self.drop(h))


class PixelAttention(nn.Module):
    """Self-attention over pixels, then cross-attention to a context."""

    def __init__(self, width: int, config: UnetConfig, own: bool, context_width: int | None) -> None:
        super().__init__()
        heads = next(count for count in range(max(1, -(-width // config.head_width)), width + 1) if width % count == 0)
        self.norm_own = norm_layer("layer", width) if own else None
        self.own = SelfAttention(width, heads) if own else None
        self.norm_cross = norm_layer("layer", width) if context_width else None
        self.cross = CrossAttention(width, heads, context_width=context_width) if context_width else None
        init_weights(self, 1)
        for part in (self.own, self.cross):
            if part is not None:
                zero_init(part.out)

    def forward(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, memory: Memory | None = None
    ) -> Tensor:  # B C H W
        pixels = rearrange(x, "b c h w -> b (h w) c")
        if self.own is not None and self.norm_own is not None:
            pixels = pixels + self.own(self.norm_own(pixels))
        if self.cross is not None and self.norm_cross is not None:
            if memory is None:
                assert context is not None
                memory = self.cross.memory(context)
            pixels = pixels + self.cross(self.norm_cross(pixels), memory, mask)
        return rearrange(pixels, "b (h w) c -> b c h w", h=x.shape[2])


class Level(nn.Module):
    """Residual blocks of one resolution, and the attention after the last."""

    def __init__(self, blocks: list[ResidualBlock], attention: PixelAttention | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.attention = attention


class Unet(nn.Module):
    """B C H W at timesteps t → B C' H W, conditioned by a vector and, through cross-attention, by a context.

    `memory` holds the context's keys and values, computed once per sampling call.
    """

    def __init__(
        self, config: UnetConfig, channels_in: int, channels_out: int, context_width: int | None = None
    ) -> None:
        super().__init__()
        widths, blocks = config.widths, config.at_levels("blocks")
        self.config = config
        self.vector = 4 * config.width
        self.time = nn.Sequential(nn.Linear(config.width, self.vector), nn.SiLU(), nn.Linear(self.vector, self.vector))
        self.stem = nn.Conv2d(channels_in * config.patch**2, widths[0], 3, padding=1)
        self.shrink = downsample_conv(widths[0], widths[0]) if config.efficient else None

        def block(channels: int, width: int) -> ResidualBlock:
            return ResidualBlock(channels, width, self.vector, config)

        def attention(level: int) -> PixelAttention | None:
            own = config.at_levels("self_attention")[level]
            cross = context_width if config.at_levels("cross_attention")[level] else None
            return PixelAttention(widths[level], config, own, cross) if own or cross else None

        skips = [widths[0]]  # channels of the skip connections
        self.down, self.halves = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(widths):
            self.down.append(Level([block(width, width) for _ in range(blocks[level])], attention(level)))
            skips += [width] * blocks[level]
            if level + 1 < len(widths):
                self.halves.append(downsample_conv(width, widths[level + 1]))
                skips.append(widths[level + 1])
        self.middle1, self.middle2 = block(widths[-1], widths[-1]), block(widths[-1], widths[-1])
        own = config.middle_attention
        self.middle_attention = PixelAttention(widths[-1], config, own, context_width) if own or context_width else None
        self.up, self.doubles = nn.ModuleList(), nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            rising = [block(width + skips.pop(), width) for _ in range(blocks[level] + 1)]
            self.up.append(Level(rising, attention(level)))
            if level:
                self.doubles.append(upsample_conv(width, widths[level - 1]))
        self.enlarge = upsample_conv(widths[0], widths[0]) if config.efficient else None
        self.last = block(2 * widths[0], widths[0]) if config.efficient else None
        self.norm = _build_norm(config.norm, widths[0])
        self.out = nn.Conv2d(widths[0], channels_out * config.patch**2, 3, padding=1)
        zero_init(self.out)

    def attentions(self) -> Iterator[PixelAttention]:
        """All attention layers, in forward order."""
        for level in (*self.down, None, *self.up):
            attention = self.middle_attention if level is None else cast(Level, level).attention
            if attention is not None:
                yield attention

    def checkpoint_units(self) -> list[nn.Module]:
        """Residual blocks and attention layers: the units of activation checkpointing."""
        return [part for part in self.modules() if isinstance(part, (ResidualBlock, PixelAttention))]

    def memory(self, context: Tensor) -> list[Memory]:
        """Keys and values of a context for every cross-attention."""
        return [layer.cross.memory(context) for layer in self.attentions() if layer.cross is not None]

    def embed_time(self, t: Tensor) -> Tensor:
        """Embed timesteps (B) as sines and cosines of variance about 1/2, B W."""
        return sincos_embedding(t[:, None], self.config.width) * self.config.width**0.5

    def forward(
        self,
        x: Tensor,  # B C H W
        t: Tensor,  # B
        added: Tensor | None = None,  # B V: added to the time embedding
        context: Tensor | None = None,  # B M D
        mask: Tensor | None = None,  # B M
        memory: list[Memory] | None = None,  # instead of `context`
    ) -> Tensor:
        vector = self.time(self.embed_time(t))
        vector = F.silu(vector if added is None else vector + added)
        attend = _make_attend(context, mask, memory)
        x = F.pixel_unshuffle(x, self.config.patch) if self.config.patch > 1 else x
        x = stem = self.stem(x.contiguous(memory_format=torch.channels_last))
        if self.shrink is not None:
            x = self.shrink(x)
        skips = [x]
        for number, level in enumerate(cast(Iterable[Level], self.down)):
            for index, block in enumerate(level.blocks):
                x = block(x, vector)
                if index + 1 == len(level.blocks):
                    x = attend(level.attention, x)
                skips.append(x)
            if number < len(self.halves):
                x = self.halves[number](x)
                skips.append(x)
        x = self.middle2(attend(self.middle_attention, self.middle1(x, vector)), vector)
        for number, level in enumerate(cast(Iterable[Level], self.up)):
            for block in level.blocks:
                x = block(x, vector, skips.pop())
            x = attend(level.attention, x)
            if number < len(self.doubles):
                x = self.doubles[number](x)
        if self.enlarge is not None and self.last is not None:
            x = self.last(self.enlarge(x), vector, stem)
        x = self.out(F.silu(self.norm(x))).float()
        return F.pixel_shuffle(x, self.config.patch) if self.config.patch > 1 else x


def _make_attend(
    context: Tensor | None, mask: Tensor | None, memory: list[Memory] | None
) -> Callable[[PixelAttention | None, Tensor], Tensor]:
    """A function that applies each attention layer with its own memory."""
    left = iter(memory or ())

    def attend(attention: PixelAttention | None, x: Tensor) -> Tensor:
        if attention is None:
            return x
        reads = attention.cross is not None and memory is not None
        return attention(x, context, mask, next(left) if reads else None)

    return attend


def downsample_conv(width: int, wider: int) -> nn.Module:
    """H W → H/2 W/2"""
    return nn.Conv2d(width, wider, 2, stride=2)
