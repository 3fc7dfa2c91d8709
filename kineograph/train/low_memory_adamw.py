"""AdamW in less memory: weights of 16 bits that lose nothing, and moments of 8 bits.

**Split weights.** A bf16 weight is the upper half of a float32. Its lower half is kept beside it as a signed word, so that

    bits(w) = bits(bf16) · 2¹⁶ + low,      −2¹⁵ ≤ low < 2¹⁵,

the network reads w rounded to the nearest, updates that are too small to show there add up all the same, and the weights move as in float32.

**8-bit moments.** 128 neighbours in a row share a scale s, their largest value. Levels lie closer near zero, where most values are:

    first moment    s · sign(q) (q / 127)²        second    s · (q / 255)⁴, at least 1 / 255⁴

A value between two levels goes to one of them so that the average over steps is the value itself: nearest rounding would keep a moment for ever
where a step changes it by less than half a level. The dither that decides is the golden-ratio sequence over steps and places, a pure function
of the step. Vectors and small matrices keep their moments in float32.

Everything happens where the parameter lies, and an update that is to be skipped is decided there: the host never waits.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.noise import GOLDEN

BLOCK = 128
SMALLEST = 4096  # numbers; a tensor below this keeps its moments in float32
FIRST, SECOND = (127, 2), (255, 4)  # levels, power
KINDS = 32  # of parameters, by rank, type and whether blocks fill a row: more than any network has
SILVER = 0.7548776662466927


class Rule(NamedTuple):
    """What all parameters of a group have in common in one step: 0-d float32 tensors on the device."""

    rate: Tensor
    decay: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    divisor: Tensor
    skipped: Tensor  # 1 where nothing is to change


class LowMemoryState:
    """The optimizer's part for one parameter: its state, made at the first step, and its update."""

    def __init__(self, parameter: nn.Parameter, eight_bits: bool, numbers: int | None = None) -> None:
        """`parameter` may be a process's part of one with so many `numbers`: all parts are kept alike."""
        self.parameter = parameter
        self.split = parameter.dtype == torch.bfloat16
        self.eight_bits = eight_bits and parameter.ndim >= 2 and (numbers or parameter.numel()) >= SMALLEST
        self.state: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        numbers = self.parameter.numel()
        moments = 2 * numbers + 8 * math.prod(self._scales()) if self.eight_bits else 8 * numbers
        return moments + (2 * numbers if self.split else 0)

    def _scales(self) -> tuple[int, int]:
        """Rows, and blocks in each."""
        rows, *rest = self.parameter.shape
        return rows, -(-math.prod(rest) // BLOCK)

    def _forms(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each tensor of the state."""
        shape = tuple(self.parameter.shape)
        forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"step": ((), torch.float32)}
        if self.split:
            forms["low"] = shape, torch.int16
        for name, kind in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
            forms[name] = shape, kind if self.eight_bits else torch.float32
            if self.eight_bits:
                forms[f"{name}_scale"] = self._scales(), torch.float32
        return forms

    def fresh(self) -> dict[str, Tensor]:
        """The state before the first step."""
        device = self.parameter.device
        return {name: torch.zeros(shape, dtype=kind, device=device) for name, (shape, kind) in self._forms().items()}

    def load(self, state: Mapping[str, Tensor]) -> bool:
        """Whether what was saved is of this kind."""
        alike = {name: (tuple(value.shape), value.dtype) for name, value in state.items()} == self._forms()
        if alike:
            self.state = {name: value.to(self.parameter.device) for name, value in state.items()}
        return alike

    @torch.no_grad()
    def update(self, rule: Rule) -> None:
        if self.parameter.grad is None:
            return
        self.state = self.state or self.fresh()
        state, p = self.state, self.parameter.detach()
        run = _compiled() if p.is_cuda else _update
        run(
            p,
            self.parameter.grad,
            state["step"],
            state.get("low"),
            state["exp_avg"],
            state["exp_avg_sq"],
            state.get("exp_avg_scale"),
            state.get("exp_avg_sq_scale"),
            rule,
        )


@cache
def _compiled() -> Callable[..., None]:
    """A few kernels for each parameter; sizes are symbols, so that a few compilations serve them all."""
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, KINDS)
    return torch.compile(_update, dynamic=True)


def _update(
    p: Tensor,
    gradient: Tensor,
    step: Tensor,
    low: Tensor | None,
    first: Tensor,
    second: Tensor,
    first_scale: Tensor | None,
    second_scale: Tensor | None,
    rule: Rule,
) -> None:
    """AdamW:  m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   w ← w (1 − lr · decay) − lr m̂ / (√v̂ + eps)"""
    keep = rule.skipped > 0
    g = gradient.float() / rule.divisor
    m = first if first_scale is None else widened(first, first_scale, *FIRST)
    v = second if second_scale is None else widened(second, second_scale, *SECOND)
    m = rule.beta1 * m + (1 - rule.beta1) * g
    v = rule.beta2 * v + (1 - rule.beta2) * g * g
    count = step + 1
    m_hat, v_hat = m / (1 - rule.beta1**count), v / (1 - rule.beta2**count)
    before = p if low is None else joined(p, low)
    after = before * (1 - rule.rate * rule.decay) - rule.rate * m_hat / (v_hat.sqrt() + rule.eps)
    if low is None:
        _put(p, after.to(p.dtype), keep)
    else:
        upper, lower = halves(after)
        _put(p, upper, keep)
        _put(low, lower, keep)
    for place, scale, value, kind in ((first, first_scale, m, FIRST), (second, second_scale, v, SECOND)):
        if scale is None:
            _put(place, value, keep)
        else:
            coded, scales = narrowed(value, dither(step, value.device), *kind)
            _put(place, coded.to(place.dtype), keep)
            _put(scale, scales, keep)
    _put(step, count, keep)


def _put(place: Tensor, value: Tensor, keep: Tensor) -> None:
    place.copy_(torch.where(keep, place, value))


# Split weights ---------------------------------------------------------------------------------------------------


def joined(upper: Tensor, low: Tensor) -> Tensor:
    """bf16 and its int16 → float32"""
    return ((upper.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """float32 → the nearest bf16, and what is missing"""
    bits = value.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


# 8-bit moments ---------------------------------------------------------------------------------------------------


def dither(step: Tensor, device: torch.device) -> Tensor:
    """BLOCK numbers in [0, 1), evenly spread over places in each step and over steps at each place."""
    places = torch.arange(BLOCK, device=device, dtype=torch.float64)
    return torch.frac(places * GOLDEN + step.double() * SILVER).float()


def _in_blocks(value: Tensor) -> Tensor:
    """rows … → rows blocks BLOCK, filled up with zeros"""
    rows = value.flatten(1)
    missing = -rows.shape[1] % BLOCK
    if missing:
        rows = F.pad(rows, (0, missing))
    return rows.unflatten(1, (-1, BLOCK))


def _out_of_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    rows = blocks.flatten(1)
    return rows[:, : math.prod(like.shape[1:])].reshape(like.shape)


def narrowed(value: Tensor, dither: Tensor, levels: int, power: int) -> tuple[Tensor, Tensor]:
    """→ level numbers in `value`'s shape, and a scale a block"""
    blocks = _in_blocks(value)
    scale = blocks.abs().amax(-1)  # rows blocks
    share = (blocks.abs() / scale.clamp_min(1e-38)[..., None]).clamp_max(1)  # of the largest
    at = share ** (1 / power) * levels
    below = at.floor().clamp_max(levels - 1)
    # the share of times that the level above is taken, so that the mean is the value and not its root
    chance = (at**power - below**power) / ((below + 1) ** power - below**power)
    number = below + (dither < chance)
    if power == SECOND[1]:
        number = torch.where(share > 0, number.clamp_min(1), number)  # what is divided by is never lost
    else:
        number = number * blocks.sign()
    return _out_of_blocks(number, value), scale


def widened(numbers: Tensor, scale: Tensor, levels: int, power: int) -> Tensor:
    blocks = _in_blocks(numbers).float() / levels
    found = blocks**power * blocks.sign() if power == FIRST[1] else blocks**power
    return _out_of_blocks(found * scale[..., None], numbers)
