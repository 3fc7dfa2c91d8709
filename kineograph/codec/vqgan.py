"""VQGAN: a convolutional image tokenizer. It tokenizes clips frame by frame."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from kineograph.codec import perceptual as lpips
from kineograph.codec.adversarial import AdversarialConfig, Discriminator, build_discriminator, gan_players
from kineograph.codec.codec_loss import (
    Reconstruction,
    codec_limits,
    codec_loss,
    frame_shares,
    frames_to_pixels,
    is_adversarial_step,
    pixels_to_frames,
    validation_metrics,
)
from kineograph.codec.perceptual import Lpips, PerceptualConfig
from kineograph.codec.token_grid import grid_size
from kineograph.core.batch import Batch, Shape
from kineograph.core.capabilities import (
    ChecksHealth,
    ComparesWithinBatch,
    SupportsBuckets,
    SupportsLossMasks,
    SupportsReconstruction,
)
from kineograph.core.config import BlockCount, PlayerDefaults, Positive, StageConfig
from kineograph.core.health import Limit
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Loss, Mean
from kineograph.nn.conv import ChannelNorm, MapAttention, ResidualBlock, downsample_conv, upsample_conv
from kineograph.nn.quantizers import LFQ, QuantizerConfig, VQConfig, build_quantizer


class VQGANConfig(StageConfig):
    # Those of the measured presets: with slower betas, rare large gradients make the loss spike (docs/log.md).
    player_defaults: ClassVar[PlayerDefaults] = {"generator": {"betas": (0.9, 0.95), "clip": 0.1}}
    task: str = "vqgan"
    width: int = Field(64, ge=8, le=65536)
    """Channels at the finest level."""
    multipliers: tuple[Positive, ...] = Field((1, 2, 4), min_length=1)
    """Width of each level in units of `width`, fine to coarse; each level after the first downsamples by 2."""
    patch: Literal[1, 2, 4] = 2
    """Side of the pixel blocks folded into channels before the first level. A token covers f = patch · 2^(levels − 1) pixels."""
    blocks: tuple[BlockCount, ...] = (1,)
    """Residual blocks of the encoder at each level; one number for all."""
    decoder_blocks: tuple[BlockCount, ...] | None = None
    """Residual blocks of the decoder at each level, fine to coarse; null: as the encoder."""
    attention: bool = False
    """Self-attention at the coarsest level, in encoder and decoder."""
    quantizer: QuantizerConfig = VQConfig()
    """kind: vq, lfq or fsq, and its settings."""
    loss: Literal["l1", "l2"] = "l1"
    """Reconstruction loss of pixels in [−1, 1]."""
    perceptual: PerceptualConfig = PerceptualConfig()
    adversarial: AdversarialConfig | None = None
    """The GAN; null: none."""

    def player_names(self) -> tuple[str, ...]:
        return ("generator", "discriminator")

    @field_validator("blocks", "decoder_blocks", mode="before")
    @classmethod
    def _wrap_number(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _check_levels(self) -> VQGANConfig:
        for name in ("blocks", "decoder_blocks"):
            blocks = getattr(self, name)
            if blocks is not None and len(blocks) not in (1, len(self.multipliers)):
                levels = len(self.multipliers)
                raise ValueError(
                    f"{name} has {len(blocks)} numbers for {levels} levels: give one, or one for each level"
                )
        return self

    @property
    def factor(self) -> int:
        """Side of a token in pixels."""
        return self.patch * 2 ** (len(self.multipliers) - 1)

    @property
    def widths(self) -> list[int]:
        return [self.width * multiplier for multiplier in self.multipliers]

    def blocks_at(self, decoder: bool) -> tuple[int, ...]:
        blocks = self.decoder_blocks if decoder and self.decoder_blocks is not None else self.blocks
        return blocks * len(self.multipliers) if len(blocks) == 1 else blocks


class Encoder(nn.Module):
    """F C H W in [−1, 1] → F widths[-1] h w"""

    def __init__(self, channels: int, config: VQGANConfig) -> None:
        super().__init__()
        self.patch = config.patch
        widths, blocks = config.widths, config.blocks_at(decoder=False)
        layers: list[nn.Module] = [nn.Conv2d(channels * config.patch**2, widths[0], 3, padding=1)]
        layers += [ResidualBlock(widths[0]) for _ in range(blocks[0])]
        for (width, wider), count in zip(pairwise(widths), blocks[1:]):
            layers += [downsample_conv(width, wider), *(ResidualBlock(wider) for _ in range(count))]
        if config.attention:
            layers.append(MapAttention(widths[-1]))
        layers.append(ChannelNorm(widths[-1]))
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        folded = F.pixel_unshuffle(images, self.patch)
        return self.layers(folded.contiguous(memory_format=torch.channels_last))


class Decoder(nn.Module):
    """F widths[-1] h w → F widths[0] H/patch W/patch; the last layer is ToPixels."""

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        widths, blocks = config.widths, config.blocks_at(decoder=True)
        layers: list[nn.Module] = [MapAttention(widths[-1])] if config.attention else []
        layers += [ResidualBlock(widths[-1]) for _ in range(blocks[-1])]
        for (width, wider), count in reversed(list(zip(pairwise(widths), blocks))):
            layers += [upsample_conv(wider, width), *(ResidualBlock(width) for _ in range(count))]
        layers += [ChannelNorm(widths[0]), nn.SiLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z.contiguous(memory_format=torch.channels_last))


class ToPixels(nn.Module):
    """The decoder's last layer; separate, so that the adaptive weight's gradients pass through nothing else."""

    def __init__(self, channels: int, config: VQGANConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.conv = nn.Conv2d(config.widths[0], channels * config.patch**2, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        images = F.pixel_shuffle(self.conv(features).float(), self.patch)
        return images.contiguous(memory_format=torch.channels_last)


class VQGAN(Codec, SupportsReconstruction, SupportsBuckets, SupportsLossMasks, ComparesWithinBatch, ChecksHealth):
    """Codec and its training task: generator (encoder, quantizer, decoder) and discriminator."""

    Config = VQGANConfig
    vocabulary: int
    latent_channels: int

    def __init__(self, config: VQGANConfig, shape: Shape, perceptual: Lpips | None = None) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.shape_for(shape.frames, shape.height, shape.width)
        self.encoder = Encoder(shape.channels, config)
        self.quantizer = build_quantizer(config.widths[-1], config.quantizer)
        self.decoder = Decoder(config)
        self.to_pixels = ToPixels(shape.channels, config)
        self.vocabulary, self.latent_channels = self.quantizer.codes, self.quantizer.dim
        self.perceptual = perceptual
        self.discriminator = build_discriminator(config.adversarial, shape, Discriminator)
        self.players = gan_players(self.discriminator)

    @classmethod
    def build(cls, config: VQGANConfig, context: BuildContext) -> VQGAN:
        has_gan = config.adversarial is not None and config.adversarial.weight > 0
        return cls(config, context.shape, lpips.build_perceptual_loss(config.perceptual, context, has_gan))

    # codec -------------------------------------------------------------------------------------------------------

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Token grid (t, h, w) of a clip."""
        factor = self.config.factor
        return frames, *grid_size("vqgan", height, width, (factor, factor))

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        return frame_mask

    @torch.no_grad()
    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → B T h w"""
        self.shape_for(*pixels.shape[1:2], *pixels.shape[-2:])
        ids = self.quantizer.ids(self.encoder(pixels_to_frames(pixels)))
        return rearrange(ids, "(b t) h w -> b t h w", b=pixels.shape[0])

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """B T h w → B T C H W in [0, 1]"""
        features = self.quantizer.lookup(rearrange(tokens, "b t h w -> (b t) h w"))
        return frames_to_pixels(self.to_pixels(self.decoder(features)), tokens.shape[0])

    @torch.no_grad()
    def encode_latents(self, pixels: Tensor) -> Tensor:
        """B T C H W in [0, 1] → B T c h w: the quantizer's input."""
        self.shape_for(*pixels.shape[1:2], *pixels.shape[-2:])
        latents = self.quantizer.compress(self.encoder(pixels_to_frames(pixels)))
        return rearrange(latents, "(b t) c h w -> b t c h w", b=pixels.shape[0])

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """B T c h w → B T C H W in [0, 1], through the nearest codes"""
        features = self.quantizer.restore(rearrange(latents, "b t c h w -> (b t) c h w"))
        return frames_to_pixels(self.to_pixels(self.decoder(features)), latents.shape[0])

    # training ----------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        if player == "discriminator" and self.discriminator is not None:
            return [self.discriminator]
        return [self.encoder, self.quantizer, self.decoder, self.to_pixels]

    def is_active(self, player: str, step: int) -> bool:
        return player == "generator" or is_adversarial_step(self.config.adversarial, step)

    def forward(self, batch: Batch, noise: Noise) -> Reconstruction:
        video = batch.video
        real = pixels_to_frames(video)
        keep = None
        if batch.frame_mask is not None and video.shape[1] > 1:
            keep = batch.frame_mask.flatten()
        quantized = self.quantizer(self.encoder(real), keep)
        fake = self.to_pixels(self.decoder(quantized.z))
        weights = real.new_ones(real.shape[0]) if keep is None else keep.to(real.dtype)
        share = frame_shares(batch, video.shape[1])
        return Reconstruction(real, fake, weights, quantized, keep, noise, share=share)

    def loss(self, player: str, shared: Reconstruction) -> Loss:
        last = [self.to_pixels.conv.weight]
        return codec_loss(player, shared, self.config, self.vocabulary, self.perceptual, self.discriminator, last)

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        shared = self(batch, noise)
        return validation_metrics(shared, self.config, self.vocabulary, self.perceptual, batch.spare)

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.decode(self.encode(batch.video))

    def health_limits(self) -> tuple[Limit, ...]:
        return codec_limits(
            self.vocabulary, self.config.quantizer.kind, has_discriminator=self.discriminator is not None
        )

    def describe_micro_batch(self, clips: int) -> str | None:
        grid = self.shape_for(self.shape.frames, self.shape.height, self.shape.width)
        return self.quantizer.describe_micro_batch(clips * math.prod(grid)) if isinstance(self.quantizer, LFQ) else None

    # structure ---------------------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [part for part in (self.encoder, self.decoder, self.discriminator, self.perceptual) if part is not None]

    def blocks(self) -> list[nn.Module]:
        return [part for part in self.modules() if isinstance(part, ResidualBlock)]


TASK = VQGAN
