"""Adversarial training of codecs: patch discriminators of images and clips, their losses, R1 penalty, adaptive weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, TypeVar

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

GanLoss = Literal["hinge", "bce"]


class AdversarialConfig(Config):
    weight: float = Field(0.8, ge=0)
    """Weight of the generator's adversarial loss, before the adaptive weight; 0: no discriminator is built."""
    start: int = Field(0, ge=0)
    """First adversarial step. Reconstructions should be recognizable before."""
    warmup: int = Field(0, ge=0)
    """Steps over which the generator's weight rises from 0, while the discriminator learns at its full rate. An untrained
    discriminator's gradient points nowhere."""
    loss: GanLoss = "hinge"
    """hinge; or bce: cross-entropy of real and fake, non-saturating for the generator."""
    adaptive: bool = True
    """Scale the adversarial gradient at the decoder's last layer to the norm of the gradient of reconstruction and perceptual loss,
    and to nothing while the discriminator cannot tell real from fake."""
    adaptive_max: float = Field(1e4, gt=0)
    """Largest adaptive weight."""
    penalty: float = Field(0.1, ge=0)
    """γ of the discriminator's R1 penalty, γ/2 · |∇D(real)|² of each patch's logit."""
    penalty_every: int = Field(16, ge=1)
    """Compute the penalty every so many steps, with as many times the weight."""
    width: int = Field(64, ge=1, le=65536)
    """Channels of the discriminator's first layer; each layer doubles them, up to eightfold."""
    frames: int | None = Field(None, ge=1)
    """The discriminator sees so many consecutive frames of each clip, from a random start; null: whole clips."""
    levels: int = Field(3, ge=1, le=16)
    """Downsamplings of the discriminator: one logit for each 2^levels × 2^levels pixels."""


