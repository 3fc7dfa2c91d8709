"""Latents of clips, B t c h w, scaled, and the first-frame condition of image-to-video models."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kineograph.codec.codec_loss import repeat_last_real
from kineograph.core.batch import Batch, weigh_positions
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.task import PosteriorCodec, Task
from kineograph.family.cogvideox.config import CogVideoXConfig
from kineograph.family.cogvideox.transformer_config import Latents


def check_size(height: int, width: int, side: int) -> None:
    """Refuse a size that is no multiple of a token's `side` in pixels."""
    for name, size in (("height", height), ("width", width)):
        if size % side:
            near = f"{size // side * side} or " if size > side else ""
            raise ConfigError(
                f"{height} × {width} pixels do not fit cogvideox: a token covers {side} × {side} pixels, so the {name} must be "
                f"a multiple of {side} ({near}{(size // side + 1) * side}); set data.size, or --size of kineo sample"
            )


class LatentClips(NamedTuple):
    x0: Tensor  # B t c h w, padded in front
    # B k c h w, image to video: the first frame, or the longest prefix that a clip is continued from
    first: Tensor | None
    padding: int  # latent frames in front that repeat the first, up to whole tokens
    times: Tensor | None = None  # B t: real latent frames, where clips differ in length
    positions: Tensor | None = None  # B 1 1 h w: the weight of each latent in the loss, where the data have masks


