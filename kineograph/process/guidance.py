"""Classifier-free guidance as a closure: conditional and unconditional (or negative) rows in one batched call.

    out = other + s · (conditional − other)

s may change over the steps. Of a diffusion whose variance is learned only the mean's channels are guided: the variance is the conditional one's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from kineograph.core.errors import ConfigError

Schedule = Literal["constant", "linear"]
DiffusionSchedule = Literal["constant", "linear", "cosine", "oscillating"]


def check_null(guidance: float, dropout: float, key: str, known: bool = False, off: float = 1) -> None:
    """For configs that hold both: guidance leads away from what the network answers without a condition, which it must have learned.

    `known`: it starts from weights that may have. `off`: the guidance that is none.
    """
    if guidance != off and dropout == 0 and not known:
        raise ValueError(
            f"{key}=0 never shows the network what sample.guidance={guidance:g} leads away from, so guided samples would be noise: "
            f"set {key}=0.1, or sample.guidance={off:g} (weights that know it may be given with `init`)"
        )


def check_null_of(generator: str, guidance: float, dropout: float, known: bool = False) -> None:
    """`check_null` for a critic, which draws with a generator: the guidance is its own, the dropout stands in the other's config."""
    try:
        check_null(guidance, dropout, "caption_dropout", known)
    except ValueError as error:
        raise ConfigError(f"generator={generator}: {error}") from None


def scale_at(scale: float, step: int, steps: int, schedule: Schedule = "constant") -> float:
    """The guidance scale of a step. `linear` rises from 1 (no guidance) at the first step to `scale` at the last: variety early, fidelity late."""
    if schedule == "constant" or steps == 1:
        return scale
    return 1 + (scale - 1) * step / (steps - 1)


def scales(scale: float, times: Sequence[int], schedule: DiffusionSchedule = "constant") -> list[float]:
    """The guidance scale of every step of a diffusion that visits the levels `times`, N of them.

    cosine and oscillating are CogVideoX's, 1 + scale · (1 − cos(π p⁵)) / 2. cosine: with the share p = n / (N − 1) of the steps that are done, so
    from 1 to 1 + scale. oscillating: as its released code has it, with p = (N − t) / N of a level t that counts to T, not to N: far out of [0, 1],
    where the cosine swings many times. Released results were made with it.
    """
    count = len(times)
    if schedule == "constant" or schedule == "linear":
        return [scale_at(scale, step, count, schedule) for step in range(count)]
    done = [step / max(count - 1, 1) for step in range(count)]
    if schedule == "oscillating":
        done = [(count - t) / count for t in times]
    return [1 + scale * (1 - math.cos(math.pi * share**5)) / 2 for share in done]


def scale_table(
    scale: float, times: Sequence[int], schedule: DiffusionSchedule = "constant", device: torch.device | str = "cpu"
) -> Tensor:
    """`scales` by level, for `guided_denoise`: entry t is the scale at t. Levels that are not visited have 1."""
    table = torch.ones(max(times) + 1)
    table[list(times)] = torch.tensor(scales(scale, times, schedule))
    return table.to(device)


def guide(wanted: Tensor, other: Tensor, scale: float | Tensor, channels: int | None = None) -> Tensor:
    """other + scale · (wanted − other), float32. With `channels`, of that many of dimension 1; what follows them is taken from `wanted`."""
    wanted, other = wanted.float(), other.float()
    if channels is None or channels == wanted.shape[1]:
        return other + scale * (wanted - other)
    mean = guide(wanted[:, :channels], other[:, :channels], scale)
    return torch.cat([mean, wanted[:, channels:]], dim=1)


def guided(denoise: Callable[[Tensor, int], Tensor], scale: Callable[[int], float]) -> Callable[[Tensor, int], Tensor]:
    """out = other + scale · (conditional − other).

    `denoise` is bound to 2B conditions, the B wanted ones before the B others (null or negative); the closure takes B rows.
    """

    def call(x: Tensor, step: int) -> Tensor:
        wanted, other = denoise(torch.cat([x, x]), step).chunk(2)
        return guide(wanted, other, scale(step))

    return call


def guided_denoise(
    denoise: Callable[[Tensor, Tensor], Tensor], scale: float | Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """The same for solvers of diffusion, whose `denoise` takes x and the times t, B.

    `scale` is one number, or a table by level on x's device (`scale_table`). Channels beyond x's own are the learned variance: not guided.
    """

    def call(x: Tensor, t: Tensor) -> Tensor:
        wanted, other = denoise(torch.cat([x, x]), torch.cat([t, t])).chunk(2)
        at = scale[t].view(-1, *[1] * (x.dim() - 1)) if isinstance(scale, Tensor) else scale
        return guide(wanted, other, at, channels=x.shape[1])

    return call
