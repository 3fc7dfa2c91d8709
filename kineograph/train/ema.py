"""Exponential moving average of a player's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kineograph.train.config import EmaConfig
from kineograph.train.pieces import local


class Ema:
    """θ̄ ← d θ̄ + (1 − d) θ with d = min(decay, (1 + n) / (10 + n)) at the n-th update."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EmaConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        # What lies here of each: all of it, or this process's part.
        self.parts = {name: local(p.detach()) if isinstance(p, DTensor) else p for name, p in self.parameters.items()}
        self.average = {name: part.detach().clone() for name, part in self.parts.items()}
        self.updates = 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the optimizer made step `step`."""
        if step <= self.config.start:
            torch._foreach_copy_(list(self.average.values()), list(self.parts.values()))
        elif step % self.config.every == 0:
            self.updates += 1
            torch._foreach_lerp_(list(self.average.values()), list(self.parts.values()), 1 - self.decay)

    @property
    def decay(self) -> float:
        """The weight of the past at the last update."""
        return min(self.config.decay, (1 + self.updates) / (10 + self.updates))

    def state(self) -> dict[str, Tensor]:
        return dict(self.average)

    def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Parts, as `state` gives them."""
        for name, value in self.average.items():
            value.copy_(weights[name])
        self.updates = updates


@contextmanager
def averaged(averages: list[Ema]) -> Iterator[None]:
    """Inside, the parameters hold their averages. Storage is swapped, not copied, where a parameter lies in one process."""
    _swap(averages)
    try:
        yield
    finally:
        _swap(averages)


def _swap(averages: list[Ema]) -> None:
    for ema in averages:
        for name, p in ema.parameters.items():
            if isinstance(p, DTensor):  # FSDP2 gathers from the memory that it gave the part
                held = ema.parts[name].clone()
                ema.parts[name].copy_(ema.average[name])
                ema.average[name].copy_(held)
            else:
                p.data, ema.average[name] = ema.average[name], p.data
