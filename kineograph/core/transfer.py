"""From the host to the device, without waiting for what the device is still doing; and back, waiting once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Numbers that were made on the host. Out of pinned memory the copy is queued behind the work that is under way; out of other memory it is
    waited for, and with it everything before it."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def fetch_floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Named 0-d tensors as numbers of the host, in one transfer."""
    return dict(zip(values, torch.stack([value.to(torch.float32) for value in values.values()]).tolist(), strict=True))
