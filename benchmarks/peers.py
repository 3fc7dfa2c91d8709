"""What the peers' sides share: an optimizer step as their own trainers make it, and stand-ins for what they would download."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn


def optimizer_step(
    parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], device: torch.device, precision: str
) -> Callable[[], None]:
    """Forward, backward, clip at 1, AdamW; bf16 means autocast. Stray gradients of earlier calls are dropped first."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with autocast(device, precision):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def autocast(device: torch.device, precision: str) -> torch.autocast | nullcontext[None]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def random_vgg16() -> nn.Module:
    """Where the peers download VGG-16: the same layers with random weights, which cost the same time."""
    import torchvision

    return torchvision.models.vgg16(weights=None)


def trainable(module: nn.Module, without: tuple[str, ...] = ()) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if p.requires_grad and not name.startswith(without)]


def size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
