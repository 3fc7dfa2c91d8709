"""What the peers' sides share: an optimizer step as their own trainers make it, and stand-ins for what they would download."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from benchmarks.case import Work
from benchmarks.measure import count_flops


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


def game_step(
    players: dict[str, tuple[list[nn.Parameter], Callable[[], Tensor]]],
    samples: int,
    device: torch.device,
    precision: str,
) -> Work:
    """A step of each player of a GAN, one after the other, each with the loss that it descends."""
    steps = [optimizer_step(parameters, loss, device, precision) for parameters, loss in players.values()]

    def step() -> None:
        for take in steps:
            take()

    parts = {name: size(parameters) for name, (parameters, _) in players.items()}
    return Work(
        step,
        samples=samples,
        parameters=sum(parts.values()),
        flops=count_flops(step),
        notes=[f"{name}: {number / 1e6:.2f} M parameters" for name, number in parts.items()],
    )


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
