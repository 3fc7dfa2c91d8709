"""The dtype of the forward pass (`train.precision`), and what 16-bit weights lose."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kineograph.core.errors import ConfigError
from kineograph.core.task import Task
from kineograph.train.config import PlayerConfig, TrainConfig

# Beyond so many micro-batches, a sum of gradients in bf16 may lose more than a hundredth.
MAX_BF16_SUM = 64


def warn_of_bf16_weights(task: Task, config: TrainConfig, players: Mapping[str, PlayerConfig]) -> list[str]:
    """Warnings, each with a remedy, if trained bf16 weights lose updates or gradients to rounding."""
    if not any(p.requires_grad and p.dtype == torch.bfloat16 for p in task.parameters()):
        return []
    lines = []
    if any(player.optimizer == "adamw" for player in players.values()):
        lines.append(
            "trains 16-bit weights with optimizer=adamw, which rounds small updates away: set train.optimizer=adamw_8bit (or adamw_split)"
        )
    if config.accumulate > MAX_BF16_SUM:
        lines.append(
            f"sums the bf16 gradients of train.accumulate={config.accumulate} micro-batches in bf16, which is exact to 1 % up to {MAX_BF16_SUM}: "
            "lower train.accumulate, or keep the weights in fp32"
        )
    return lines


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` → bf16 on GPUs that have it, fp32 elsewhere: CPUs, and GPUs before Ampere, which emulate it, run it many times slower."""
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16" if has_bf16 else "fp32"
    if precision == "fp16" and device.type != "cuda":
        raise ConfigError(f"train.precision=fp16 needs a GPU, and this is {device.type}: use fp32 or auto")
    return precision


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)
