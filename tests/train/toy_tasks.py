"""Two of the smallest Tasks: one with one player, one with two that play against each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch
from kineograph.core.config import StageConfig
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, Task, freeze


class ToyConfig(StageConfig):
    references = ("codec",)
    width: int = 8
    codec: str | None = None
    dropout: float = 0.0


class Toy(Task):
    """Predicts the mean of noisy pixels; weighs samples by their caption's length where there is one."""

    Config = ToyConfig

    def __init__(self, inputs: int, config: ToyConfig) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, config.width)
        self.body = nn.Sequential(
            nn.Linear(config.width, config.width),
            nn.Tanh(),
            nn.Dropout(config.dropout),
            nn.Linear(config.width, config.width),
        )
        self.norm = nn.LayerNorm(config.width)
        self.last = nn.Linear(config.width, 1)
        self.helper = freeze(nn.Linear(inputs, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    @classmethod
    def build(cls, config: ToyConfig, context: BuildContext) -> Toy:
        shape = context.shape
        task = cls(shape.frames * shape.channels * shape.height * shape.width, config)
        if config.codec is not None:
            task.stages["codec"] = context.stage(config.codec)
        return task

    def trainable(self, player: str) -> list[nn.Module]:
        return [self]

    def forward(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
        flat = batch.video.flatten(1)  # B N
        if self.training:
            self.seen += 1
        hidden = torch.tanh(self.first(flat + 0.1 * noise.normal("noise", flat.shape[1])))
        hidden = self.norm(hidden + self.body(hidden))
        weights = torch.tensor([float(len(c)) for c in batch.captions]) if batch.captions else torch.ones(len(batch))
        return self.last(hidden)[:, 0], flat.mean(1), weights.to(flat.device)

    def loss(self, player: str, shared: tuple[Tensor, Tensor, Tensor]) -> Loss:
        found, wanted, weights = shared
        error = (found - wanted).square()
        return Loss(Mean((error * weights).sum(), weights.sum()), {"error": Mean(error.sum(), float(len(error)))})

    def blocks(self) -> list[nn.Module]:
        return [self.body]

    def tokens_per_clip(self) -> int:
        return 12


class DuelConfig(ToyConfig):
    def player_names(self) -> tuple[str, ...]:
        return ("generator", "critic")


class Duel(Task):
    """A generator that copies its input through a bottleneck, and a critic that tells copies from inputs."""

    Config = DuelConfig

    def __init__(self, inputs: int, config: ToyConfig, critic_start: int = 0) -> None:
        super().__init__(players=("generator", "critic"))
        self.generator = nn.Sequential(nn.Linear(inputs, config.width), nn.Tanh(), nn.Linear(config.width, inputs))
        self.critic = nn.Sequential(nn.Linear(inputs, config.width), nn.Tanh(), nn.Linear(config.width, 1))
        self.critic_start = critic_start

    @classmethod
    def build(cls, config: ToyConfig, context: BuildContext) -> Duel:
        shape = context.shape
        return cls(shape.frames * shape.channels * shape.height * shape.width, config)

    def trainable(self, player: str) -> list[nn.Module]:
        return [getattr(self, player)]

    def is_active(self, player: str, step: int) -> bool:
        return player == "generator" or step >= self.critic_start

    def forward(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        real = batch.video.flatten(1)
        return real, self.generator(real)

    def loss(self, player: str, shared: tuple[Tensor, Tensor]) -> Loss:
        real, made = shared
        count = float(len(real))
        if player == "generator":
            return Loss(Mean((made - real).square().mean(1).sum() - 0.1 * self.critic(made).sum(), count))
        return Loss(Mean((1 - self.critic(real)).relu().sum() + (1 + self.critic(made.detach())).relu().sum(), count))


TASK = Toy
