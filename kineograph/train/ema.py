"""Exponential moving average of a player's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kineograph.train.config import EmaConfig
from kineograph.train.dtensors import shard_like, to_local


class Ema:
    """θ̄ ← d θ̄ + (1 − d) θ with d = min(decay, (1 + n) / (10 + n)) at the n-th update. In float32 at least: of 16-bit weights the share of one
    update would be lost to rounding."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EmaConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        # What lies here of each: all of it, or this process's part.
        self.parts = {
            name: to_local(p.detach()) if isinstance(p, DTensor) else p for name, p in self.parameters.items()
        }
        self.average = {name: part.detach().to(_wide(part.dtype), copy=True) for name, part in self.parts.items()}
        self.updates = 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the optimizer made step `step`."""
        if step <= self.config.start:
            torch._foreach_copy_(list(self.average.values()), list(self.parts.values()))
        elif step % self.config.every == 0:
            self.updates += 1
            alike = [(self.average[name], part) for name, part in self.parts.items() if part.dtype == _wide(part.dtype)]
            if alike:
                torch._foreach_lerp_([a for a, _ in alike], [part for _, part in alike], 1 - self.decay)
            for name, part in self.parts.items():
                if part.dtype != _wide(part.dtype):
                    self.average[name].lerp_(part.float(), 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter, in the same memory; DTensors where the parameter is one."""
        return {name: shard_like(value, self.parameters[name]) for name, value in self.average.items()}

    @property
    def decay(self) -> float:
        """The weight of the past at the last update."""
        return min(self.config.decay, (1 + self.updates) / (10 + self.updates))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def swap_in_averages(averages: list[Ema]) -> Iterator[None]:
    """Inside, the parameters hold their averages, in their own type: with another one torch would forget who waits for their gradients (DDP).
    Storage is swapped, and copied only where the type differs, or where FSDP2 gathers from the memory that it gave the part."""
    own: list[tuple[Tensor, Tensor]] = []
    parts: list[tuple[Tensor, Tensor]] = []
    try:
        for ema in averages:  # in here too: memory may end half way
            for name, p in ema.parameters.items():
                if isinstance(p, DTensor):
                    parts.append((ema.parts[name], ema.parts[name].clone()))
                    ema.parts[name].copy_(ema.average[name])
                else:
                    own.append((p, p.data))
                    p.data = ema.average[name].to(p.dtype)
        yield
    finally:
        for parameter, before in own:
            parameter.data = before
        for part, before in parts:
            part.copy_(before)
