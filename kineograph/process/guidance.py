"""Classifier-free guidance as a closure: conditional and unconditional (or negative) rows in one batched call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["constant", "linear"]


def scale_at(scale: float, step: int, steps: int, schedule: Schedule = "constant") -> float:
    """The guidance scale of a step. `linear` rises from 1 (no guidance) at the first step to `scale` at the last: variety early, fidelity late."""
    if schedule == "constant" or steps == 1:
        return scale
    return 1 + (scale - 1) * step / (steps - 1)


def guided(denoise: Callable[[Tensor, int], Tensor], scale: Callable[[int], float]) -> Callable[[Tensor, int], Tensor]:
    """out = other + scale · (conditional − other).

    `denoise` is bound to 2B conditions, the B wanted ones before the B others (null or negative); the closure takes B rows.
    """

    def call(x: Tensor, step: int) -> Tensor:
        wanted, other = denoise(torch.cat([x, x]), step).float().chunk(2)
        return other + scale(step) * (wanted - other)

    return call