class LatentSpace:
    """Encodes clips with a codec of continuous latents, and decodes them."""

    def __init__(self, codec: Task, name: str, config: CogVideoXConfig) -> None:
        if not isinstance(codec, PosteriorCodec) or codec.latent_channels is None:
            raise ConfigError(f"codec={name} has no continuous latents: name a causal_vae stage")
        self.codec, self.config = codec, config
        self.channels = codec.latent_channels

    @property
    def scale(self) -> Tensor | float:
        """Scale of the latents: a number, or a tensor where the codec measured it."""
        return self.codec.scale

    def shape_for(self, frames: int, height: int, width: int) -> Latents:
        """Latents (t, h, w) of a clip, before padding to whole patches."""
        # First, because the codec's own error would name sizes that do not fit here.
        check_size(height, width, self.codec.spatial * self.config.patch)
        return self.codec.shape_for(frames, height, width)

    def padding(self, frames: int) -> int:
        """Latent frames missing to a multiple of patch_time."""
        return -frames % self.config.patch_time

    @torch.no_grad()
    def posterior(self, pixels: Tensor) -> Tensor:
        """B T C H W in [0, 1] → mean and log-variance, B t 2c h w, unscaled."""
        return self.codec.posterior(pixels).float()

    def sample_posterior(self, posterior: Tensor, noise: Noise, name: str) -> Tensor:
        """Sample the posterior and scale it. Plain latents from a cache (c channels) are only scaled."""
        if posterior.shape[2] == self.channels:
            return posterior.float() * self.scale
        return self.codec.latents_of(posterior, noise, name)

    def encode_batch(self, batch: Batch, noise: Noise, training: bool) -> LatentClips:
        """Latents and condition of a batch. The first frame gets noise and dropout in training only."""
        posterior = (
            self.posterior(_repeat_last_frame(batch)) if batch.latents is None else self._check_cached(batch.latents)
        )
        x0 = self.sample_posterior(posterior, noise, "posterior")
        first = (
            self.encode_first_frame(_first_frame_pixels(batch), noise, training) if self.config.first_frame else None
        )
        if first is not None and training and self.config.image.clip and x0.shape[1] > 2:
            first = self._extend_prefix(first, x0, noise)
        missing = self.padding(x0.shape[1])
        if missing:
            x0 = torch.cat([x0[:, :1].expand(-1, missing, -1, -1, -1), x0], dim=1)
        if first is not None and training:
            kept = ~noise.bernoulli("image dropout", self.config.image.dropout)
            first = first * kept.view(-1, 1, 1, 1, 1)
        times = None
        if batch.frame_mask is not None:
            times = torch.nn.functional.pad(self.codec.mask_for(batch.frame_mask), (missing, 0), value=True)
        share = batch.loss_share(*x0.shape[-2:])
        positions = None if share is None else weigh_positions(share)[:, None]
        return LatentClips(x0, first, missing, times, positions)

    def _check_cached(self, latents: Tensor) -> Tensor:
        if latents.ndim != 5 or latents.shape[2] not in (self.channels, 2 * self.channels):
            raise InputError(
                f"latents of shape {tuple(latents.shape[1:])} do not fit this codec, which needs t × {2 * self.channels} × h × w "
                "(mean and log-variance): rebuild the cache with kineo cache"
            )
        return latents

    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """Values for a cache: the posterior, and for image to video the first frame in pixels, which gets its noise before
        the codec."""
        values = {"latents": self.posterior(_repeat_last_frame(batch))}
        if self.config.first_frame:
            assert batch.pixels is not None
            values["first_frame"] = batch.pixels[:, 0]
        return values

    def encode_first_frame(self, pixels: Tensor, noise: Noise, training: bool) -> Tensor:
        """B 1 C H W in [0, 1] → B 1 c h w. In training the frame is noised first; σ refers to pixels in [−1, 1]."""
        if training:
            pixels = pixels + self._draw_sigma(noise, pixels) / 2 * noise.normal("image noise", *pixels.shape[1:])
        return self._scale_first_frame(self.sample_posterior(self.posterior(pixels), noise, "first frame"))

    def _extend_prefix(self, first: Tensor, x0: Tensor, noise: Noise) -> Tensor:
        """For some clips, replace the first frame by the first 2 … t − 1 latents with noise, then zeros. → B t−1 c h w."""
        prefix = self._scale_first_frame(x0[:, :-1])
        prefix = prefix + self._draw_sigma(noise, prefix) * noise.normal("clip noise", *prefix.shape[1:])
        count = 2 + noise.integers("clip frames", x0.shape[1] - 2)  # B
        shown = torch.arange(prefix.shape[1], device=x0.device) < count[:, None]  # B t−1
        alone = torch.cat([first, torch.zeros_like(prefix[:, 1:])], dim=1)
        has_prefix = noise.bernoulli("clip shown", self.config.image.clip)
        return torch.where(has_prefix.view(-1, 1, 1, 1, 1), prefix * shown[:, :, None, None, None], alone)

    def encode_prefix(self, pixels: Tensor) -> Tensor:
        """Frames to continue from, B T C H W in [0, 1] → B k c h w for `build_condition`."""
        return self._scale_first_frame(self.encode(pixels))

    def _draw_sigma(self, noise: Noise, like: Tensor) -> Tensor:
        spread = self.config.image.noise
        if spread is None:
            return like.new_zeros(1, 1, 1, 1, 1)
        return torch.exp(spread[0] + spread[1] * noise.normal("image sigma")).view(-1, 1, 1, 1, 1)

    def _scale_first_frame(self, latents: Tensor) -> Tensor:
        return latents / self.scale**2 if self.config.first_frame_inverse_scale else latents

    def build_condition(self, first: Tensor | None, padding: int, like: Tensor) -> Tensor | None:
        """The condition concatenated to latents B t c h w: the given first frames, then zeros.

        A single frame takes the very first latent, also where that is padding, as in diffusers' pipeline. Where longer
        prefixes are allowed each frame takes its own latent, and padding repeats the first.
        """
        if not self.config.first_frame:
            return None
        if first is None:
            return torch.zeros_like(like)
        first = first.to(like.dtype)
        aligned = padding if self.config.image.clip or first.shape[1] > 1 else 0
        repeated = first[:, :1].expand(-1, aligned, -1, -1, -1)
        return torch.cat([repeated, first, torch.zeros_like(like[:, first.shape[1] + aligned :])], dim=1)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """The mode of the posterior, scaled."""
        return self.codec.encode(pixels).float()

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """B t c h w → B T C H W in [0, 1]; the codec splits the batch to fit memory."""
        return self.codec.decode(x0)


def _first_frame_pixels(batch: Batch) -> Tensor:
    """B 1 C H W in [0, 1]"""
    if batch.pixels is None and "first_frame" not in batch.extra:
        raise InputError(
            "image to video needs the first frame of each clip, and the cached latents have none: rebuild the cache with kineo cache"
        )
    frame = batch.extra["first_frame"] if batch.pixels is None else batch.pixels[:, 0]
    return frame[:, None].float() / 255


def _repeat_last_frame(batch: Batch) -> Tensor:
    """B T C H W, with padding replaced by a clip's last real frame."""
    return batch.video if batch.frame_mask is None else repeat_last_real(batch.video, batch.frame_mask)
