"""Copies between host and device that do not stall the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device from pinned memory: other memory would wait for all work that is queued before it."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def fetch_floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Named 0-d tensors as floats, in one transfer."""
    return dict(zip(values, torch.stack([value.to(torch.float32) for value in values.values()]).tolist(), strict=True))
