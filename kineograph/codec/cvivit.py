"""C-ViViT: a video tokenizer that is causal in time.

The first frame has its own tokens, so an image is a clip of one frame, and a clip can be continued for any number of frames.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from kineograph.codec import perceptual as lpips
from kineograph.codec.adversarial import AdversarialConfig, VideoDiscriminator, build_discriminator, gan_players
from kineograph.codec.codec_loss import (
    Reconstruction,
    codec_limits,
    codec_loss,
    frame_shares,
    frames_to_pixels,
    is_adversarial_step,
    pixels_to_frames,
    repeat_last_real,
    validation_metrics,
)
from kineograph.codec.perceptual import Lpips, PerceptualConfig
from kineograph.codec.token_grid import grid_size, latent_frame_mask, latent_frames
from kineograph.core.batch import Batch, Shape
from kineograph.core.capabilities import (
    ChecksHealth,
    ComparesWithinBatch,
    SupportsBuckets,
    SupportsLossMasks,
    SupportsReconstruction,
)
from kineograph.core.config import PlayerDefaults, Size, StageConfig
from kineograph.core.health import Limit
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Loss, Mean
from kineograph.nn.positions import Rotation, grid_positions, sincos_embedding
from kineograph.nn.quantizers import LFQ, Quantized, QuantizerConfig, VQConfig, build_quantizer
from kineograph.nn.transformer import Block, BlockConfig, Residual, Transformer, TransformerConfig


class CViViTConfig(StageConfig, BlockConfig):
    # Those of the measured presets: with slower betas, rare large gradients make the loss spike (docs/log.md).
    player_defaults: ClassVar[PlayerDefaults] = {"generator": {"betas": (0.9, 0.95), "clip": 0.5}}
    task: str = "cvivit"
    spatial_depth: int = Field(4, ge=1, le=1000)
    """Spatial blocks of the encoder."""
    temporal_depth: int = Field(4, ge=1, le=1000)
    """Temporal blocks of the encoder."""
    decoder_spatial_depth: int | None = Field(None, ge=1, le=1000)
    """Spatial blocks of the decoder; null: as the encoder."""
    decoder_temporal_depth: int | None = Field(None, ge=1, le=1000)
    """Temporal blocks of the decoder; null: as the encoder."""
    patch: Size = (8, 8)
    """Pixels of a token: one number, or height and width."""
    temporal_patch: int = Field(2, ge=1)
    """Frames of a token, except the first frame, which is coded alone: clips have 1 + k · temporal_patch frames."""
    quantizer: QuantizerConfig = VQConfig()
    """kind: vq, lfq or fsq, and its settings."""
    residual: Residual = "fp32"
    """Precision of the residual stream. auto: bf16 where training is; with fp32, tokens do not depend on rounding."""
    loss: Literal["l1", "l2"] = "l1"
    """Reconstruction loss of pixels in [−1, 1]."""
    perceptual: PerceptualConfig = PerceptualConfig()
    adversarial: AdversarialConfig | None = None
    """The GAN; its discriminator sees motion. null: none."""

    def player_names(self) -> tuple[str, ...]:
        return ("generator", "discriminator")

    def transformer(self, depth: int) -> TransformerConfig:
        shared: dict[str, Any] = {name: getattr(self, name) for name in BlockConfig.model_fields}
        return TransformerConfig(**shared, depth=depth)


# Network -----------------------------------------------------------------------------------------------------------


def patch_embedding(pixels: int, width: int) -> nn.Linear:
    """… pixels of a patch → … D, of about the pixels' magnitude

    No norm: it would make flat patches of different brightness equal. The bias starts at zero, so that codes are spent on differences:
    a random bias left a sixth more error after 300 steps on moving digits (mean of three seeds).
    """
    linear = nn.Linear(pixels, width)
    nn.init.normal_(linear.weight, std=pixels**-0.5)
    nn.init.zeros_(linear.bias)
    return linear


class Spatial(nn.Module):
    """Attention over each latent frame: B t h w D → B t h w D, for any size"""

    def __init__(self, config: CViViTConfig, depth: int) -> None:
        super().__init__()
        self.width, self.head_width = config.width, config.width // config.heads
        self.transformer = Transformer(config.transformer(depth))

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w, _ = x.shape
        positions = grid_positions((h, w), x.device)
        x = rearrange(x, "b t h w d -> (b t) (h w) d") + sincos_embedding(positions, self.width)
        x = self.transformer(x, rotary=Rotation.at_positions(positions, self.head_width))
        return rearrange(x, "(b t) (h w) d -> b t h w d", b=b, h=h)


class Temporal(nn.Module):
    """Causal attention over time at each position: B t h w D → B t h w D"""

    def __init__(self, config: CViViTConfig, depth: int) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.transformer = Transformer(config.transformer(depth), causal=True)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h, _, _ = x.shape
        rotary = Rotation.at_positions(grid_positions((t,), x.device), self.head_width)
        x = self.transformer(rearrange(x, "b t h w d -> (b h w) t d"), rotary=rotary)
        return rearrange(x, "(b h w) t d -> b t h w d", b=b, h=h)


class Encoder(nn.Module):
    """B T C H W in [−1, 1] → B t h w D"""

    def __init__(self, channels: int, config: CViViTConfig) -> None:
        super().__init__()
        self.patch, self.temporal_patch = config.patch, config.temporal_patch
        pixels = channels * config.patch[0] * config.patch[1]
        self.first = patch_embedding(pixels, config.width)
        self.tubes = patch_embedding(pixels * config.temporal_patch, config.width)
        self.spatial = Spatial(config, config.spatial_depth)
        self.temporal = Temporal(config, config.temporal_depth)

    def forward(self, video: Tensor) -> Tensor:
        p, q = self.patch
        x = self.first(rearrange(video[:, :1], "b t c (h p) (w q) -> b t h w (p q c)", p=p, q=q))
        if video.shape[1] > 1:
            tubes = rearrange(
                video[:, 1:], "b (t s) c (h p) (w q) -> b t h w (s p q c)", s=self.temporal_patch, p=p, q=q
            )
            x = torch.cat([x, self.tubes(tubes)], dim=1)
        return self.temporal(self.spatial(x))


class Decoder(nn.Module):
    """B t h w D → B t h w D; the last layer is ToPixels."""

    def __init__(self, config: CViViTConfig) -> None:
        super().__init__()
        self.temporal = Temporal(config, config.decoder_temporal_depth or config.temporal_depth)
        self.spatial = Spatial(config, config.decoder_spatial_depth or config.spatial_depth)

    def forward(self, z: Tensor) -> Tensor:
        return self.spatial(self.temporal(z))


class ToPixels(nn.Module):
    """The decoder's last layers, B t h w D → B·T C H W; separate, so that the adaptive weight's gradients pass through
    nothing else."""

    def __init__(self, channels: int, config: CViViTConfig) -> None:
        super().__init__()
        self.patch, self.temporal_patch = config.patch, config.temporal_patch
        pixels = channels * config.patch[0] * config.patch[1]
        self.first = nn.Linear(config.width, pixels)
        self.tubes = nn.Linear(config.width, pixels * config.temporal_patch)

    def forward(self, features: Tensor) -> Tensor:
        p, q = self.patch
        video = rearrange(self.first(features[:, :1]), "b t h w (p q c) -> b t (h p) (w q) c", p=p, q=q)
        if features.shape[1] > 1:
            tubes = rearrange(
                self.tubes(features[:, 1:]),
                "b t h w (s p q c) -> b (t s) (h p) (w q) c",
                s=self.temporal_patch,
                p=p,
                q=q,
            )
            video = torch.cat([video, tubes], dim=1)
        return video.float().flatten(0, 1).permute(0, 3, 1, 2)  # channels_last

    def weights(self, frames: int) -> list[Tensor]:
        """The weights used for clips of so many frames: an image has no tubes."""
        return [self.first.weight] if frames == 1 else [self.first.weight, self.tubes.weight]


# Task --------------------------------------------------------------------------------------------------------------


def _to_channels_first(features: Tensor) -> Tensor:
    """B t h w D → B·t D h w, channels_last"""
    return features.flatten(0, 1).permute(0, 3, 1, 2)


class CViViT(Codec, SupportsReconstruction, SupportsBuckets, SupportsLossMasks, ComparesWithinBatch, ChecksHealth):
    """Codec and its training task: generator (encoder, quantizer, decoder) and a discriminator of clips."""

    Config = CViViTConfig
    vocabulary: int

    def __init__(self, config: CViViTConfig, shape: Shape, perceptual: Lpips | None = None) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.shape_for(shape.frames, shape.height, shape.width)
        self.encoder = Encoder(shape.channels, config)
        self.quantizer = build_quantizer(config.width, config.quantizer)
        self.decoder = Decoder(config)
        self.to_pixels = ToPixels(shape.channels, config)
        self.vocabulary = self.quantizer.codes
        self.perceptual = perceptual
        self.discriminator = build_discriminator(config.adversarial, shape, VideoDiscriminator)
        self.players = gan_players(self.discriminator)

    @classmethod
    def build(cls, config: CViViTConfig, context: BuildContext) -> CViViT:
        has_gan = config.adversarial is not None and config.adversarial.weight > 0
        return cls(config, context.shape, lpips.build_perceptual_loss(config.perceptual, context, has_gan))

    # codec -------------------------------------------------------------------------------------------------------

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Token grid (t, h, w) of a clip."""
        times = latent_frames("cvivit", frames, self.config.temporal_patch)
        return times, *grid_size("cvivit", height, width, self.config.patch)

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        """A token is real if any of its frames is."""
        return latent_frame_mask(frame_mask, self.config.temporal_patch)

    @torch.no_grad()
    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → B t h w"""
        clips, frames, _, height, width = pixels.shape
        self.shape_for(frames, height, width)
        if frame_mask is not None:
            pixels = repeat_last_real(pixels, frame_mask)
        ids = self.quantizer.ids(_to_channels_first(self.encoder(pixels * 2 - 1)))
        return rearrange(ids, "(b t) h w -> b t h w", b=clips)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """B t h w → B T C H W in [0, 1]"""
        features = self.quantizer.lookup(rearrange(tokens, "b t h w -> (b t) h w"))
        return frames_to_pixels(self._decode_frames(features, tokens.shape[0]), tokens.shape[0])

    def _quantize(self, features: Tensor, mask: Tensor | None) -> Quantized:
        """B t h w D; `mask` B t: False for padding"""
        if mask is not None:
            # Dead codes are replaced by random tokens: fill padding with real ones.
            features = torch.where(mask[:, :, None, None, None], features, features[:, :1])
        return self.quantizer(_to_channels_first(features), None if mask is None else mask.flatten())

    def _decode_frames(self, z: Tensor, clips: int) -> Tensor:
        """B·t D h w → B·T C H W in [−1, 1]"""
        return self.to_pixels(self.decoder(rearrange(z, "(b t) d h w -> b t h w d", b=clips)))

    # training ----------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        if player == "discriminator" and self.discriminator is not None:
            return [self.discriminator]
        return [self.encoder, self.quantizer, self.decoder, self.to_pixels]

    def is_active(self, player: str, step: int) -> bool:
        return player == "generator" or is_adversarial_step(self.config.adversarial, step)

    def forward(self, batch: Batch, noise: Noise) -> Reconstruction:
        video, mask = batch.video, batch.frame_mask
        clips = video.shape[0]
        self.shape_for(video.shape[1], *video.shape[-2:])
        if mask is not None:
            video = repeat_last_real(video, mask)
        real = pixels_to_frames(video)
        features = self.encoder(rearrange(real, "(b t) c h w -> b t c h w", b=clips))
        times = None if mask is None else self.mask_for(mask)
        quantized = self._quantize(features, times)
        fake = self._decode_frames(quantized.z, clips)
        keep = real.new_ones(real.shape[0]) if mask is None else mask.flatten().to(real.dtype)
        rows = None if times is None else times.flatten()
        share = frame_shares(batch, video.shape[1])
        return Reconstruction(real, fake, keep, quantized, rows, noise, share=share)

    def loss(self, player: str, shared: Reconstruction) -> Loss:
        last = self.to_pixels.weights(shared.real.shape[0] // shared.noise.batch)
        return codec_loss(player, shared, self.config, self.vocabulary, self.perceptual, self.discriminator, last)

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        shared = self(batch, noise)
        return validation_metrics(shared, self.config, self.vocabulary, self.perceptual, batch.spare)

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.decode(self.encode(batch.video, batch.frame_mask))

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
        return [part for part in self.modules() if isinstance(part, Block)]

    def tokens_per_clip(self) -> int:
        t, h, w = self.shape_for(self.shape.frames, self.shape.height, self.shape.width)
        return t * h * w


TASK = CViViT
