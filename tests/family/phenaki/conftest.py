"""A codec of clips without weights: a token is the brightness of a patch over two frames, of the first frame alone. And small Phenaki stages over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from einops import rearrange, repeat
from torch import Tensor

from kineograph.core.batch import Batch, Shape
from kineograph.core.config import StageConfig, parse
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Task, freeze, player_parameters
from kineograph.family.phenaki import Phenaki, PhenakiConfig

CAPTIONS = [
    "a red one",
    "a blue one",
    "two green",
    "three",
    "a cat at the top",
    "a cat below",
    "nothing",
    "seven, left",
]
VOCABULARY = 16
FRAMES, SIZE, PATCH = 5, 8, 4  # 3 × 2 × 2 tokens


class ClipCodec(Codec):
    """The first frame alone, then pairs of frames; each PATCH × PATCH block becomes round(brightness × (vocabulary − 1))."""

    Config = StageConfig

    def __init__(self, vocabulary: int | None = VOCABULARY, pair: int = 2) -> None:
        super().__init__()
        self.vocabulary, self.pair = vocabulary, pair
        self.encoded: list[Tensor] = []

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        if (frames - 1) % self.pair or height % PATCH or width % PATCH:
            raise ConfigError(f"frames={frames}, size={height} × {width} do not fit: use 1 + {self.pair}k frames")
        return 1 + (frames - 1) // self.pair, height // PATCH, width // PATCH

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        later = rearrange(frame_mask[:, 1:], "b (t p) -> b t p", p=self.pair).any(-1)
        return torch.cat([frame_mask[:, :1], later], dim=1)

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        self.shape_for(pixels.shape[1], *pixels.shape[3:])
        self.encoded.append(pixels)
        means = rearrange(pixels.mean(2), "b t (h p) (w q) -> b t h w (p q)", p=PATCH, q=PATCH).mean(-1)
        later = rearrange(means[:, 1:], "b (t p) h w -> b t p h w", p=self.pair).mean(2)
        return (torch.cat([means[:, :1], later], dim=1) * (self.vocabulary - 1)).round().long()

    def decode(self, tokens: Tensor) -> Tensor:
        assert int(tokens.max()) < self.vocabulary, "the mask id was left in"
        shown = torch.cat([tokens[:, :1], tokens[:, 1:].repeat_interleave(self.pair, dim=1)], dim=1)
        return repeat(shown / (self.vocabulary - 1), "b t h w -> b t 3 (h p) (w q)", p=PATCH, q=PATCH).clamp(0, 1)


@pytest.fixture
def codec() -> ClipCodec:
    return freeze(ClipCodec())


@pytest.fixture
def make(codec: ClipCodec) -> Callable[..., Phenaki]:
    """A tiny Phenaki; keys are its config's."""

    def make(
        stages: dict | None = None,
        frames: int = FRAMES,
        size: int = SIZE,
        seed: int = 0,
        assets: dict | None = None,
        note=lambda line: None,
        **keys,
    ) -> Phenaki:
        torch.manual_seed(seed)
        text = {"width": 32, "heads": 2, "depth": 1, "length": 16}
        keys = {"width": 32, "depth": 2, "heads": 2, "text": text, **keys}
        context = BuildContext(
            shape=Shape(frames, size, size, 3, 8.0),
            stage={"tokenizer": codec, **(stages or {})}.__getitem__,
            captions=lambda: CAPTIONS,
            assets=assets or {},
            note=note,
        )
        return Phenaki.build(parse(PhenakiConfig, {"task": "phenaki", "codec": "tokenizer", **keys}), context)

    return make


def clips(rows: int, times: int = 3, size: int = SIZE, seed: int = 0) -> Tensor:
    """Tokens, B t h w."""
    side = size // PATCH
    return torch.randint(0, VOCABULARY, (rows, times, side, side), generator=torch.Generator().manual_seed(seed))


def batch_of(rows: int = 4, times: int = 3, size: int = SIZE, seed: int = 0) -> Batch:
    """Pixels that the codec encodes without loss."""
    pixels = (ClipCodec().decode(clips(rows, times, size, seed)) * 255).round().to(torch.uint8)
    captions = [CAPTIONS[row % len(CAPTIONS)] for row in range(rows)]
    return Batch(slots=torch.arange(rows), pixels=pixels, captions=captions)


@pytest.fixture
def batch() -> Batch:
    return batch_of()


@pytest.fixture
def noise() -> Noise:
    return Noise.for_rows(seed=1, step=2, rows=4)


def train(task: Task, batch: Batch, steps: int, lr: float = 3e-3) -> dict[str, list[float]]:
    """Plain descent on one batch, each player with its own optimizer; their losses."""
    optimizers = {p: torch.optim.AdamW(list(player_parameters(task, p).values()), lr=lr) for p in task.players}
    losses: dict[str, list[float]] = {player: [] for player in task.players}
    task.train()
    for step in range(steps):
        shared = task(batch, Noise(0, step, batch.slots))
        for player in reversed(task.players):
            total = task.loss(player, shared).total.value()
            optimizers[player].zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(list(player_parameters(task, player).values()), 1.0)
            losses[player].append(float(total.detach()))
        for optimizer in optimizers.values():
            optimizer.step()
    task.eval()
    return losses


def moved(task: Task, before: dict[str, Tensor]) -> set[str]:
    """Names of parameters that are not what they were."""
    return {name for name, p in task.named_parameters() if not torch.equal(before[name], p)}


def weights(task: Task) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in task.named_parameters()}
