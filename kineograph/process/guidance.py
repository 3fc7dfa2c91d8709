"""Classifier-free guidance as a closure: conditional and unconditional (or negative) rows in one batched call.

    out = unconditional + s · (conditional − unconditional)

The scale s may change over the steps. With a learned variance only the mean is guided; the variance is the conditional one.
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


def check_guidance_dropout(guidance: float, dropout: float, key: str, known: bool = False, off: float = 1) -> None:
    """Refuse guidance for a model that never sees the null condition in training.

    `known`: the initial weights may have been trained with it. `off`: the scale that turns guidance off.
    """
    if guidance != off and dropout == 0 and not known:
        raise ValueError(
            f"sample.guidance={guidance:g} needs a model trained with dropped conditions, and {key}=0: "
            f"set {key}=0.1 or sample.guidance={off:g}, or start with `init` from weights that were trained so"
        )


def check_generator_dropout(generator: str, guidance: float, dropout: float, known: bool = False) -> None:
    """`check_guidance_dropout` for a critic: the guidance is its own, the dropout is the generator's."""
    try:
        check_guidance_dropout(guidance, dropout, "caption_dropout", known)
    except ValueError as error:
        raise ConfigError(f"generator={generator}: {error}") from None


def guidance_scale_at(scale: float, step: int, steps: int, schedule: Schedule = "constant") -> float:
    """The guidance scale of a step. linear: from 1 (off) at the first step to `scale` at the last, for diversity early on."""
    if schedule == "constant" or steps == 1:
        return scale
    return 1 + (scale - 1) * step / (steps - 1)


def guidance_scales(scale: float, times: Sequence[int], schedule: DiffusionSchedule = "constant") -> list[float]:
    """The guidance scale of every step of a diffusion sampler that visits the N timesteps `times`.

    cosine and oscillating are CogVideoX's: 1 + scale · (1 − cos(π p⁵)) / 2. cosine: p = n / (N − 1), from 1 to 1 + scale.
    oscillating: p = (N − t) / N as in the released code, where t counts to T instead of N. p leaves [0, 1] and the cosine
    swings many times; the published results were made with it.
    """
    count = len(times)
    if schedule == "constant" or schedule == "linear":
        return [guidance_scale_at(scale, step, count, schedule) for step in range(count)]
    done = [step / max(count - 1, 1) for step in range(count)]
    if schedule == "oscillating":
        done = [(count - t) / count for t in times]
    return [1 + scale * (1 - math.cos(math.pi * share**5)) / 2 for share in done]


def scale_table(
    scale: float, times: Sequence[int], schedule: DiffusionSchedule = "constant", device: torch.device | str = "cpu"
) -> Tensor:
    """`guidance_scales` as a table: entry t is the scale at timestep t, 1 where t is not visited."""
    table = torch.ones(max(times) + 1)
    table[list(times)] = torch.tensor(guidance_scales(scale, times, schedule))
    return table.to(device)


def apply_guidance(
    conditional: Tensor, unconditional: Tensor, scale: float | Tensor, channels: int | None = None
) -> Tensor:
    """unconditional + scale · (conditional − unconditional) in float32. Only the first `channels` of dimension 1; the rest is copied from `conditional`."""
    conditional, unconditional = conditional.float(), unconditional.float()
    if channels is None or channels == conditional.shape[1]:
        return unconditional + scale * (conditional - unconditional)
    mean = apply_guidance(conditional[:, :channels], unconditional[:, :channels], scale)
    return torch.cat([mean, conditional[:, channels:]], dim=1)


def make_guided(
    denoise: Callable[[Tensor, int], Tensor], scale: Callable[[int], float]
) -> Callable[[Tensor, int], Tensor]:
    """Wrap `denoise`, which is bound to 2B conditions (B conditional, then B null or negative), into a closure over B rows."""

    def call(x: Tensor, step: int) -> Tensor:
        conditional, unconditional = denoise(torch.cat([x, x]), step).chunk(2)
        return apply_guidance(conditional, unconditional, scale(step))

    return call


def make_guided_denoiser(
    denoise: Callable[[Tensor, Tensor], Tensor], scale: float | Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """`make_guided` for diffusion solvers, whose `denoise` takes x and timesteps t, B.

    `scale` is a number, or a table on x's device (`scale_table`). Channels beyond those of x are the learned variance.
    """

    def call(x: Tensor, t: Tensor) -> Tensor:
        conditional, unconditional = denoise(torch.cat([x, x]), torch.cat([t, t])).chunk(2)
        at = scale[t].view(-1, *[1] * (x.dim() - 1)) if isinstance(scale, Tensor) else scale
        return apply_guidance(conditional, unconditional, at, channels=x.shape[1])

    return call
