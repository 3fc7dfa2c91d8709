"""What our sides share: a Task stepped as the Trainer steps it, precision, compilation, optimizer and averages included."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from benchmarks.case import Work
from benchmarks.measure import count_flops
from kineograph.core.batch import Batch
from kineograph.core.task import Task, parameters_of
from kineograph.train.config import TrainConfig
from kineograph.train.stepper import Stepper


def training(task: Task, batch: Batch, device: torch.device, **settings: Any) -> Work:
    """One optimizer step of every player a call, on a batch that lies where the loader leaves it."""
    config = TrainConfig(batch_size=len(batch), **settings)
    if device.type == "cuda":
        batch = batch.pin_memory()
    # Operations are counted on an eager step: compiled kernels hide them.
    eager = config.model_copy(update={"compile": False})
    flops = count_flops(lambda: Stepper(task.train(), eager, device=device).step(0, [batch]))
    stepper = Stepper(task, config, device=device)
    steps = count()
    sizes = {player: sum(p.numel() for p in parameters_of(task, player).values()) for player in task.players}
    notes = [f"{player}: {size / 1e6:.2f} M parameters" for player, size in sizes.items()] if len(sizes) > 1 else []
    return Work(
        lambda: stepper.step(next(steps), [batch]),
        samples=len(batch),
        parameters=sum(sizes.values()),
        flops=flops,
        precision=stepper.precision,
        notes=notes,
    )
