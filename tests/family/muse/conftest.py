"""A codec without weights, whose tokens are the brightness of patches, and small Muse stages that use it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from einops import rearrange, repeat
from torch import Tensor

from kineograph.core.batch import Batch, Shape
from kineograph.core.config import StageConfig
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Task, freeze
from kineograph.family.muse import Muse, MuseConfig

CAPTIONS = [
    "a red one",
    "a blue one",
    "two green",
    "three",
    "a cat at the top",
    "a cat below",
    "nothing at all here",
    "seven, left",
]


class PatchCodec(Codec):
    """Each patch × patch block becomes round(brightness × (vocabulary − 1))."""

    Config = StageConfig

    def __init__(self, vocabulary: int | None = 16, patch: int = 4) -> None:
        super().__init__()
        self.vocabulary, self.patch = vocabulary, patch
        self.calls = 0

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        means = rearrange(pixels.mean(2), "b t (h p) (w q) -> b t h w (p q)", p=self.patch, q=self.patch).mean(-1)
        return (means * (self.vocabulary - 1)).round().long()

    def decode(self, tokens: Tensor) -> Tensor:
        assert int(tokens.max()) < self.vocabulary, "the mask id was left in"
        return repeat(tokens / (self.vocabulary - 1), "b t h w -> b t 3 (h p) (w q)", p=self.patch, q=self.patch).clamp(
            0, 1
        )

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        return frames, height // self.patch, width // self.patch


@pytest.fixture
def codec() -> PatchCodec:
    return freeze(PatchCodec())


@pytest.fixture
def make(codec: PatchCodec) -> Callable[..., Muse]:
    """A tiny Muse; keys are its config's."""

    def make(stages: dict | None = None, frames: int = 1, size: int = 16, assets: dict | None = None, **keys) -> Muse:
        torch.manual_seed(0)
        keys = {
            "width": 32,
            "depth": 2,
            "heads": 2,
            "text": {"width": 32, "heads": 2, "depth": 1, "length": 16},
            **keys,
        }
        available = {"tokenizer": codec, **(stages or {})}
        context = BuildContext(
            shape=Shape(frames, size, size, 3, 8.0),
            stage=available.__getitem__,
            captions=lambda: CAPTIONS,
            assets=assets or {},
            note=lambda line: None,
        )
        return Muse.build(MuseConfig.model_validate({"task": "muse", "codec": "tokenizer", **keys}), context)

    return make


def pictures(rows: int, size: int = 16, seed: int = 0, patch: int = 4) -> Tensor:
    """B T C H W uint8, constant in each patch."""
    levels = (
        torch.randint(0, 16, (rows, size // patch, size // patch), generator=torch.Generator().manual_seed(seed)) * 17
    )
    return repeat(levels, "b h w -> b 1 3 (h p) (w q)", p=patch, q=patch).to(torch.uint8)


def batch_of(rows: int = 4, size: int = 16, seed: int = 0) -> Batch:
    return Batch(
        slots=torch.arange(rows),
        pixels=pictures(rows, size, seed),
        captions=[CAPTIONS[row % len(CAPTIONS)] for row in range(rows)],
    )


@pytest.fixture
def batch() -> Batch:
    return batch_of()


@pytest.fixture
def noise() -> Noise:
    return Noise.for_rows(seed=1, step=2, rows=4)


def train(task: Task, batch: Batch, steps: int, lr: float = 3e-3) -> list[float]:
    """Train on one batch. → the losses"""
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], lr=lr)
    losses = []
    task.train()
    for step in range(steps):
        total = task.loss("model", task(batch, Noise(0, step, batch.slots))).total.value()
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()))
    task.eval()
    return losses
