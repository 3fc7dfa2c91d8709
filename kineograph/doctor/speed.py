"""A few real steps on the real device, where that takes seconds: how fast training will be."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kineograph.core.batch import Batch
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.data.loader import Loader
from kineograph.doctor.step_trace import fill_text_embeddings
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData
from kineograph.stage.spec import StagePlan
from kineograph.train.parallel import ParallelConfig
from kineograph.train.stepper import Stepper

PROBE_SECONDS = 2.0  # of timed steps a stage


@dataclass(frozen=True)
class Speed:
    step_seconds: float
    samples: int  # a probed step
    steps: int  # that were timed
    read_seconds: float  # to read one sample
    compiled: bool


def read_two_batches(data: StageData, rows: int) -> tuple[list[Batch], float]:
    """Two batches of training samples (of the largest bucket, where there are several), and the seconds that a sample of the second took."""
    loader = Loader(data.source, data.seed, data.stage.train.batch_size)
    shape, items = data.largest_bucket()
    places = [items[place % len(items)] for place in range(2 * rows)]
    reading = loader.ordered_batches(places, rows, shape)
    first = next(reading)  # opens files and fills caches
    started = time.perf_counter()
    second = next(reading)
    return [first, second], (time.perf_counter() - started) / rows


def time_steps(
    builder: PlanBuilder, stage: StagePlan, data: StageData, device: torch.device, samples: int, micro: int
) -> tuple[Speed, int | None]:
    """Steps of `samples` rows, told for micro-batches of `micro`; and the most bytes that a GPU held."""
    train = stage.train
    compiled = train.compile is True
    changes = {"batch_size": samples, "accumulate": 1, "compile": compiled, "parallel": ParallelConfig()}
    torch.manual_seed(0)
    enable_flash_attention_3(device)
    task = builder.build(stage.name, device)
    stepper = Stepper(task, train.model_copy(update=changes), stage.players, device)
    stepper.compile_stages()
    task.train()
    batches, read_seconds = read_two_batches(data, samples)
    given = [fill_text_embeddings(batch, task) for batch in batches]
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    first = max(0, train.steps - 8)
    stepper.step(first, [given[0]])  # allocates the optimizer's moments, warms caches up
    _wait(device)
    began, steps = time.perf_counter(), 0
    while steps < 1 or (steps < 50 and time.perf_counter() - began < PROBE_SECONDS):
        stepper.step(first + steps % 8, [given[steps % 2]])
        steps += 1
        if steps % 4 == 0:
            _wait(device)
    _wait(device)
    taken = (time.perf_counter() - began) / steps
    # One micro-batch after the other; the update itself is small beside them.
    speed = Speed(taken * micro / samples * train.accumulate, samples, steps, read_seconds, compiled)
    return speed, torch.cuda.max_memory_allocated(device) if on_gpu else None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
