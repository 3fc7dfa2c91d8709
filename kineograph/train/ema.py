"""Exponential moving average of a player's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kineograph.train.config import EmaConfig


class Ema:
    """θ̄ ← d θ̄ + (1 − d) θ with d = min(decay, (1 + n) / (10 + n)) at the n-th update. In float32 at least: of 16-bit weights the share of one
    update would be lost to rounding."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EmaConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.average = {name: p.detach().to(_wide(p.dtype), copy=True) for name, p in self.parameters.items()}
        self.updates = 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the optimizer made step `step`."""
        if step <= self.config.start:
            torch._foreach_copy_(list(self.average.values()), list(self.parameters.values()))
        elif step % self.config.every == 0:
            self.updates += 1
            alike = [(self.average[name], p) for name, p in self.parameters.items() if p.dtype == _wide(p.dtype)]
            if alike:
                torch._foreach_lerp_([a for a, _ in alike], [p for _, p in alike], 1 - self.decay)
            for name, p in self.parameters.items():
                if p.dtype != _wide(p.dtype):
                    self.average[name].lerp_(p.float(), 1 - self.decay)

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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def averaged(averages: list[Ema], exact: bool = False) -> Iterator[None]:
    """Inside, the parameters hold their averages, in their own type or with `exact` as they are. Storage is swapped, and copied only where
    the type differs."""
    own = [(p, p.data) for ema in averages for p in ema.parameters.values()]
    for ema in averages:
        for name, p in ema.parameters.items():
            p.data = ema.average[name] if exact else ema.average[name].to(p.dtype)
    try:
        yield
    finally:
        for p, value in own:
            p.data = value
