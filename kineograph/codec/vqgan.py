"""VQGAN: a convolutional image tokenizer. Clips are tokenized frame by frame."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from kineograph.codec import perceptual as lpips
from kineograph.codec.adversarial import (
    AdversarialConfig,
    Discriminator,
    adaptive_weight,
    check_size,
    fooling,
    gradient_at,
    hinge,
    nudged,
    slope,
)
from kineograph.codec.perceptual import Lpips, PerceptualConfig
from kineograph.core.batch import Batch, Shape
from kineograph.core.config import StageConfig
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, Task
from kineograph.nn.conv import ChannelNorm, MapAttention, ResidualBlock, double, halve
from kineograph.nn.quantizers import (
    Quantized,
    QuantizerConfig,
    VQConfig,
    build_quantizer,
    codebook_histogram,
    straight_through,
    usage,
)


class VQGANConfig(StageConfig):
    task: str = "vqgan"
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
    quantizer: QuantizerConfig = VQConfig()
    """kind: vq, lfq or fsq, and what belongs to it."""
    loss: Literal["l1", "l2"] = "l1"
    """Reconstruction loss, of pixels in [−1, 1]."""
    perceptual: PerceptualConfig = PerceptualConfig()
    adversarial: AdversarialConfig | None = None
    """The GAN; null: none."""

    @field_validator("blocks", "decoder_blocks", mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _levels(self) -> VQGANConfig:
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

    def __init__(self, channels: int, config: VQGANConfig) -> None:
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

    def __init__(self, config: VQGANConfig) -> None:
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

    def __init__(self, channels: int, config: VQGANConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.conv = nn.Conv2d(config.widths[0], channels * config.patch**2, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        pictures = F.pixel_shuffle(self.conv(features).float(), self.patch)
        return pictures.contiguous(memory_format=torch.channels_last)


@dataclass
class Reconstruction:
    """What both players of a step look at. Frames of all clips side by side."""

    real: Tensor  # F C H W in [−1, 1]
    fake: Tensor  # F C H W
    keep: Tensor  # F: 1 for a frame, 0 for padding
    quantized: Quantized
    noise: Noise

    @property
    def count(self) -> Tensor:
        return self.keep.sum()


class VQGAN(Task):
    """Codec and its training: generator (encoder, quantizer, decoder) against discriminator."""

    Config = VQGANConfig
    players: ClassVar[tuple[str, ...]] = ("generator", "discriminator")  # an instance without a GAN has the first alone

    def __init__(self, config: VQGANConfig, shape: Shape, perceptual: Lpips | None = None) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.shape_for(shape.frames, shape.height, shape.width)
        self.encoder = Encoder(shape.channels, config)
        self.quantizer = build_quantizer(config.widths[-1], config.quantizer)
        self.decoder = Decoder(config)
        self.to_pixels = ToPixels(shape.channels, config)
        self.vocabulary = self.quantizer.codes
        self.perceptual = perceptual
        self.discriminator: Discriminator | None = None
        self.players = ("generator",)  # type: ignore[misc]
        if config.adversarial and config.adversarial.weight:
            check_size(config.adversarial, shape.height, shape.width)
            self.discriminator = Discriminator(shape.channels, config.adversarial)
            self.players = ("generator", "discriminator")  # type: ignore[misc]

    @classmethod
    def build(cls, config: VQGANConfig, context: BuildContext) -> VQGAN:
        return cls(config, context.shape, _perceptual(config, context))

    # codec -------------------------------------------------------------------------------------------------------

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Tokens (t, h, w) of a clip."""
        factor = self.config.factor
        for name, size in (("height", height), ("width", width)):
            if size % factor or not size:
                below, above = size // factor * factor, (size // factor + 1) * factor
                near = f"{below} or {above}" if below else f"{above}"
                raise ConfigError(
                    f"data.size=[{height}, {width}] does not fit this vqgan: a token covers {factor} × {factor} pixels, "
                    f"so the {name} must be a multiple of {factor} ({near})"
                )
        return frames, height // factor, width // factor

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        return frame_mask

    @torch.no_grad()
    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → B T h w"""
        self.shape_for(*pixels.shape[1:2], *pixels.shape[-2:])
        ids = self.quantizer(self.encoder(_inward(pixels))).ids
        return rearrange(ids, "(b t) h w -> b t h w", b=pixels.shape[0])

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """B T h w → B T C H W in [0, 1]"""
        features = self.quantizer.lookup(rearrange(tokens, "b t h w -> (b t) h w"))
        return _outward(self.to_pixels(self.decoder(features)), tokens.shape[0])

    # training ----------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        if player == "discriminator" and self.discriminator is not None:
            return [self.discriminator]
        return [self.encoder, self.quantizer, self.decoder, self.to_pixels]

    def plays(self, player: str, step: int) -> bool:
        return player == "generator" or self._game_on(step)

    def forward(self, batch: Batch, noise: Noise) -> Reconstruction:
        video = batch.video
        real = _inward(video)
        keep = None
        if batch.frame_mask is not None and video.shape[1] > 1:
            keep = batch.frame_mask.flatten()
        quantized = self.quantizer(self.encoder(real), keep)
        fake = self.to_pixels(self.decoder(quantized.z))
        weights = real.new_ones(real.shape[0]) if keep is None else keep.to(real.dtype)
        return Reconstruction(real, fake, weights, quantized, noise)

    def loss(self, player: str, shared: Reconstruction) -> Loss:
        return self._discriminator_loss(shared) if player == "discriminator" else self._generator_loss(shared)

    def _generator_loss(self, shared: Reconstruction) -> Loss:
        """reconstruction + quantizer + w_p perceptual + w_a λ adversarial"""
        real, fake, keep, count = shared.real, shared.fake, shared.keep, shared.count
        reconstruction = (self._distance(fake, real) * keep).sum()
        total = reconstruction + shared.quantized.loss * count
        terms = {"reconstruction": reconstruction, "quantizer": shared.quantized.loss * count}
        # The judges are walked back through here, to the pictures; the total carries their gradients on from there.
        reference = None  # gradient at the pictures of what the adversarial term is measured against
        if (look := self.perceptual) is not None:
            weight = self.config.perceptual.weight
            terms["perceptual"], reference = gradient_at(fake, lambda pictures: look(pictures, real), keep)
            total = total + straight_through(weight * terms["perceptual"], (fake * reference * weight).sum())
        game = self.config.adversarial
        if game is not None and (judge := self.discriminator) is not None and self._game_on(shared.noise.step):
            terms["adversarial"], push = gradient_at(fake, lambda pictures: fooling(judge(pictures)), keep)
            strength = torch.full_like(count, game.weight)
            if game.adaptive:
                if reference is None:
                    _, reference = gradient_at(fake, lambda pictures: self._distance(pictures, real), keep)
                last = self.to_pixels.conv.weight
                strength = strength * adaptive_weight(fake, last, reference, push, game.adaptive_max)
            terms["adversarial_weight"] = strength * count
            total = total + straight_through(strength * terms["adversarial"], (fake * (push * strength)).sum())
        named = {name: Mean(value, count) for name, value in terms.items()}
        return Loss(Mean(total, count), named | self._codes(shared, shared.quantized.metrics))

    def _discriminator_loss(self, shared: Reconstruction) -> Loss:
        game, judge = self.config.adversarial, self.discriminator
        assert game is not None
        assert judge is not None
        pictures = [shared.real, shared.fake.detach()]
        if game.penalty and shared.noise.step % game.penalty_every == 0:
            pictures.append(nudged(shared.real, shared.noise))
        real, fake, *moved = judge(torch.cat(pictures)).chunk(len(pictures))  # no norm looks across the batch
        each = hinge(real, fake)
        terms = {"hinge": each, "real": real.mean((1, 2)), "fake": fake.mean((1, 2))}
        if moved:
            terms["penalty"] = slope(real, *moved)
            each = each + game.penalty / 2 * game.penalty_every * terms["penalty"]
        named = {name: Mean((value * shared.keep).sum(), shared.count) for name, value in terms.items()}
        return Loss(Mean((each * shared.keep).sum(), shared.count), named)

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """`loss` is what is seen: reconstruction and, where there is one, perceptual loss; the game's own loss says nothing
        about which checkpoint is best."""
        shared = self(batch, noise)
        error = (_clamped(shared.fake) - _clamped(shared.real)).square().flatten(1).mean(1)
        each = {
            "reconstruction": self._distance(shared.fake, shared.real),
            "psnr": -10 * torch.log10(error.clamp_min(1e-10)),
        }
        each["loss"] = each["reconstruction"]
        if self.perceptual is not None:
            each["lpips"] = self.perceptual(shared.fake, shared.real)
            each["loss"] = each["loss"] + self.config.perceptual.weight * each["lpips"]
        means = {name: Mean((value * shared.keep).sum(), shared.count) for name, value in each.items()}
        return means | self._codes(shared, {})

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.decode(self.encode(batch.video))

    def _distance(self, fake: Tensor, real: Tensor) -> Tensor:
        """F C H W, twice → F"""
        apart = (fake - real).abs() if self.config.loss == "l1" else (fake - real).square()
        return apart.flatten(1).mean(1)

    def _game_on(self, step: int) -> bool:
        game = self.config.adversarial
        return game is not None and self.discriminator is not None and step >= game.start

    def _codes(self, shared: Reconstruction, metrics: dict[str, Tensor]) -> dict[str, Mean]:
        """How this batch uses the codebook. A whole set's use is not the mean of these: add up codebook_histogram."""
        found = usage(codebook_histogram(shared.quantized.ids, self.vocabulary))
        return {f"codes/{name}": Mean(value * shared.count, shared.count) for name, value in (metrics | found).items()}

    # how the outside treats it -----------------------------------------------------------------------------------

    def compiled(self) -> list[nn.Module]:
        return [part for part in (self.encoder, self.decoder, self.discriminator, self.perceptual) if part is not None]

    def blocks(self) -> list[nn.Module]:
        return [part for part in self.modules() if isinstance(part, ResidualBlock)]


def _perceptual(config: VQGANConfig, context: BuildContext) -> Lpips | None:
    if not config.perceptual.weight:
        return None
    if config.perceptual.weights is None:
        context.note("perceptual loss is off: perceptual.weights names no file (VGG16 with LPIPS heads, safetensors)")
        return None
    if min(context.shape.height, context.shape.width) < lpips.SMALLEST:
        raise ConfigError(
            f"data.size=[{context.shape.height}, {context.shape.width}] is too small for the perceptual loss: "
            f"use {lpips.SMALLEST} or more, or perceptual.weight=0"
        )
    return lpips.load(config.perceptual.weights)


def _inward(pixels: Tensor) -> Tensor:
    """B T C H W in [0, 1] → B·T C H W in [−1, 1]"""
    return rearrange(pixels, "b t c h w -> (b t) c h w").mul(2).sub_(1).contiguous(memory_format=torch.channels_last)


def _clamped(pictures: Tensor) -> Tensor:
    """[−1, 1] → [0, 1], nothing outside"""
    return ((pictures + 1) / 2).clamp(0, 1)


def _outward(pictures: Tensor, clips: int) -> Tensor:
    return rearrange(_clamped(pictures), "(b t) c h w -> b t c h w", b=clips)


TASK = VQGAN
