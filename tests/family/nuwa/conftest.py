"""A codec without weights: a token is the brightness of a patch, frame by frame. And small NUWA stages over it."""

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
from kineograph.family.nuwa import Nuwa, NuwaConfig

CAPTIONS = ["a red one", "a blue one", "two green", "three", "a cat at the top", "a cat below", "nothing here", "left"]
FRAMES, SIDE, CODES = 4, 3, 16


class PatchCodec(Codec):
    """Each patch × patch block of a frame becomes round(brightness × (vocabulary − 1)). `pair` frames after the first share a time."""

    Config = StageConfig

    def __init__(self, vocabulary: int | None = CODES, patch: int = 4, pair: int = 1) -> None:
        super().__init__()
        self.vocabulary, self.patch, self.pair = vocabulary, patch, pair
        self.calls = 0

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        means = rearrange(pixels.mean(2), "b t (h p) (w q) -> b t h w (p q)", p=self.patch, q=self.patch).mean(-1)
        tokens = (means * (self.vocabulary - 1)).round().long()
        return torch.cat([tokens[:, :1], tokens[:, self.pair :: self.pair]], dim=1)

    def decode(self, tokens: Tensor) -> Tensor:
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary
        tokens = torch.cat([tokens[:, :1], tokens[:, 1:].repeat_interleave(self.pair, 1)], dim=1)
        return repeat(tokens / (self.vocabulary - 1), "b t h w -> b t 3 (h p) (w q)", p=self.patch, q=self.patch)

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        return torch.cat([frame_mask[:, :1], frame_mask[:, 1 :: self.pair]], dim=1)

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        if (frames - 1) % self.pair:
            from kineograph.core.errors import ConfigError

            raise ConfigError(f"frames={frames} does not fit: use 1 + {self.pair}k")
        return 1 + (frames - 1) // self.pair, height // self.patch, width // self.patch


@pytest.fixture
def codec() -> PatchCodec:
    return freeze(PatchCodec())


@pytest.fixture
def make(codec: PatchCodec) -> Callable[..., Nuwa]:
    """A tiny NUWA; keys are its config's."""

    def make(
        stages: dict | None = None, frames: int = FRAMES, size: int = 4 * SIDE, assets: dict | None = None, **keys
    ) -> Nuwa:
        torch.manual_seed(0)
        keys = {
            "width": 32,
            "depth": 3,
            "heads": 2,
            "window": (2, 3, 3),
            "dilations": (1, 2),
            "text": {"width": 32, "heads": 2, "depth": 1, "length": 16},
            **keys,
        }
        if keys["window"] is None:
            keys.pop("dilations")
        found = {"tokenizer": codec, **(stages or {})}
        context = BuildContext(
            shape=Shape(frames, size, size, 3, 8.0),
            stage=found.__getitem__,
            captions=lambda: CAPTIONS,
            assets=assets or {},
            note=lambda line: None,
        )
        return Nuwa.build(NuwaConfig.model_validate({"codec": "tokenizer", **keys}), context)

    return make


def clips(rows: int, frames: int = FRAMES, seed: int = 0, channels: int = 3) -> Tensor:
    """B T C H W uint8, one brightness a patch."""
    levels = torch.randint(0, CODES, (rows, frames, SIDE, SIDE), generator=torch.Generator().manual_seed(seed)) * 17
    return repeat(levels, "b t h w -> b t c (h p) (w q)", c=channels, p=4, q=4).to(torch.uint8)


def batch_of(rows: int = 4, frames: int = FRAMES, seed: int = 0) -> Batch:
    return Batch(
        slots=torch.arange(rows),
        pixels=clips(rows, frames, seed),
        captions=[CAPTIONS[row % len(CAPTIONS)] for row in range(rows)],
    )


@pytest.fixture
def batch() -> Batch:
    return batch_of()


@pytest.fixture
def noise() -> Noise:
    return Noise.for_rows(seed=1, step=2, rows=4)


def train(task: Task, batch: Batch, steps: int, lr: float = 3e-3) -> list[float]:
    """Plain descent on one batch; the losses."""
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
