"""What our sides share: a Task stepped as the Trainer steps it, precision, compilation, optimizer and averages included."""

from __future__ import annotations

import gc
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Work
from benchmarks.measure import count_flops
from benchmarks.peers import size
from kineograph.core.batch import Batch, Prompts
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.task import Task, freeze, player_parameters
from kineograph.sample.inference import draw, sampling_noise
from kineograph.train.compile import compile_task
from kineograph.train.config import TrainConfig
from kineograph.train.precision import resolve_precision
from kineograph.train.stepper import Stepper


def training(task: Task, batch: Batch, device: torch.device, **settings: Any) -> Work:
    """One optimizer step of every player a call, on a batch that lies where the loader leaves it."""
    enable_flash_attention_3(device)
    config = TrainConfig(batch_size=len(batch), **settings)
    if device.type == "cuda":
        batch = batch.pin_memory()
    # Operations are counted on an eager step that computes nothing twice: compiled kernels hide them.
    eager = config.model_copy(update={"compile": False, "checkpointing": False})
    flops = count_flops(lambda: Stepper(task.train(), eager, device=device).step(0, [batch]))
    gc.collect()  # the moments of that step are not ours
    stepper = Stepper(task, config, device=device)
    stepper.compile_stages()
    steps = count()
    sizes = {player: sum(p.numel() for p in player_parameters(task, player).values()) for player in task.players}
    notes = [f"{player}: {size / 1e6:.2f} M parameters" for player, size in sizes.items()] if len(sizes) > 1 else []
    return Work(
        lambda: stepper.step(next(steps), [batch]),
        samples=len(batch),
        parameters=sum(sizes.values()),
        flops=flops,
        precision=stepper.precision,
        notes=notes,
    )


def sampling(task: Task, texts: Batch, options: Any, device: torch.device) -> Work:
    """A call of `kineo sample`, for given embeddings, with the stages loaded and, on a GPU, compiled."""
    enable_flash_attention_3(device)
    parts = [task, *task.stages.values()]
    for part in parts:
        freeze(part.to(device))
    seeds = count()

    def call() -> Tensor:
        noise = sampling_noise(next(seeds), torch.arange(len(texts)))
        return draw(task, Prompts(noise, batch=texts), options, device, len(texts))

    flops = count_flops(call)
    if device.type == "cuda":
        for part in parts:
            compile_task(part, graphs=True)
    parameters = sum(size(part.parameters()) for part in parts)
    return Work(
        call, samples=len(texts), parameters=parameters, flops=flops, precision=resolve_precision("auto", device)
    )
