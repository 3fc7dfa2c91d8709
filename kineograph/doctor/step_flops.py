"""The arithmetic of a stage's step, counted once before it trains, for `time/tflops` and `time/mfu`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kineograph.core import distributed
from kineograph.core.task import Task
from kineograph.doctor.machine import peak_flops
from kineograph.doctor.speed import read_two_batches
from kineograph.doctor.step_trace import READ, trace_step
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan, StagePlan
from kineograph.train.parallel import ParallelConfig
from kineograph.train.precision import resolve_precision
from kineograph.train.step_timer import StepFlops


def count_step_flops(
    plan: Plan, stage: StagePlan, task: Task, data: StageData, device: torch.device, note: Callable[[str], None]
) -> StepFlops | None:
    """None where nobody asks: on a CPU without `train.peak_tflops`, and in all processes but the first, which logs; and where steps differ,
    with buckets."""
    train = stage.train
    if not distributed.is_first() or (device.type != "cuda" and train.peak_tflops is None) or data.buckets is not None:
        return None
    precision = resolve_precision(train.precision, device)
    if train.peak_tflops is not None:
        peak: float | None = train.peak_tflops * 1e12
    else:
        peak = peak_flops(torch.cuda.get_device_name(device), precision)
    rows = max(1, train.batch_size // train.accumulate)
    # What is computed twice is no use; and however many processes share the work, it is the same.
    plain = train.model_copy(update={"checkpointing": False, "parallel": ParallelConfig()})
    try:
        with (
            torch.random.fork_rng(devices=[]),
            distributed.single_process(),
        ):  # the numbers that training draws must not depend on this
            (sample, _), _ = read_two_batches(data, min(READ, rows))
            builder = PlanBuilder(plan, {stage.name: data}, lambda line: None, {stage.name: task.assets()})
            found = trace_step(builder, stage, plain, precision, sample, rows)
    except Exception as error:  # a Task that looks at numbers, which these tensors do not have
        note(
            f"{stage.name}: the arithmetic of a step was not counted ({type(error).__name__}), so there is no time/mfu"
        )
        return None
    return StepFlops(found.flops * train.accumulate, peak)
