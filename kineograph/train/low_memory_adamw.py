"""AdamW in less memory: bf16 weights without rounding loss, and 8-bit moments.

**Split weights.** A bf16 weight is the upper half of a float32. Its lower half is stored beside it as an int16:

    bits(w) = bits(bf16) · 2¹⁶ + low,      −2¹⁵ ≤ low < 2¹⁵

The network reads w rounded to bf16. Updates too small for bf16 add up in `low`, so the weights move as in float32.

**8-bit moments.** 128 neighbours in a row share a scale s, their largest value. Levels are closer near zero:

    first moment    s · sign(q) (q / 127)²        second    s · (q / 255)⁴, at least 1 / 255⁴

Rounding is dithered so that its mean over steps is exact: nearest rounding would freeze a moment that a step changes by
less than half a level. The dither is a golden-ratio sequence, a pure function of the step and the position. Vectors and
small matrices keep float32 moments.

Everything, skipped updates included, is decided on the device: the host never waits.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.noise import GOLDEN
from kineograph.train.compile import keep_compile_cache

BLOCK = 128
MIN_QUANTIZED = 4096  # elements; a smaller tensor keeps its moments in float32
FIRST, SECOND = (127, 2), (255, 4)  # levels, power
MAX_VARIANTS = 32  # of parameters by rank, dtype and whether blocks fill a row: more than any network has
STEP_RATIO = 0.7548776662466927


class UpdateRule(NamedTuple):
    """Hyperparameters of one step, as 0-d float32 tensors on the device."""

    rate: Tensor
    decay: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    divisor: Tensor
    skipped: Tensor  # 1 if nothing may change


class LowMemoryState:
    """The optimizer state of one parameter, allocated at the first step, and its update."""

    def __init__(self, parameter: nn.Parameter, eight_bits: bool, full_size: int | None = None) -> None:
        """`full_size`: elements of the full tensor if `parameter` is one rank's shard, so that all shards decide alike."""
        self.parameter = parameter
        self.is_split = parameter.dtype == torch.bfloat16
        self.is_8bit = eight_bits and parameter.ndim >= 2 and (full_size or parameter.numel()) >= MIN_QUANTIZED
        self.tensors: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        elements = self.parameter.numel()
        moments = 2 * elements + 8 * math.prod(self._scale_shape()) if self.is_8bit else 8 * elements
        return moments + (2 * elements if self.is_split else 0)

    def _scale_shape(self) -> tuple[int, int]:
        """Rows, and blocks per row."""
        rows, *rest = self.parameter.shape
        return rows, -(-math.prod(rest) // BLOCK)

    def _specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of the state."""
        shape = tuple(self.parameter.shape)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"step": ((), torch.float32)}
        if self.is_split:
            specs["low"] = shape, torch.int16
        for name, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
            specs[name] = shape, dtype if self.is_8bit else torch.float32
            if self.is_8bit:
                specs[f"{name}_scale"] = self._scale_shape(), torch.float32
        return specs

    def allocate(self) -> dict[str, Tensor]:
        """Set the state to zeros, as before the first step."""
        device = self.parameter.device
        specs = self._specs().items()
        self.tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in specs}
        return self.tensors

    @torch.no_grad()
    def update(self, rule: UpdateRule) -> None:
        if self.parameter.grad is None:
            return
        state = self.tensors or self.allocate()
        p = self.parameter.detach()
        update = _compile_update() if p.is_cuda else _update
        update(
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
def _compile_update() -> Callable[..., None]:
    """Compile the update with symbolic sizes, so that a few compilations serve all parameters."""
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    keep_compile_cache()
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
    rule: UpdateRule,
) -> None:
    """AdamW:  m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   w ← w (1 − lr · decay) − lr m̂ / (√v̂ + eps)"""
    keep = rule.skipped > 0
    g = gradient.float() / rule.divisor
    m = first if first_scale is None else dequantize(first, first_scale, *FIRST)
    v = second if second_scale is None else dequantize(second, second_scale, *SECOND)
    m = rule.beta1 * m + (1 - rule.beta1) * g
    v = rule.beta2 * v + (1 - rule.beta2) * g * g
    count = step + 1
    m_hat, v_hat = m / (1 - rule.beta1**count), v / (1 - rule.beta2**count)
    before = p if low is None else join_float32(p, low)
    after = before * (1 - rule.rate * rule.decay) - rule.rate * m_hat / (v_hat.sqrt() + rule.eps)
    if low is None:
        _assign_unless(p, after.to(p.dtype), keep)
    else:
        upper, lower = split_float32(after)
        _assign_unless(p, upper, keep)
        _assign_unless(low, lower, keep)
    for moment, scale, value, levels in ((first, first_scale, m, FIRST), (second, second_scale, v, SECOND)):
        if scale is None:
            _assign_unless(moment, value, keep)
        else:
            numbers, scales = quantize(value, dither(step, value.device), *levels)
            _assign_unless(moment, numbers.to(moment.dtype), keep)
            _assign_unless(scale, scales, keep)
    _assign_unless(step, count, keep)


def _assign_unless(target: Tensor, value: Tensor, keep: Tensor) -> None:
    target.copy_(torch.where(keep, target, value))


# Split weights ---------------------------------------------------------------------------------------------------


def join_float32(upper: Tensor, low: Tensor) -> Tensor:
    """bf16 weights and their int16 remainders → float32"""
    return ((upper.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def split_float32(value: Tensor) -> tuple[Tensor, Tensor]:
    """float32 → the nearest bf16, and the int16 remainder"""
    bits = value.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


# 8-bit moments ---------------------------------------------------------------------------------------------------


def dither(step: Tensor, device: torch.device) -> Tensor:
    """BLOCK numbers in [0, 1), evenly spread over positions in each step and over steps at each position."""
    positions = torch.arange(BLOCK, device=device, dtype=torch.float64)
    return torch.frac(positions * GOLDEN + step.double() * STEP_RATIO).float()


def _to_blocks(value: Tensor) -> Tensor:
    """rows … → rows blocks BLOCK, padded with zeros"""
    rows = value.flatten(1)
    missing = -rows.shape[1] % BLOCK
    if missing:
        rows = F.pad(rows, (0, missing))
    return rows.unflatten(1, (-1, BLOCK))


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    rows = blocks.flatten(1)
    return rows[:, : math.prod(like.shape[1:])].reshape(like.shape)


def quantize(value: Tensor, dither: Tensor, levels: int, power: int) -> tuple[Tensor, Tensor]:
    """→ level numbers in `value`'s shape, and one scale per block"""
    blocks = _to_blocks(value)
    scale = blocks.abs().amax(-1)  # rows blocks
    ratio = (blocks.abs() / scale.clamp_min(1e-38)[..., None]).clamp_max(1)
    level = ratio ** (1 / power) * levels
    below = level.floor().clamp_max(levels - 1)
    # Probability of rounding up, such that the mean of the values (not of the levels) is exact.
    chance = (level**power - below**power) / ((below + 1) ** power - below**power)
    number = below + (dither < chance)
    if power == SECOND[1]:
        number = torch.where(ratio > 0, number.clamp_min(1), number)  # the update divides by it
    else:
        number = number * blocks.sign()
    return _from_blocks(number, value), scale


def dequantize(numbers: Tensor, scale: Tensor, levels: int, power: int) -> Tensor:
    blocks = _to_blocks(numbers).float() / levels
    values = blocks**power * blocks.sign() if power == FIRST[1] else blocks**power
    return _from_blocks(values * scale[..., None], numbers)
