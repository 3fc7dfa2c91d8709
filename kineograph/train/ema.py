"""Exponential moving average of a player's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kineograph.train.config import EmaConfig


class Ema:
    """θ̄ ← d θ̄ + (1 − d) θ with d = min(decay, (1 + n) / (10 + n)) at the n-th update."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EmaConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.updates = 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the optimizer made step `step`."""
        if step <= self.config.start:
            torch._foreach_copy_(list(self.average.values()), list(self.parameters.values()))
        elif step % self.config.every == 0:
            self.updates += 1
            torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - self.decay)

    @property
    def decay(self) -> float:
        """The weight of the past at the last update."""
        return min(self.config.decay, (1 + self.updates) / (10 + self.updates))

    def state(self) -> dict[str, Tensor]:
        return dict(self.average)

    def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        for name, value in self.average.items():
            value.copy_(weights[name])
        self.updates = updates


@contextmanager
def averaged(averages: list[Ema]) -> Iterator[None]:
    """Inside, the parameters hold their averages. Storage is swapped, not copied."""
    _swap(averages)
    try:
        yield
    finally:
        _swap(averages)


def _swap(averages: list[Ema]) -> None:
    for ema in averages:
        for name, p in ema.parameters.items():
            p.data, ema.average[name] = ema.average[name], p.data
