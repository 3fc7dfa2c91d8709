"""The adversarial game of codecs: patch discriminators of pictures and clips, hinge losses, its gradient penalty, the generator's adaptive weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from kineograph.core import distributed
from kineograph.core.batch import Shape
from kineograph.core.config import Config
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.nn.conv import ChannelNorm, downsample_conv


class AdversarialConfig(Config):
    weight: float = Field(0.8, ge=0)
    """Of the generator's adversarial term, before the adaptive weight; 0 turns the game off: no discriminator is built."""
    start: int = Field(0, ge=0)
    """Step at which the game begins. A reconstruction worth judging comes first."""
    adaptive: bool = True
    """Scale the term so that its gradient at the decoder's last layer is as long as that of the perceptual loss
    (of the reconstruction loss where there is none)."""
    adaptive_max: float = Field(1e4, gt=0)
    """Largest adaptive weight."""
    penalty: float = Field(1.0, ge=0)
    """γ of the discriminator's R1 penalty, γ/2 · |∇D(real)|²."""
    penalty_every: int = Field(16, ge=1)
    """The penalty is computed once in so many steps, and weighs so many times more then."""
    width: int = Field(64, ge=1)
    """Channels of the discriminator's first layer; each further one doubles them, up to eight times."""
    frames: int | None = Field(None, ge=1)
    """A run of so many frames of each clip, begun at random, is judged in a step; null: whole clips."""
    levels: int = Field(3, ge=1)
    """Halvings before a patch is judged: one judgement a 2^levels × 2^levels pixels."""


