"""Time a few real training steps on the real device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kineograph.core.batch import Batch
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.data.decoded_cache import keep_if_small
from kineograph.data.loader import Loader
from kineograph.doctor.machine import release_memory
from kineograph.doctor.step_trace import fill_text_embeddings
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData, count_workers
from kineograph.stage.spec import StagePlan
from kineograph.train.parallel import ParallelConfig
from kineograph.train.stepper import Stepper

PROBE_SECONDS = 2.0  # of timed steps per stage


@dataclass(frozen=True)
class Speed:
    step_seconds: float
    samples: int  # in a timed step
    steps: int  # that were timed
    read_seconds: float  # to read one sample
    compiled: bool


def read_two_batches(data: StageData, rows: int) -> tuple[list[Batch], float]:
    """Read two batches of training samples, of the largest bucket. → the batches, and the seconds per sample of the second.

    Where training keeps the items decoded in memory, the second batch has the items of the first: files are read in the first epoch only.
    """
    loader = Loader(data.source, data.seed, data.stage.train.batch_size)
    shape, items = data.largest_bucket()
    train = data.stage.train
    kept = train.keep_decoded and keep_if_small(data.source, max(count_workers(train, 1), 1))
    different = rows if kept else 2 * rows
    batches = loader.ordered_batches([items[index % different % len(items)] for index in range(2 * rows)], rows, shape)
    first = next(batches)  # opens files and fills caches
    started = time.perf_counter()
    second = next(batches)
    return [first, second], (time.perf_counter() - started) / rows


def time_steps(
    builder: PlanBuilder, stage: StagePlan, data: StageData, device: torch.device, samples: int, micro: int
) -> tuple[Speed, int | None]:
    """Time steps of `samples` rows, scaled to micro-batches of `micro`. → the speed, and the peak memory of a GPU in bytes."""
    train = stage.train
    compiled = train.compile is True
    changes = {"batch_size": samples, "accumulate": 1, "compile": compiled, "parallel": ParallelConfig()}
    torch.manual_seed(0)
    release_memory()  # of the stages that were timed before
    enable_flash_attention_3(device)
    task = builder.build(stage.name, device)
    stepper = Stepper(task, train.model_copy(update=changes), stage.players, device)
    stepper.compile_stages()
    task.train()
    batches, read_seconds = read_two_batches(data, samples)
    batches = [fill_text_embeddings(batch, task) for batch in batches]
    stepper.timer.begin()
    first = max(0, train.steps - 8)
    stepper.step(first, [batches[0]])  # allocates the optimizer's moments and warms caches up
    stepper.timer.wait_for_device()
    started, steps = time.perf_counter(), 0
    while steps < 1 or (steps < 50 and time.perf_counter() - started < PROBE_SECONDS):
        stepper.step(first + steps % 8, [batches[steps % 2]])
        steps += 1
        if steps % 4 == 0:
            stepper.timer.wait_for_device()
    stepper.timer.wait_for_device()
    seconds = (time.perf_counter() - started) / steps
    # Micro-batches run one after another; the update itself is cheap.
    speed = Speed(seconds * micro / samples * train.accumulate, samples, steps, read_seconds, compiled)
    return speed, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
