"""A codec without weights, and small stages over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import rearrange, repeat
from torch import Tensor

from kineograph.core.batch import Batch, Sample, Shape
from kineograph.core.config import StageConfig, parse
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, PosteriorCodec, freeze
from kineograph.family.cogvideox import CogVideoX, CogVideoXConfig

CAPTIONS = ["a red one", "a blue one", "two green", "three"]
TINY = {
    "codec": "vae",
    "depth": 2,
    "heads": 2,
    "head_width": 16,
    "time_width": 16,
    "base_size": None,
    "base_frames": None,
    "text": {"kind": "learned", "width": 16, "depth": 1, "heads": 2, "length": 6},
    "sample": {"steps": 4, "guidance": 2.0},
}


class ToyCodec(PosteriorCodec):
    """Four channels are the pixels of a 2 × 2 patch in [−1, 1]; the first frame is alone, then four frames share their mean."""

    Config = StageConfig
    latent_channels, scale, spatial = 4, 0.7, 2

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        if frames % 4 != 1:
            raise ConfigError(f"frames={frames} does not fit: use 4k+1 (9, 13, 17 …)")
        return 1 + frames // 4, height // 2, width // 2

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        return torch.cat([frame_mask[:, :1], frame_mask[:, 1:].unflatten(1, (-1, 4)).any(-1)], dim=1)

    def posterior(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        rest = rearrange(pixels[:, 1:], "b (t four) c h w -> b t four c h w", four=4).mean(2)
        mean = rearrange(torch.cat([pixels[:, :1], rest], 1) * 2 - 1, "b t 1 (h p) (w q) -> b t (p q) h w", p=2, q=2)
        return torch.cat([mean, torch.full_like(mean, -6.0)], dim=2)

    def latents_of(self, posterior: Tensor, noise: Noise | None = None, name: str = "posterior") -> Tensor:
        mean, log_variance = posterior.chunk(2, dim=2)
        if noise is not None:
            mean = mean + (log_variance / 2).exp() * noise.normal(name, *mean.shape[1:])
        return mean * self.scale

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        return self.latents_of(self.posterior(pixels))

    def decode(self, latents: Tensor) -> Tensor:
        frames = rearrange(latents / self.scale, "b t (p q) h w -> b t 1 (h p) (w q)", p=2, q=2) / 2 + 0.5
        rest = repeat(frames[:, 1:], "b t c h w -> b (t four) c h w", four=4)
        return torch.cat([frames[:, :1], rest], dim=1).clamp(0, 1)


Make = Callable[..., CogVideoX]


@pytest.fixture
def make() -> Make:
    """A tiny stage; keys are its config's."""

    def make(
        frames: int = 9,
        size: int = 8,
        assets: dict[str, str] | None = None,
        lively: bool = True,
        note: Callable[[str], None] = len,
        **keys: Any,
    ):
        torch.manual_seed(0)
        config = parse(CogVideoXConfig, {"task": "cogvideox", **TINY, **keys})
        context = BuildContext(
            shape=Shape(frames, size, size, 1, 8.0),
            stage=lambda name: freeze(ToyCodec()),
            captions=lambda: CAPTIONS,
            note=note,
            assets=assets or {},
            name="generator",
        )
        task = CogVideoX.build(config, context)
        return enlivened(task) if lively else task

    return make


def enlivened(task: CogVideoX) -> CogVideoX:
    """No branch silent, as after some training."""
    torch.manual_seed(3)
    for p in task.network.parameters():
        if p.ndim > 1 and not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return task


def clips(rows: int = 4, frames: int = 9, size: int = 8, captions: bool = True) -> Batch:
    """Smooth, and different for each row."""
    random = torch.rand(rows, frames, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    pixels = repeat(random, "b t c h w -> b t c (h p) (w q)", p=size // 2, q=size // 2)
    samples = [
        Sample(pixels=(row * 255).to(torch.uint8), caption=CAPTIONS[number % 4] if captions else None, fps=8.0)
        for number, row in enumerate(pixels)
    ]
    return Batch.collate(samples, range(rows))
