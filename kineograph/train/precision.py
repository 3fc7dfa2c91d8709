"""The dtype of the forward pass: `train.precision`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kineograph.core.errors import ConfigError


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` → bf16 on GPUs that have it, fp32 elsewhere: CPUs run bf16 many times slower."""
    if precision == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if precision == "fp16" and device.type != "cuda":
        raise ConfigError(f"train.precision=fp16 needs a GPU, and this is {device.type}: use fp32 or auto")
    return precision


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)
