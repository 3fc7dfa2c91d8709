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
    """θ̄ ← d θ̄ + (1 − d) θ with d = min(decay, (1 + n) / (10 + n)) at the n-th update.

    Where a step counts as p steps of the schedule (train.minutes), n grows by p and d becomes dᵖ: the average spans the
    same share of the stage, however many steps its time allows.

    The average is float32 at least: in 16 bits one update would be lost to rounding.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EmaConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        # This rank's shard of each parameter, or all of it.
        self.parts = {
            name: to_local(p.detach()) if isinstance(p, DTensor) else p for name, p in self.parameters.items()
        }
        self.average = {name: part.detach().to(_wide(part.dtype), copy=True) for name, part in self.parts.items()}
        self.updates: float = 0
        self._pace: float = 1

    @torch.no_grad()
    def update(self, step: int, position: float | None = None, pace: float = 1) -> None:
        """Update the averages after step `step`, which is `position` in the schedule and counts as `pace` steps of it."""
        if (step if position is None else position) <= self.config.start:
            torch._foreach_copy_(list(self.average.values()), list(self.parts.values()))
        elif step % self.config.every == 0:
            self.updates += pace
            self._pace = pace
            same_dtype = [name for name, part in self.parts.items() if part.dtype == _wide(part.dtype)]
            if same_dtype:
                averages, parts = [self.average[n] for n in same_dtype], [self.parts[n] for n in same_dtype]
                torch._foreach_lerp_(averages, parts, 1 - self.decay)
            for name, part in self.parts.items():
                if part.dtype != _wide(part.dtype):
                    self.average[name].lerp_(part.float(), 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter, in the same memory; DTensors where the parameter is one."""
        return {name: shard_like(value, self.parameters[name]) for name, value in self.average.items()}

    @property
    def decay(self) -> float:
        """d at the last update."""
        return float(min(self.config.decay, (1 + self.updates) / (10 + self.updates)) ** self._pace)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def swap_in_averages(emas: list[Ema]) -> Iterator[None]:
    """Let the parameters hold their averages inside.

    Plain parameters swap their storage and keep their dtype: with another one DDP would lose its gradient hooks. Shards
    are copied, since FSDP2 gathers from the memory that it allocated.
    """
    swapped: list[tuple[Tensor, Tensor]] = []
    copied: list[tuple[Tensor, Tensor]] = []
    try:
        for ema in emas:  # inside the try: memory may run out half-way
            for name, p in ema.parameters.items():
                if isinstance(p, DTensor):
                    copied.append((ema.parts[name], ema.parts[name].clone()))
                    ema.parts[name].copy_(ema.average[name])
                else:
                    swapped.append((p, p.data))
                    p.data = ema.average[name].to(p.dtype)
        yield
    finally:
        for parameter, weights in swapped:
            parameter.data = weights
        for part, weights in copied:
            part.copy_(weights)
