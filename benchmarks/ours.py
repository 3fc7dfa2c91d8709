"""Our side of a case: a Task stepped as in training (precision, compilation, optimizer, EMA), or sampled as by `kineo sample`."""

from __future__ import annotations

import gc
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Workload
from benchmarks.measure import count_flops
from benchmarks.peers import count_parameters
from kineograph.core.batch import Batch, Prompts
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.task import Task, freeze, player_parameters
from kineograph.sample.inference import draw, sampling_noise
from kineograph.train.compile import compile_task
from kineograph.train.config import TrainConfig
from kineograph.train.precision import resolve_precision
from kineograph.train.stepper import Stepper


def build_training(task: Task, batch: Batch, device: torch.device, **settings: Any) -> Workload:
    """One optimizer step of every player per call, on a batch in pinned CPU memory, where the loader leaves it."""
    enable_flash_attention_3(device)
    config = TrainConfig(batch_size=len(batch), **settings)
    if device.type == "cuda":
        batch = batch.pin_memory()
    # Compiled kernels hide their operations, and checkpointing repeats some: count an eager step.
    eager = config.model_copy(update={"compile": False, "checkpointing": False})
    flops = count_flops(lambda: Stepper(task.train(), eager, device=device).step(0, [batch]))
    gc.collect()  # free the moments of that step
    stepper = Stepper(task, config, device=device)
    stepper.compile_stages()
    steps = count()
    sizes = {player: sum(p.numel() for p in player_parameters(task, player).values()) for player in task.players}
    notes = [f"{player}: {number / 1e6:.2f} M parameters" for player, number in sizes.items()] if len(sizes) > 1 else []
    return Workload(
        lambda: stepper.step(next(steps), [batch]),
        samples=len(batch),
        parameters=sum(sizes.values()),
        flops=flops,
        precision=stepper.precision,
        notes=notes,
    )


def build_sampling(task: Task, texts: Batch, options: Any, device: torch.device) -> Workload:
    """One call of `kineo sample` on embeddings, with the stages loaded and, on a GPU, compiled."""
    enable_flash_attention_3(device)
    parts = [task, *task.stages.values()]
    for part in parts:
        freeze(part.to(device))
    seeds = count()

    def call() -> Tensor:
        noise = sampling_noise(next(seeds), torch.arange(len(texts)))
        return draw(task, Prompts(noise, batch=texts), options, device, len(texts)).pixels

    flops = count_flops(call)
    if device.type == "cuda":
        for part in parts:
            compile_task(part, graphs=True)
    parameters = sum(count_parameters(part.parameters()) for part in parts)
    return Workload(
        call, samples=len(texts), parameters=parameters, flops=flops, precision=resolve_precision("auto", device)
    )