class Discriminator(nn.Module):
    """Judges every patch of a picture: F C H W in [−1, 1] → logits F h w."""

    def __init__(self, channels: int, config: AdversarialConfig) -> None:
        super().__init__()
        widths = [config.width * min(2**level, 8) for level in range(config.levels)]
        layers: list[nn.Module] = [downsample_conv(channels, widths[0]), nn.LeakyReLU(0.2)]
        for width, wider in pairwise(widths):
            layers += [downsample_conv(width, wider), ChannelNorm(wider), nn.LeakyReLU(0.2)]
        layers += [nn.Conv2d(widths[-1], widths[-1], 1), nn.LeakyReLU(0.2), nn.Conv2d(widths[-1], 1, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures)[:, 0].float()


class TimeMix(nn.Module):
    """A convolution over three neighbouring frames, at each place alone: B·T C H W → the same.

    It is computed as one matrix product a pixel, to what the pixel adds to the frame after it, to its own and to the one before, and
    a sum of the three: matrix products are fast for every shape, convolutions of 3 × 1 are not. Before the first frame and after
    the last stands nothing, and so it does in place of padding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor, frames: int, keep: Tensor | None) -> Tensor:
        if frames == 1:
            return F.conv2d(x, self.conv.weight[:, :, 1:2], self.conv.bias)
        if keep is not None:
            x = x * keep[:, None, None, None].to(x.dtype)
        weight = rearrange(self.conv.weight, "o i k 1 -> (k o) i")
        each = F.linear(x.permute(0, 2, 3, 1), weight)  # B·T H W 3C, x in channels_last memory
        forth, own, back = rearrange(each, "(b t) h w (k c) -> k b t h w c", t=frames, k=3)
        shift = (0, 0) * 3  # nothing beside, above or among the channels
        mixed = own + F.pad(forth[:, :-1], (*shift, 1, 0)) + F.pad(back[:, 1:], (*shift, 0, 1)) + self.conv.bias
        return mixed.flatten(0, 1).permute(0, 3, 1, 2)  # channels_last


class VideoDiscriminator(nn.Module):
    """Judges every patch of every frame in the light of the frames around it: each level looks one of its frames further in
    both directions, so motion is judged, and an image is a clip of one frame. B·T C H W in [−1, 1] → logits B·T h w."""

    def __init__(self, channels: int, config: AdversarialConfig) -> None:
        super().__init__()
        widths = [config.width * min(2**level, 8) for level in range(config.levels)]
        self.halves = nn.ModuleList(downsample_conv(a, b) for a, b in pairwise([channels, *widths]))
        self.norms = nn.ModuleList([nn.Identity(), *(ChannelNorm(width) for width in widths[1:])])
        self.mixes = nn.ModuleList(TimeMix(width) for width in widths)
        self.wide = nn.Conv2d(widths[-1], widths[-1], 1)
        self.judge = nn.Conv2d(widths[-1], 1, 3, padding=1)

    def forward(self, pictures: Tensor, frames: int, keep: Tensor | None = None) -> Tensor:
        """`frames` a clip; `keep`, B·T: False where a frame is padding, which then changes no other frame's logits."""
        x = pictures.contiguous(memory_format=torch.channels_last)
        for half, norm, mix in zip(self.halves, self.norms, self.mixes):
            x = F.leaky_relu(norm(half(x)), 0.2)
            x = x + F.leaky_relu(mix(x, frames, keep), 0.2)
        return self.judge(F.leaky_relu(self.wide(x), 0.2))[:, 0].float()


def check_size(config: AdversarialConfig, height: int, width: int) -> None:
    patch = 2**config.levels
    if min(height, width) < patch:
        fits = min(height, width).bit_length() - 1
        raise ConfigError(
            f"adversarial.levels={config.levels} halves pictures below one pixel at data.size=[{height}, {width}]: "
            f"use {fits} or fewer"
        )


D = TypeVar("D", Discriminator, VideoDiscriminator)


def build_discriminator(config: AdversarialConfig | None, shape: Shape, kind: type[D]) -> D | None:
    """The discriminator that a codec plays against; None: it plays against nobody."""
    if config is None or not config.weight:
        return None
    check_size(config, shape.height, shape.width)
    return kind(shape.channels, config)


def gan_players(discriminator: nn.Module | None) -> tuple[str, ...]:
    return ("generator",) if discriminator is None else ("generator", "discriminator")


# What the discriminator descends -----------------------------------------------------------------------------------


def discriminator_hinge(real: Tensor, fake: Tensor) -> Tensor:
    """½ (max(0, 1 − D(real)) + max(0, 1 + D(fake))), mean over patches: F h w → F"""
    return (F.relu(1 - real) + F.relu(1 + fake)).mean((1, 2)) / 2


PENALTY_STEP = 0.05
"""Length of the finite difference a pixel: far above what bf16 rounds away, far below what a person sees."""


def perturb(real: Tensor, noise: Noise) -> Tensor:
    """x + s ε, random signs ε by sample: what `slope` compares D(x) with."""
    signs = (noise.bits("penalty", real.numel() // noise.batch) & 1).to(real.dtype) * 2 - 1
    return torch.add(real, signs.view(real.shape), alpha=PENALTY_STEP)


def finite_difference_r1(real: Tensor, moved: Tensor) -> Tensor:
    """|∇D(real)|² from the logits of real and nudged pictures, mean over patches: F

    E[((D(x + s ε) − D(x)) / s)²] → ∇Dᵀ E[ε εᵀ] ∇D = |∇D|² for random signs ε. More rows of the same compiled forward take
    the place of a double backward, which torch.compile refuses; uncompiled, on two CPU cores, they take 0.2 of its time.
    """
    return ((moved - real) / PENALTY_STEP).square().mean((1, 2))


# What the generator descends ---------------------------------------------------------------------------------------


def generator_hinge(fake: Tensor) -> Tensor:
    """−D(fake), mean over patches: F h w → F"""
    return -fake.mean((1, 2))


_SCALE = 2.0**10  # keeps gradients above fp16's smallest numbers on their way back through a network


def gradient_at(pictures: Tensor, judge: Callable[[Tensor], Tensor], keep: Tensor) -> tuple[Tensor, Tensor]:
    """Σ keep · judge(pictures) and its gradient at the pictures.

    Going back through a judge once, ending at the pictures, serves the adaptive weight and the update alike.
    """
    with torch.enable_grad():
        leaf = pictures.detach().requires_grad_()
        value = (judge(leaf) * keep).sum()
        with torch.autocast(value.device.type, enabled=False):
            (gradient,) = torch.autograd.grad(value, leaf, torch.full_like(value, _SCALE))
    return value.detach(), gradient / _SCALE


def adaptive_weight(
    pictures: Tensor, last: Sequence[Tensor], reference: Tensor, push: Tensor, largest: float
) -> Tensor:
    """|∂ reference / ∂ last| / |∂ adversarial / ∂ last|, from the two gradients at the pictures; of the global batch.

    `last` are the weights that paint them; each must have painted some of these.
    """
    with torch.autocast(pictures.device.type, enabled=False):
        at_last = [
            torch.cat([g.flatten() for g in torch.autograd.grad(pictures, last, gradient, retain_graph=True)])
            for gradient in (reference, push)
        ]
    wanted, found = distributed.all_reduce_(torch.stack(at_last)).norm(dim=1)
    return (wanted / found.clamp_min(1e-8)).clamp_max(largest).detach()
