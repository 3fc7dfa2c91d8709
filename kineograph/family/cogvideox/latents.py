"""Clips as the transformer sees them: latents B t c h w, scaled, and the first frame's beside them for image to video."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kineograph.codec.gan_losses import repeat_last_real
from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.family.cogvideox.config import CogVideoXConfig
from kineograph.family.cogvideox.shapes import Latents


def check_sides(height: int, width: int, side: int) -> None:
    """Whole tokens, each of `side` pixels on a side; a ConfigError names the sizes that fit."""
    for name, size in (("height", height), ("width", width)):
        if size % side:
            near = f"{size // side * side} or " if size > side else ""
            raise ConfigError(
                f"{height} × {width} pixels do not fit cogvideox: its tokens cover {side} × {side}, "
                f"so the {name} must be a multiple of {side} ({near}{(size // side + 1) * side}): set data.size, or --size of kineo sample"
            )


class Clips(NamedTuple):
    x0: Tensor  # B t c h w, with the padding in front
    first: (
        Tensor | None
    )  # B k c h w, for image to video: the first frame, or where clips are continued as many as may be shown
    padding: int  # latent frames that repeat the first, to whole tokens
    times: Tensor | None = None  # B t, where clips are of different lengths: which latent frames are real


class LatentSpace:
    """What a codec of continuous latents makes of clips, and back."""

    def __init__(self, codec: Any, name: str, config: CogVideoXConfig) -> None:
        if getattr(codec, "vocabulary", 0) is not None or not hasattr(codec, "posterior"):
            raise ConfigError(f"codec={name} gives no continuous latents of clips: name a stage of causal_vae")
        self.codec, self.config = codec, config
        self.channels = int(codec.latent_channels)

    @property
    def scale(self) -> Any:
        """What latents are multiplied by: a number, or where the codec measured it a tensor on its device."""
        return self.codec.scale

    def shape_for(self, frames: int, height: int, width: int) -> Latents:
        """Latents (t, h, w) of a clip, before padding to whole patches."""
        check_sides(
            height, width, self.codec.spatial * self.config.patch
        )  # before the codec, which names sizes that do not fit here
        return self.codec.shape_for(frames, height, width)

    def padding(self, frames: int) -> int:
        """Latent frames that are missing to whole tokens in time."""
        return -frames % self.config.patch_time

    # in ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def posterior(self, pixels: Tensor) -> Tensor:
        """B T C H W in [0, 1] → mean and log-variance, B t 2c h w, not scaled."""
        return self.codec.posterior(pixels).float()

    def drawn(self, posterior: Tensor, noise: Noise, name: str) -> Tensor:
        """One sample of it, scaled. A cache of plain latents (c channels) has nothing to draw."""
        if posterior.shape[2] == self.channels:
            return posterior.float() * self.scale
        return self.codec.latents_of(posterior, noise, name)

    def read(self, batch: Batch, noise: Noise, training: bool) -> Clips:
        """Noise and dropout of the first frame happen in training only."""
        found = self.posterior(_standing(batch)) if batch.latents is None else self._cached(batch.latents)
        x0 = self.drawn(found, noise, "posterior")
        first = self.image(_first(batch), noise, training) if self.config.first_frame else None
        if first is not None and training and self.config.image.clip and x0.shape[1] > 2:
            first = self._more(first, x0, noise)
        missing = self.padding(x0.shape[1])
        if missing:
            x0 = torch.cat([x0[:, :1].expand(-1, missing, -1, -1, -1), x0], dim=1)
        if first is not None and training:
            kept = ~noise.happens("image dropout", self.config.image.dropout)
            first = first * kept.view(-1, 1, 1, 1, 1)
        times = None
        if batch.frame_mask is not None:
            times = torch.nn.functional.pad(self.codec.mask_for(batch.frame_mask), (missing, 0), value=True)
        return Clips(x0, first, missing, times)

    def _cached(self, latents: Tensor) -> Tensor:
        if latents.ndim != 5 or latents.shape[2] not in (self.channels, 2 * self.channels):
            raise InputError(
                f"latents of shape {tuple(latents.shape[1:])} do not fit this codec: t × {2 * self.channels} × h × w are read (mean and "
                "log-variance); were they cached with another?"
            )
        return latents

    def cached(self, batch: Batch) -> dict[str, Tensor]:
        """What a cache holds of clips: the posterior; for image to video the first frame too, as it is: in training it gets its noise before
        the codec sees it."""
        found = {"latents": self.posterior(_standing(batch))}
        if self.config.first_frame:
            assert batch.pixels is not None
            found["first_frame"] = batch.pixels[:, 0]
        return found

    # the first frame -----------------------------------------------------------------------------------------------

    def image(self, pixels: Tensor, noise: Noise, training: bool) -> Tensor:
        """B 1 C H W in [0, 1] → B 1 c h w. In training the picture gets some noise, of σ in [−1, 1]."""
        if training:
            pixels = pixels + self._sigma(noise, pixels) / 2 * noise.normal("image noise", *pixels.shape[1:])
        return self._scaled_first(self.drawn(self.posterior(pixels), noise, "first frame"))

    def _more(self, first: Tensor, x0: Tensor, noise: Noise) -> Tensor:
        """For some clips not the first frame but the first 2 … t − 1 latents, with noise of the same σ; zeros follow. B t−1 c h w."""
        given = self._scaled_first(x0[:, :-1])
        given = given + self._sigma(noise, given) * noise.normal("clip noise", *given.shape[1:])
        count = 2 + noise.integers("clip frames", x0.shape[1] - 2)  # B
        shown = torch.arange(given.shape[1], device=x0.device) < count[:, None]  # B t−1
        alone = torch.cat([first, torch.zeros_like(given[:, 1:])], dim=1)
        goes_on = noise.happens("clip shown", self.config.image.clip)
        return torch.where(goes_on.view(-1, 1, 1, 1, 1), given * shown[:, :, None, None, None], alone)

    def clip(self, pixels: Tensor) -> Tensor:
        """B T C H W in [0, 1] of a clip that is to go on → B k c h w, as `shown` takes it."""
        return self._scaled_first(self.encode(pixels))

    def _sigma(self, noise: Noise, like: Tensor) -> Tensor:
        spread = self.config.image.noise
        if spread is None:
            return like.new_zeros(1, 1, 1, 1, 1)
        return torch.exp(spread[0] + spread[1] * noise.normal("image sigma")).view(-1, 1, 1, 1, 1)

    def _scaled_first(self, latents: Tensor) -> Tensor:
        return latents / self.scale**2 if self.config.first_frame_inverse_scale else latents

    def shown(self, first: Tensor | None, padding: int, like: Tensor) -> Tensor | None:
        """What the network reads beside latents B t c h w: those of the first frame (or frames) at their beginning, and zeros after them.

        A picture stands at the very first latent, where padding is, and nowhere else, as diffusers' pipeline shows it. Where clips may be shown, each
        frame stands beside its own latent, and padding repeats the first."""
        if not self.config.first_frame:
            return None
        if first is None:
            return torch.zeros_like(like)
        first = first.to(like.dtype)
        aligned = padding if self.config.image.clip or first.shape[1] > 1 else 0
        repeated = first[:, :1].expand(-1, aligned, -1, -1, -1)
        return torch.cat([repeated, first, torch.zeros_like(like[:, first.shape[1] + aligned :])], dim=1)

    # out -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """The most likely latents of given frames, scaled."""
        return self.codec.encode(pixels).float()

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """B t c h w → B T C H W in [0, 1]; the codec takes as many clips at a time as fit into its memory."""
        return self.codec.decode(x0)


def _first(batch: Batch) -> Tensor:
    """B 1 C H W in [0, 1]"""
    if batch.pixels is None and "first_frame" not in batch.extra:
        raise InputError(
            "image to video needs the first frame of each clip, and these latents come without: build the cache anew with kineo cache"
        )
    picture = batch.extra["first_frame"] if batch.pixels is None else batch.pixels[:, 0]
    return picture[:, None].float() / 255


def _standing(batch: Batch) -> Tensor:
    """B T C H W. Where a clip is shorter than others its last frame stands still until the end, and is not scored there."""
    return batch.video if batch.frame_mask is None else repeat_last_real(batch.video, batch.frame_mask)
