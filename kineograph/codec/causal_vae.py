"""Causal 3-D VAE: clips to continuous latents, the codec of CogVideoX.

The first frame has its own latent, so an image is a clip of one frame. Long clips are coded in chunks and large frames in tiles, in
bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from einops import rearrange
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from kineograph.codec import perceptual as lpips
from kineograph.codec.adversarial import AdversarialConfig, VideoDiscriminator, build_discriminator, gan_players
from kineograph.codec.causal_vae_network import CausalVAEShape, Decoder, Encoder
from kineograph.codec.codec_loss import (
    Divergence,
    Reconstruction,
    codec_limits,
    codec_loss,
    frame_shares,
    is_adversarial_step,
    pixels_to_frames,
    repeat_last_real,
    validation_metrics,
)
from kineograph.codec.perceptual import Lpips, PerceptualConfig
from kineograph.codec.tiling import Tiling, chunk_spans
from kineograph.codec.token_grid import grid_size, latent_frame_mask, latent_frames
from kineograph.core import distributed
from kineograph.core.batch import Batch, Shape
from kineograph.core.capabilities import ChecksHealth, SupportsBuckets, SupportsLossMasks, SupportsReconstruction
from kineograph.core.config import PlayerDefaults, Size, StageConfig
from kineograph.core.health import Limit
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, PosteriorCodec
from kineograph.nn.causal_conv import CausalResidual

MAX_MAP = 2**29  # numbers in the largest feature map without gradients; batches are split to stay below
SPREAD_RATE = 0.01  # of the running average of the latents' moments


class CausalVAEConfig(StageConfig, CausalVAEShape):
    # Those of the measured presets: with slower betas, rare large gradients make the loss spike (docs/log.md).
    player_defaults: ClassVar[PlayerDefaults] = {"generator": {"betas": (0.9, 0.95)}}
    task: str = "causal_vae"
    chunk: int = Field(2, ge=1)
    """Latent frames coded together; the first chunk also takes the remainder. With `norm: chunk` the weights depend on it."""
    tile: Size | None = None
    """Sides of a tile in pixels, one number or height and width: larger frames are coded in overlapping, blended tiles, to save
    memory; null: whole frames."""
    tile_overlap: tuple[float, float] = (1 / 6, 1 / 5)
    """Overlap of neighbouring tiles, as a share of height and width."""
    scale: float | Literal["auto"] = "auto"
    """Factor of the latents that generators see, for unit variance; auto: measured in training and saved with the weights."""
    kl: float = Field(1e-6, ge=0)
    """Weight of the KL divergence of a clip's latents from a standard normal, per value of its pixels, as in published configs, whose
    losses are sums."""
    loss: Literal["l1", "l2"] = "l1"
    """Reconstruction loss of pixels in [−1, 1]."""
    perceptual: PerceptualConfig = PerceptualConfig()
    adversarial: AdversarialConfig | None = None
    """The GAN; its discriminator sees motion. null: none."""

    def player_names(self) -> tuple[str, ...]:
        return ("generator", "discriminator")

    @field_validator("scale")
    @classmethod
    def _check_positive(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value <= 0:
            raise ValueError("scale must be greater than 0: use auto, 1.15258426 (CogVideoX 2B) or 0.7 (5B)")
        return value

    @model_validator(mode="after")
    def _check_tiles(self) -> CausalVAEConfig:
        if not all(0 <= share <= 0.5 for share in self.tile_overlap):
            raise ValueError(f"tile_overlap={list(self.tile_overlap)}: use 0 to 0.5")
        if self.tile is not None and (min(self.tile) < self.spatial or any(side % self.spatial for side in self.tile)):
            raise ValueError(f"tile={list(self.tile)}: use multiples of {self.spatial}, the pixels of a latent")
        return self


class CausalVAE(PosteriorCodec, SupportsReconstruction, SupportsBuckets, SupportsLossMasks, ChecksHealth):
    """Codec and its training task: generator (encoder, decoder) and a discriminator of clips."""

    Config = CausalVAEConfig
    spread: Tensor

    def __init__(self, config: CausalVAEConfig, shape: Shape, perceptual: Lpips | None = None) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.shape_for(shape.frames, shape.height, shape.width)
        self.encoder = Encoder(shape.channels, config)
        self.decoder = Decoder(shape.channels, config)
        self.latent_channels = config.latent_channels
        # running averages of 1, mean and mean square of each channel of the posterior's means; 0 before the first step
        if config.scale == "auto":
            self.register_buffer("spread", torch.zeros(3, config.latent_channels))
        self.perceptual = perceptual
        self.discriminator = build_discriminator(config.adversarial, shape, VideoDiscriminator)
        self.players = gan_players(self.discriminator)

    @classmethod
    def build(cls, config: CausalVAEConfig, context: BuildContext) -> CausalVAE:
        has_gan = config.adversarial is not None and config.adversarial.weight > 0
        return cls(config, context.shape, lpips.build_perceptual_loss(config.perceptual, context, has_gan))

    # codec -------------------------------------------------------------------------------------------------------

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latent grid (t, h, w) of a clip."""
        side = self.config.spatial
        times = latent_frames("causal_vae", frames, self.config.temporal)
        return times, *grid_size("causal_vae", height, width, (side, side))

    @property
    def spatial(self) -> int:
        """Side of a latent in pixels."""
        return self.config.spatial

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        """A latent is real if any of its frames is."""
        return latent_frame_mask(frame_mask, self.config.temporal)

    @property
    def scale(self) -> Tensor:
        """The factor of the latents that `encode` returns."""
        if self.config.scale != "auto":
            return torch.full((), self.config.scale, device=self.encoder.norm_out.weight.device)
        weight, mean, square = self.spread  # c, each
        known = weight > 0
        weight = torch.where(known, weight, 1)
        variance = (square / weight - (mean / weight).square()).mean().clamp_min(1e-12)
        return torch.where(known[0], variance.rsqrt(), 1)

    @torch.no_grad()
    def posterior(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → B t 2c h w: mean and log-variance, unscaled; caches hold these"""
        _, frames, _, height, width = pixels.shape
        self.shape_for(frames, height, width)
        if frame_mask is not None:
            pixels = repeat_last_real(pixels, frame_mask)
        tiling = self._tiling(decoding=False)
        if tiling is not None and tiling.is_needed(height, width):
            parts = [tiling.run(clips, self._moments) for clips in pixels.split(self._batch_limit(*tiling.size))]
        else:
            parts = [self._moments(clips) for clips in pixels.split(self._batch_limit(height, width))]
        return rearrange(torch.cat(parts), "b c t h w -> b t c h w")

    @torch.no_grad()
    def latents_of(self, posterior: Tensor, noise: Noise | None = None, name: str = "posterior") -> Tensor:
        """B t 2c h w → B t c h w, scaled: the means, or with `noise` a sample, drawn under `name`"""
        mean, log_variance = _split_posterior(posterior)
        if noise is not None:
            mean = mean + (log_variance / 2).exp() * noise.normal(name, *mean.shape[1:])
        return mean * self.scale

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """B T C H W in [0, 1] → B t c h w"""
        return self.latents_of(self.posterior(pixels, frame_mask), noise)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """B t c h w → B T C H W in [0, 1]"""
        z = rearrange(latents.float() / self.scale, "b t c h w -> b c t h w")
        height, width = z.shape[-2] * self.config.spatial, z.shape[-1] * self.config.spatial
        tiling = self._tiling(decoding=True)
        if tiling is not None and tiling.is_needed(*z.shape[-2:]):
            limit = self._batch_limit(*self.config.tile or ())
            parts = [tiling.run(clips, self._decode_chunks) for clips in z.split(limit)]
        else:
            parts = [self._decode_chunks(clips) for clips in z.split(self._batch_limit(height, width))]
        pixels = parts[0] if len(parts) == 1 else torch.cat(parts)
        return pixels.add_(1).div_(2).clamp_(0, 1)

    def _tiling(self, decoding: bool) -> Tiling | None:
        config = self.config
        return config.tile and Tiling.build(config.tile, config.tile_overlap, config.spatial, decoding)

    def _batch_limit(self, height: int, width: int) -> int:
        """Clips that can be coded at once."""
        frames = self.config.temporal * (2 * self.config.chunk + 1)
        return max(1, MAX_MAP // (frames * height * width * max(self.config.widths[:2])))

    def _spans(self, count: int, size: int) -> list[tuple[int, int]]:
        """Chunks; a single one where chunks make no difference and gradients keep the whole clip in memory anyway."""
        return [(0, count)] if self.config.norm == "frame" and torch.is_grad_enabled() else chunk_spans(count, size)

    def _moments(self, pixels: Tensor) -> Tensor:
        """B T C H W in [0, 1] → B 2c t h w"""
        past, parts = None, []
        for start, stop in self._spans(pixels.shape[1], self.config.chunk * self.config.temporal):
            chunk = rearrange(pixels[:, start:stop], "b t c h w -> b c t h w").mul(2).sub_(1)
            moments, past = self.encoder(chunk.contiguous(memory_format=torch.channels_last_3d), past)
            parts.append(moments.float())
        return torch.cat(parts, dim=2)

    def _decode_chunks(self, z: Tensor) -> Tensor:
        """B c t h w → B T C H W in [−1, 1], written chunk by chunk"""
        frames, side = 1 + (z.shape[2] - 1) * self.config.temporal, self.config.spatial
        size = (z.shape[0], frames, self.shape.channels, z.shape[3] * side, z.shape[4] * side)
        pixels = z.new_empty(size)
        done = 0
        for chunk in self._chunks(z):
            pixels[:, done : done + chunk.shape[2]] = rearrange(chunk, "b c t h w -> b t c h w")
            done += chunk.shape[2]
        return pixels

    def _chunks(self, z: Tensor) -> Iterator[Tensor]:
        """B c t h w → chunks of B C T H W in [−1, 1]"""
        past, last = None, None
        for start, stop in self._spans(z.shape[2], self.config.chunk):
            features, past = self.decoder(z[:, :, start:stop].contiguous(memory_format=torch.channels_last_3d), past)
            pixels, last = self.decoder.conv_out(features, last)
            yield pixels.float()

    # training ----------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        if player == "discriminator" and self.discriminator is not None:
            return [self.discriminator]
        return [self.encoder, self.decoder]

    def is_active(self, player: str, step: int) -> bool:
        return player == "generator" or is_adversarial_step(self.config.adversarial, step)

    def forward(self, batch: Batch, noise: Noise) -> Reconstruction:
        return self._autoencode(batch, noise)[0]

    def _autoencode(self, batch: Batch, noise: Noise) -> tuple[Reconstruction, Tensor, Tensor]:
        """→ the reconstruction, and the posterior's means and log-variances, B t c h w each

        Training decodes a sample of the posterior, validation its mean. Padding repeats a clip's last frame and latent, so that an
        image beside clips is coded as it would be alone.
        """
        video, mask = batch.video, batch.frame_mask
        clips, frames = video.shape[:2]
        self.shape_for(frames, *video.shape[-2:])
        if mask is not None:
            video = repeat_last_real(video, mask)
        mean, log_variance = _split_posterior(rearrange(self._moments(video), "b c t h w -> b t c h w"))
        times = None if mask is None else self.mask_for(mask)
        z = mean
        if self.training:
            z = mean + (log_variance / 2).exp() * noise.normal("posterior", *mean.shape[1:])
            self._update_spread(mean.detach(), times)
        if times is not None:
            z = repeat_last_real(z, times)
        decoded = torch.cat(list(self._chunks(rearrange(z, "b t c h w -> b c t h w"))), dim=2)
        keep = video.new_ones(clips * frames) if mask is None else mask.flatten().to(video.dtype)
        nats = _divergence(mean, log_variance)  # B t
        nats = (nats if times is None else nats * times).sum(1)
        real_frames = frames if mask is None else mask.sum(1).clamp_min(1)
        nats = (nats / real_frames / video[0, 0].numel()).repeat_interleave(frames)
        shared = Reconstruction(
            real=pixels_to_frames(video),
            fake=rearrange(decoded, "b c t h w -> (b t) c h w"),
            keep=keep,
            quantized=None,
            rows=None if times is None else times.flatten(),
            noise=noise,
            divergence=Divergence(nats, self.config.kl),
            share=frame_shares(batch, frames),
        )
        return shared, mean, log_variance

    @torch.no_grad()
    def _update_spread(self, mean: Tensor, times: Tensor | None) -> None:
        """Update the running moments of the latents B t c h w, over all processes."""
        if self.config.scale != "auto":
            return
        each = torch.stack([torch.ones_like(mean), mean, mean.square()]).mean((-2, -1))  # 3 B t c
        if times is not None:
            each = each * times[:, :, None]
        total = distributed.all_reduce_(each.sum((1, 2)))
        self.spread.lerp_(total / total[0], SPREAD_RATE)

    def loss(self, player: str, shared: Reconstruction) -> Loss:
        last = [self.decoder.conv_out.conv.weight]
        return codec_loss(player, shared, self.config, None, self.perceptual, self.discriminator, last)

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """Also the standard deviation of each channel of the scaled latents, and of the noise that sampling the posterior adds."""
        shared, mean, log_variance = self._autoencode(batch, noise)
        latents, noise_variance = mean * self.scale, log_variance.exp() * self.scale**2
        times = latents.new_ones(latents.shape[:2]) if shared.rows is None else shared.rows.view(latents.shape[:2])
        parts = torch.stack([torch.ones_like(latents), latents, latents.square(), noise_variance]).mean((4, 5))
        total = (parts * times[:, :, None]).sum((1, 2))  # 4 c
        total = distributed.all_reduce_(torch.zeros_like(total) if batch.spare else total)
        first, second, added = total[1:] / total[0]
        variances = (second - first.square()).clamp_min(0)  # c
        named = {"std": variances.mean().sqrt(), "noise": added.mean().sqrt()}
        named |= {f"std_{channel:02d}": value.sqrt() for channel, value in enumerate(variances)}
        count = torch.full_like(variances[0], len(batch))
        spread = {f"latents/{name}": Mean(value * count, count) for name, value in named.items()}
        return validation_metrics(shared, self.config, None, self.perceptual, batch.spare) | spread

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.decode(self.encode(batch.video, batch.frame_mask))

    def health_limits(self) -> tuple[Limit, ...]:
        return codec_limits(None, has_divergence=True, has_discriminator=self.discriminator is not None)

    # structure ---------------------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [part for part in (self.encoder, self.decoder, self.discriminator, self.perceptual) if part is not None]

    def blocks(self) -> list[nn.Module]:
        return [part for part in self.modules() if isinstance(part, CausalResidual)]


def _split_posterior(posterior: Tensor) -> tuple[Tensor, Tensor]:
    """B t 2c h w → mean and log-variance, clamped so that exp is finite"""
    mean, log_variance = posterior.float().chunk(2, dim=2)
    return mean, log_variance.clamp(-30, 20)


def _divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1)) = ½ (μ² + σ² − 1 − log σ²), summed over c h w: B t c h w, twice → B t"""
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum((2, 3, 4)) / 2


TASK = CausalVAE