class Discriminator(nn.Module):
    """Patch discriminator of single frames: F C H W in [−1, 1] → logits F h w"""

    def __init__(self, channels: int, config: AdversarialConfig) -> None:
        super().__init__()
        widths = [config.width * min(2**level, 8) for level in range(config.levels)]
        layers: list[nn.Module] = [downsample_conv(channels, widths[0]), nn.LeakyReLU(0.2)]
        for width, wider in pairwise(widths):
            layers += [downsample_conv(width, wider), ChannelNorm(wider), nn.LeakyReLU(0.2)]
        layers += [nn.Conv2d(widths[-1], widths[-1], 1), nn.LeakyReLU(0.2), nn.Conv2d(widths[-1], 1, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor, frames: int = 1, keep: Tensor | None = None) -> Tensor:
        """`frames` and `keep` do not matter: no frame sees another."""
        return self.layers(images)[:, 0].float()


class TimeMix(nn.Module):
    """Temporal convolution with kernel 3, B·T C H W → the same; zeros stand outside the clip and for padding.

    Computed as one matrix product of each pixel, whose three outputs are shifted in time and summed: matrix products are fast for
    every shape, 3 × 1 convolutions are not.
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
        to_next, own, to_previous = rearrange(each, "(b t) h w (k c) -> k b t h w c", t=frames, k=3)
        no_pad = (0, 0) * 3  # of channels, width and height
        mixed = (
            own + F.pad(to_next[:, :-1], (*no_pad, 1, 0)) + F.pad(to_previous[:, 1:], (*no_pad, 0, 1)) + self.conv.bias
        )
        return mixed.flatten(0, 1).permute(0, 3, 1, 2)  # channels_last


class VideoDiscriminator(nn.Module):
    """Patch discriminator of clips: B·T C H W in [−1, 1] → logits B·T h w

    Each level mixes neighbouring frames, so motion is seen. An image is a clip of one frame.
    """

    def __init__(self, channels: int, config: AdversarialConfig) -> None:
        super().__init__()
        widths = [config.width * min(2**level, 8) for level in range(config.levels)]
        self.halves = nn.ModuleList(downsample_conv(a, b) for a, b in pairwise([channels, *widths]))
        self.norms = nn.ModuleList([nn.Identity(), *(ChannelNorm(width) for width in widths[1:])])
        self.mixes = nn.ModuleList(TimeMix(width) for width in widths)
        self.wide = nn.Conv2d(widths[-1], widths[-1], 1)
        self.judge = nn.Conv2d(widths[-1], 1, 3, padding=1)

    def forward(self, images: Tensor, frames: int, keep: Tensor | None = None) -> Tensor:
        """`frames` of a clip; `keep` B·T: False for padding, which then has no effect on other frames."""
        x = images.contiguous(memory_format=torch.channels_last)
        for half, norm, mix in zip(self.halves, self.norms, self.mixes):
            x = F.leaky_relu(norm(half(x)), 0.2)
            x = x + F.leaky_relu(mix(x, frames, keep), 0.2)
        return self.judge(F.leaky_relu(self.wide(x), 0.2))[:, 0].float()


def check_size(config: AdversarialConfig, height: int, width: int) -> None:
    patch = 2**config.levels
    if min(height, width) < patch:
        fits = min(height, width).bit_length() - 1
        raise ConfigError(
            f"adversarial.levels={config.levels} downsamples below one pixel at data.size=[{height}, {width}]: "
            f"use {fits} or fewer"
        )


D = TypeVar("D", Discriminator, VideoDiscriminator)


def build_discriminator(config: AdversarialConfig | None, shape: Shape, kind: type[D]) -> D | None:
    """None where there is no adversarial loss."""
    if config is None or not config.weight:
        return None
    check_size(config, shape.height, shape.width)
    return kind(shape.channels, config)


def gan_players(discriminator: nn.Module | None) -> tuple[str, ...]:
    return ("generator",) if discriminator is None else ("generator", "discriminator")


# Discriminator loss -----------------------------------------------------------------------------------------------


def discriminator_error(kind: GanLoss, real: Tensor, fake: Tensor) -> Tensor:
    """Mean over patches, F h w → F. hinge: ½ (max(0, 1 − D(real)) + max(0, 1 + D(fake))); bce: −½ (log σ(D(real)) + log σ(−D(fake)))"""
    loss = F.relu(1 - real) + F.relu(1 + fake) if kind == "hinge" else F.softplus(-real) + F.softplus(fake)
    return loss.mean((1, 2)) / 2


PENALTY_STEP = 0.05
"""Step of the finite difference, per pixel: far above bf16's rounding."""


def perturb(real: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """x + s ε and x − s ε with random signs ε, for `finite_difference_r1`"""
    signs = (noise.bits("penalty", real.numel() // noise.batch) & 1).to(real.dtype) * 2 - 1
    step = signs.view(real.shape) * PENALTY_STEP
    return real + step, real - step


def finite_difference_r1(above: Tensor, below: Tensor) -> Tensor:
    """|∇D(real)|² from the logits of the two perturbed images, mean over patches: F

    E[((D(x + s ε) − D(x − s ε)) / 2s)²] → ∇Dᵀ E[ε εᵀ] ∇D = |∇D|² for random signs ε. This needs no double backward, which torch.compile
    refuses. The one-sided difference D(x + s ε) − D(x) has a term s/2 εᵀHε: a trained discriminator knows noise from a picture, and
    the estimate grows to 1.4 … 15 times the penalty.
    """
    return ((above - below) / (2 * PENALTY_STEP)).square().mean((1, 2))


# Generator loss ---------------------------------------------------------------------------------------------------


def generator_error(kind: GanLoss, fake: Tensor) -> Tensor:
    """Mean over patches, F h w → F. hinge: −D(fake); bce: −log σ(D(fake))"""
    return (-fake if kind == "hinge" else F.softplus(-fake)).mean((1, 2))


def ramp_weight(config: AdversarialConfig, step: int) -> float:
    """The share of the generator's adversarial weight at a step: 0 → 1 over `warmup` steps."""
    return min((step - config.start + 1) / (config.warmup + 1), 1.0)


FULL_SEPARATION = 0.2  # difference of mean logits from which on the discriminator's gradient has its full weight


def measure_separation(real: Tensor, fake: Tensor, keep: Tensor) -> Tensor:
    """0 … 1, how far the discriminator tells real from fake, from the mean logits of the frames of the global batch, each F.

    Where it cannot (it is untrained, or reconstructions are almost perfect) its gradient is arbitrary, and tiny: the adaptive weight
    would scale it up to the size of the others.
    """
    sums = torch.stack([((real - fake) * keep).sum(), keep.sum()])
    difference, count = distributed.all_reduce_(sums)
    return (difference / count.clamp_min(1) / FULL_SEPARATION).clamp(0, 1)


_SCALE = 2.0**10  # keeps gradients above fp16's smallest numbers


def gradient_at(images: Tensor, loss: Callable[[Tensor], Tensor], keep: Tensor) -> tuple[Tensor, Tensor]:
    """Σ keep · loss(images), and its gradient at the images: one backward pass for the adaptive weight and the update."""
    with torch.enable_grad():
        leaf = images.detach().requires_grad_()
        value = (loss(leaf) * keep).sum()
        with torch.autocast(value.device.type, enabled=False):
            (gradient,) = torch.autograd.grad(value, leaf, torch.full_like(value, _SCALE))
    return value.detach(), gradient / _SCALE


def adaptive_weight(
    images: Tensor, last: Sequence[Tensor], reference: Tensor, adversarial: Tensor, largest: float
) -> Tensor:
    """|∂ reference / ∂ last| / |∂ adversarial / ∂ last| over the global batch, from both gradients at the images.

    `last`: the weights of the layer that produced the images.
    """
    norms = []
    for gradient in (reference, adversarial):
        # Of unit norm: in fp16, a layer's backward would round the small gradients of single pixels to 0.
        size = gradient.norm().clamp_min(1e-30)
        with torch.autocast(images.device.type, enabled=False):
            at_last = torch.autograd.grad(images, last, gradient / size, retain_graph=True)
        norms.append(torch.cat([g.flatten() for g in at_last]).float() * size)
    target, current = distributed.all_reduce_(torch.stack(norms)).norm(dim=1)
    return (target / current.clamp_min(1e-8)).clamp_max(largest).detach()
