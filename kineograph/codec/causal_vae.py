"""Causal 3-D VAE: clips to continuous latents, the codec of CogVideoX. The first frame has a latent of its own, so an image is a clip of
one frame; long clips are coded in chunks and large pictures in tiles, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from einops import rearrange
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from kineograph.codec import perceptual as lpips
from kineograph.codec.adversarial import AdversarialConfig, VideoDiscriminator, build_discriminator, gan_players
from kineograph.codec.causal_vae_network import CausalVAEShape, Decoder, Encoder
from kineograph.codec.gan_losses import (
    Divergence,
    Reconstruction,
    bind_discriminator,
    discriminator_loss,
    generator_loss,
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
from kineograph.core.capabilities import SupportsBuckets, SupportsReconstruction
from kineograph.core.config import Size, StageConfig
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, PosteriorCodec
from kineograph.nn.causal_conv import CausalResidual

AT_ONCE = 2**29  # numbers in the largest map that coding without gradients makes; clips beyond it wait for their turn
FORGETS = 0.01  # share of the latents' measured spread that a training step replaces


class CausalVAEConfig(StageConfig, CausalVAEShape):
    task: str = "causal_vae"
    chunk: int = Field(2, ge=1)
    """Latents that are coded together: chunks of so many, and what is left over goes to the first. With `norm: chunk` it belongs to the weights."""
    tile: Size | None = None
    """Pixels of a tile, one number or height and width: larger pictures are coded in tiles that overlap and are blended, in less memory; null: whole."""
    tile_overlap: tuple[float, float] = (1 / 6, 1 / 5)
    """Share of a tile that the next one overlaps, in height and width."""
    scale: float | Literal["auto"] = "auto"
    """What latents are multiplied by for generators, so that they have unit variance about their channels' means; auto measures it in
    training and saves it with the weights."""
    kl: float = Field(1e-6, ge=0)
    """Weight of the KL divergence of a clip's latents from a standard normal, divided by the values of its pixels, over which the other losses
    are means: what published weights mean, whose losses are sums."""
    loss: Literal["l1", "l2"] = "l1"
    """Reconstruction loss, of pixels in [−1, 1]."""
    perceptual: PerceptualConfig = PerceptualConfig()
    adversarial: AdversarialConfig | None = None
    """The GAN, whose discriminator sees motion; null: none."""

    def player_names(self) -> tuple[str, ...]:
        return ("generator", "discriminator")

    @field_validator("scale")
    @classmethod
    def _positive(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value <= 0:
            raise ValueError("a scale is greater than 0; use auto, 1.15258426 (CogVideoX 2B) or 0.7 (5B)")
        return value

    @model_validator(mode="after")
    def _tiles(self) -> CausalVAEConfig:
        if not all(0 <= share <= 0.5 for share in self.tile_overlap):
            raise ValueError(f"tile_overlap={list(self.tile_overlap)}: a tile overlaps the next by 0 to 0.5 of itself")
        if self.tile is not None and (min(self.tile) < self.spatial or any(side % self.spatial for side in self.tile)):
            raise ValueError(f"tile={list(self.tile)}: its sides are multiples of {self.spatial} pixels, of a latent")
        return self


class CausalVAE(PosteriorCodec, SupportsReconstruction, SupportsBuckets):
    """Codec and its training: generator (encoder, decoder) against a discriminator of clips."""

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
        # of each channel of the posterior's means, averaged over steps: 1, mean, mean square; before the first step 0
        if config.scale == "auto":
            self.register_buffer("spread", torch.zeros(3, config.latent_channels))
        self.perceptual = perceptual
        self.discriminator = build_discriminator(config.adversarial, shape, VideoDiscriminator)
        self.players = gan_players(self.discriminator)

    @classmethod
    def build(cls, config: CausalVAEConfig, context: BuildContext) -> CausalVAE:
        return cls(config, context.shape, lpips.build_perceptual_loss(config.perceptual, context))

    # codec -------------------------------------------------------------------------------------------------------

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latents (t, h, w) of a clip."""
        side = self.config.spatial
        times = latent_frames("causal_vae", frames, self.config.temporal)
        return times, *grid_size("causal_vae", height, width, (side, side))

    @property
    def spatial(self) -> int:
        """Pixels on a side that a latent covers."""
        return self.config.spatial

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        """A latent is real where any of its frames is."""
        return latent_frame_mask(frame_mask, self.config.temporal)

    @property
    def scale(self) -> Tensor:
        """What `encode` multiplies the posterior's means (or samples) by."""
        if self.config.scale != "auto":
            return torch.full((), self.config.scale, device=self.encoder.norm_out.weight.device)
        weight, mean, square = self.spread  # c, each
        known = weight > 0
        weight = torch.where(known, weight, 1)
        variance = (square / weight - (mean / weight).square()).mean().clamp_min(1e-12)
        return torch.where(known[0], variance.rsqrt(), 1)

    @torch.no_grad()
    def posterior(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → B t 2c h w: mean and log-variance, unscaled; what caches hold"""
        _, frames, _, height, width = pixels.shape
        self.shape_for(frames, height, width)
        if frame_mask is not None:
            pixels = repeat_last_real(pixels, frame_mask)
        code, tiling = self._moments, self._tiling(decoding=False)
        if tiling is not None and tiling.needed(height, width):
            found = [tiling.run(clips, code) for clips in pixels.split(self._clips_at_once(*tiling.size))]
        else:
            found = [code(clips) for clips in pixels.split(self._clips_at_once(height, width))]
        return rearrange(torch.cat(found), "b c t h w -> b t c h w")

    @torch.no_grad()
    def latents_of(self, posterior: Tensor, noise: Noise | None = None, name: str = "posterior") -> Tensor:
        """B t 2c h w → B t c h w, scaled: the means, or with `noise` a sample, its draw by that name"""
        mean, log_variance = _parts(posterior)
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
        if tiling is not None and tiling.needed(*z.shape[-2:]):
            found = [
                tiling.run(clips, self._painted) for clips in z.split(self._clips_at_once(*self.config.tile or ()))
            ]
        else:
            found = [self._painted(clips) for clips in z.split(self._clips_at_once(height, width))]
        pixels = found[0] if len(found) == 1 else torch.cat(found)
        return pixels.add_(1).div_(2).clamp_(0, 1)

    def _tiling(self, decoding: bool) -> Tiling | None:
        config = self.config
        return config.tile and Tiling.of(config.tile, config.tile_overlap, config.spatial, decoding)

    def _clips_at_once(self, height: int, width: int) -> int:
        frames = self.config.temporal * (2 * self.config.chunk + 1)
        return max(1, AT_ONCE // (frames * height * width * max(self.config.widths[:2])))

    def _spans(self, count: int, size: int) -> list[tuple[int, int]]:
        """Chunks; one where they make no difference and gradients hold all of the clip in any case."""
        return [(0, count)] if self.config.norm == "frame" and torch.is_grad_enabled() else chunk_spans(count, size)

    def _moments(self, pixels: Tensor) -> Tensor:
        """B T C H W in [0, 1] → B 2c t h w"""
        past, found = None, []
        for start, stop in self._spans(pixels.shape[1], self.config.chunk * self.config.temporal):
            chunk = rearrange(pixels[:, start:stop], "b t c h w -> b c t h w").mul(2).sub_(1)
            moments, past = self.encoder(chunk.contiguous(memory_format=torch.channels_last_3d), past)
            found.append(moments.float())
        return torch.cat(found, dim=2)

    def _painted(self, z: Tensor) -> Tensor:
        """B c t h w → B T C H W in [−1, 1], each chunk written to its place"""
        frames, side = 1 + (z.shape[2] - 1) * self.config.temporal, self.config.spatial
        size = (z.shape[0], frames, self.shape.channels, z.shape[3] * side, z.shape[4] * side)
        pixels = z.new_empty(size)
        done = 0
        for chunk in self._chunks(z):
            pixels[:, done : done + chunk.shape[2]] = rearrange(chunk, "b c t h w -> b t c h w")
            done += chunk.shape[2]
        return pixels

    def _chunks(self, z: Tensor) -> Iterator[Tensor]:
        """B c t h w → B C T H W in [−1, 1], one chunk after the other"""
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
        return self._coded(batch, noise)[0]

    def _coded(self, batch: Batch, noise: Noise) -> tuple[Reconstruction, Tensor, Tensor]:
        """→ what the players share, and the posterior's means and log-variances, B t c h w each

        In training a sample of the posterior is decoded, in judging its mean.

        Padding shows a clip's last frame, and has its last latent: an image beside clips is then a clip that stands still, whose frames
        are all coded and decoded as it would be alone.
        """
        video, mask = batch.video, batch.frame_mask
        clips, frames = video.shape[:2]
        self.shape_for(frames, *video.shape[-2:])
        if mask is not None:
            video = repeat_last_real(video, mask)
        mean, log_variance = _parts(rearrange(self._moments(video), "b c t h w -> b t c h w"))
        times = None if mask is None else self.mask_for(mask)
        z = mean
        if self.training:
            z = mean + (log_variance / 2).exp() * noise.normal("posterior", *mean.shape[1:])
            self._measure(mean.detach(), times)
        if times is not None:
            z = repeat_last_real(z, times)
        painted = torch.cat(list(self._chunks(rearrange(z, "b t c h w -> b c t h w"))), dim=2)
        keep = video.new_ones(clips * frames) if mask is None else mask.flatten().to(video.dtype)
        nats = _divergence(mean, log_variance)  # B t
        nats = (nats if times is None else nats * times).sum(1)
        shown = frames if mask is None else mask.sum(1).clamp_min(1)
        nats = (nats / shown / video[0, 0].numel()).repeat_interleave(frames)
        shared = Reconstruction(
            real=pixels_to_frames(video),
            fake=rearrange(painted, "b c t h w -> (b t) c h w"),
            keep=keep,
            quantized=None,
            rows=None if times is None else times.flatten(),
            noise=noise,
            divergence=Divergence(nats, self.config.kl),
        )
        return shared, mean, log_variance

    @torch.no_grad()
    def _measure(self, mean: Tensor, times: Tensor | None) -> None:
        """Average the spread of B t c h w over steps, and over the processes of this one."""
        if self.config.scale != "auto":
            return
        each = torch.stack([torch.ones_like(mean), mean, mean.square()]).mean((-2, -1))  # 3 B t c
        if times is not None:
            each = each * times[:, :, None]
        total = distributed.all_reduce_(each.sum((1, 2)))
        self.spread.lerp_(total / total[0], FORGETS)

    def loss(self, player: str, shared: Reconstruction) -> Loss:
        judge = bind_discriminator(self.discriminator, self.config.adversarial, shared)
        if player == "discriminator":
            return discriminator_loss(shared, self.config.adversarial, judge)
        last = [self.decoder.conv_out.conv.weight]
        return generator_loss(shared, self.config, None, self.perceptual, judge, last)

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """Beside the scores, the deviation of each channel of the latents as generators see them, and of the noise in them that they cannot know:
        what a sample of the posterior adds to its mean."""
        shared, mean, log_variance = self._coded(batch, noise)
        latents, added = mean * self.scale, log_variance.exp() * self.scale**2
        times = latents.new_ones(latents.shape[:2]) if shared.rows is None else shared.rows.view(latents.shape[:2])
        first, second, drawn = (
            (part.mean((3, 4)) * times[:, :, None]).sum((0, 1)) / times.sum()
            for part in (latents, latents.square(), added)
        )
        variances = (second - first.square()).clamp_min(0)  # c
        named = {"std": variances.mean().sqrt(), "noise": drawn.mean().sqrt()}
        named |= {f"std_{channel:02d}": value.sqrt() for channel, value in enumerate(variances)}
        count = torch.full_like(variances[0], len(batch))
        spread = {f"latents/{name}": Mean(value * count, count) for name, value in named.items()}
        return validation_metrics(shared, self.config, None, self.perceptual) | spread

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.decode(self.encode(batch.video, batch.frame_mask))

    # how the outside treats it -----------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [part for part in (self.encoder, self.decoder, self.discriminator, self.perceptual) if part is not None]

    def blocks(self) -> list[nn.Module]:
        return [part for part in self.modules() if isinstance(part, CausalResidual)]


def _parts(posterior: Tensor) -> tuple[Tensor, Tensor]:
    """B t 2c h w → mean and log-variance, within what can be exponentiated"""
    mean, log_variance = posterior.float().chunk(2, dim=2)
    return mean, log_variance.clamp(-30, 20)


def _divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1)) = ½ (μ² + σ² − 1 − log σ²), summed over c h w: B t c h w, twice → B t"""
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum((2, 3, 4)) / 2


TASK = CausalVAE
