"""The peers' side of a case: an optimizer step as in their trainers, and replacements for downloaded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from benchmarks.case import Workload
from benchmarks.measure import count_flops


def make_optimizer_step(
    parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], device: torch.device, precision: str
) -> Callable[[], None]:
    """Forward, backward, clip at 1, AdamW; bf16 means autocast. Gradients left by other calls are cleared first."""
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


def build_gan_training(
    players: dict[str, tuple[list[nn.Parameter], Callable[[], Tensor]]],
    samples: int,
    device: torch.device,
    precision: str,
) -> Workload:
    """One optimizer step of each player of a GAN per call, each on its own loss."""
    steps = [make_optimizer_step(parameters, loss, device, precision) for parameters, loss in players.values()]

    def step() -> None:
        for player_step in steps:
            player_step()

    parts = {name: count_parameters(parameters) for name, (parameters, _) in players.items()}
    return Workload(
        step,
        samples=samples,
        parameters=sum(parts.values()),
        flops=count_flops(step),
        notes=[f"{name}: {number / 1e6:.2f} M parameters" for name, number in parts.items()],
    )


def autocast(device: torch.device, precision: str) -> torch.autocast | nullcontext[None]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def build_random_vgg16() -> nn.Module:
    """VGG-16 with random weights: costs the same time as the weights that the peers download."""
    import torchvision

    return torchvision.models.vgg16(weights=None)


def get_trainable_parameters(module: nn.Module, exclude: tuple[str, ...] = ()) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if p.requires_grad and not name.startswith(exclude)]


def count_parameters(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
