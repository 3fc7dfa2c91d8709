"""A CLIP without weights, and small decoders over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.config import StageConfig, parse
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Task, freeze
from kineograph.family.dalle2 import Decoder, DecoderConfig

CAPTIONS = ["a red one", "a blue one", "two green", "three"]


class ToyClip(Task):
    """An image's embedding is its 2 × 2 thumbnail; a caption's is built from its letters."""

    Config = StageConfig
    width, text_width, length, picture_size = 12, 6, 5, (1, 1)

    def embed_images(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        pictures = pixels[:, 0] if pixels.ndim == 5 else pixels
        return F.normalize(F.adaptive_avg_pool2d(pictures, 2).flatten(1) + 0.1, dim=-1)

    def embed_texts(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        letters = torch.tensor([[ord(letter) % 7 for letter in caption.ljust(12)[:12]] for caption in captions]).float()
        encodings = torch.stack([letters[:, i : i + 6] for i in range(5)], dim=1) / 7
        mask = torch.tensor([[position < len(caption) for position in range(5)] for caption in captions])
        return F.normalize(letters + 0.1, dim=-1), encodings, mask


class ToyPrior(Task):
    Config = StageConfig

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str] | None] = []

    def embed(self, prompts: Prompts) -> Tensor:
        self.calls.append(prompts.captions)
        assert prompts.captions is not None
        return F.normalize(torch.ones(len(prompts.captions), 12), dim=-1)


@pytest.fixture
def make() -> Callable[..., Decoder]:
    """A tiny decoder; keys are its config's. `task.loaded` lists the stages that it loaded."""

    def make(
        stages: dict | None = None,
        size: int = 16,  # of the data
        frames: int = 1,
        untrained: bool = False,
        draws: int | None = None,
        name: str = "decoder",
        notes: list[str] | None = None,
        **keys,
    ) -> Decoder:
        torch.manual_seed(0)
        keys = {
            "width": 8,
            "multipliers": [1, 2],
            "blocks": 1,
            "head_width": 8,
            "clip": "clip",
            "diffusion": {"steps": 100},
            "sample": {"steps": 4},
            **({} if draws is None else {"size": draws}),
            **keys,
        }
        available = {"clip": freeze(ToyClip()), **(stages or {})}
        loaded: list[str] = []

        def stage(name: str) -> Task:
            loaded.append(name)
            return available[name]

        context = BuildContext(
            shape=Shape(frames, size, size, 3, 8.0),
            stage=stage,
            captions=lambda: CAPTIONS,
            note=(notes if notes is not None else []).append,
            name=name,
        )
        task = Decoder.build(parse(DecoderConfig, {"task": "dalle2", **keys}), context)
        task.loaded = loaded  # type: ignore[assignment]
        return task if untrained else fill_zero_weights(task)

    return make


def fill_zero_weights(task: Decoder) -> Decoder:
    """Give zero-initialized weights random values, as after some training."""
    for p in task.network.parameters():
        if p.ndim > 1 and not p.any():
            nn.init.normal_(p, std=0.1)
    return task


PLAIN = {"clip": None, "image_embeds": "none"}  # keys of an unconditional decoder


def pictures(rows: int, size: int = 16, seed: int = 0) -> Tensor:
    """B 1 C H W uint8, smooth."""
    random = torch.rand(rows, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    smooth = F.interpolate(random, (size, size), mode="bilinear")
    return (smooth * 255).to(torch.uint8)[:, None]


def batch_of(rows: int = 4, size: int = 16, seed: int = 0) -> Batch:
    captions = [CAPTIONS[row % len(CAPTIONS)] for row in range(rows)]
    return Batch(slots=torch.arange(rows), pixels=pictures(rows, size, seed), captions=captions)


@pytest.fixture
def batch() -> Batch:
    return batch_of()


@pytest.fixture
def noise() -> Noise:
    return Noise.for_rows(seed=1, step=2, rows=4)


def prompts_of(rows: int = 2, **keys) -> Prompts:
    return Prompts(Noise.for_rows(7, 0, rows), **keys)
