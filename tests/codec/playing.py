"""What the tests of codecs share: players stepped as the Trainer steps them."""

from __future__ import annotations

import pytest
import torch

from kineograph.core import distributed
from kineograph.core.batch import Batch
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Task


def noise_for(batch: Batch, step: int = 0) -> Noise:
    return Noise(0, step, batch.slots)


def parameters_of_all(task: Task, player: str):
    return [p for module in task.trainable(player) for p in module.parameters()]


def run_player(task: Task, player: str, shared) -> Loss:
    """A player's backward as the trainer runs it: the other player's parameters are asleep."""
    for name in task.players:
        for p in parameters_of_all(task, name):
            p.requires_grad_(name == player)
    loss = task.loss(player, shared)
    loss.total.sum.backward(retain_graph=True)
    for name in task.players:
        for p in parameters_of_all(task, name):
            p.requires_grad_(True)
    return loss


def gradients(task: Task, player: str) -> float:
    return sum(float(p.grad.abs().sum()) for p in parameters_of_all(task, player) if p.grad is not None)


def train(task: Task, batch: Batch, steps: int, lr: float = 3e-3) -> None:
    optimizers = {name: torch.optim.Adam(parameters_of_all(task, name), lr) for name in task.players}
    for step in range(steps):
        playing = [name for name in task.players if task.is_active(name, step)]
        torch.manual_seed(step)
        shared = task(batch, noise_for(batch, step))
        for name in reversed(playing):
            optimizers[name].zero_grad()
            run_player(task, name, shared)
        for name in playing:
            optimizers[name].step()


@torch.no_grad()
def validate_in_shares(task: Task, shares: list[Batch], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The means of a validation batch whose shares several processes have. They run one after the other: first to give what
    the reductions add up, then to take the sums."""
    given: list[list[torch.Tensor]] = []

    def record(value: torch.Tensor) -> torch.Tensor:
        given[-1].append(value)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "all_reduce_", record)
        for share in shares:
            given.append([])
            task.validate(share, noise_for(share))
        sums = iter([sum(values) for values in zip(*given, strict=True)] * len(shares))
        patch.setattr(distributed, "all_reduce_", lambda value: next(sums))
        parts = [task.validate(share, noise_for(share)) for share in shares]
    counted = [part for part, share in zip(parts, shares, strict=True) if not share.spare]
    return {
        name: float(sum(part[name].sum for part in counted) / sum(part[name].count for part in counted))
        for name in parts[0]
    }
