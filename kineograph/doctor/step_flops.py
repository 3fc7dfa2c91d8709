"""Count the FLOPs of a training step once, for `time/tflops` and `time/mfu`."""

from __future__ import annotations

import torch

from kineograph.core import distributed
from kineograph.core.notes import Note, discard
from kineograph.core.protocols import Source
from kineograph.core.task import Task
from kineograph.data.loader import Loader
from kineograph.doctor.machine import peak_flops
from kineograph.doctor.step_trace import READ, trace_step
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan, StagePlan
from kineograph.train.parallel import ParallelConfig
from kineograph.train.precision import resolve_precision
from kineograph.train.step_timer import StepFlops


def count_step_flops(
    plan: Plan, stage: StagePlan, task: Task, data: StageData, source: Source, device: torch.device, note: Note
) -> StepFlops | None:
    """Count the FLOPs of a step on samples of `source`: the data, or their cache, for which no frozen encoder runs.

    None if they are not logged (a CPU without `train.peak_tflops`, other ranks) or differ from step to step (buckets).
    """
    train = stage.train
    if not distributed.is_first() or (device.type != "cuda" and train.peak_tflops is None) or data.buckets is not None:
        return None
    precision = resolve_precision(train.precision, device)
    known = train.peak_tflops
    peak = known * 1e12 if known is not None else peak_flops(torch.cuda.get_device_name(device), precision)
    rows = train.micro_batch_size
    # MFU counts useful work: without recomputation, and the same for any number of processes.
    plain = train.model_copy(update={"checkpointing": False, "parallel": ParallelConfig()})
    try:
        # Training must draw the same random numbers with and without this.
        with torch.random.fork_rng(devices=[]), distributed.single_process():
            loader = Loader(source, data.seed, train.batch_size)
            items = [index % len(source) for index in range(min(READ, rows))]
            sample = next(loader.ordered_batches(items, len(items)))
            builder = PlanBuilder(plan, {stage.name: data}, discard, {stage.name: task.assets()})
            trace = trace_step(builder, stage, plain, precision, sample, rows)
    except Exception as error:  # a Task that reads tensor values, which fake tensors do not have
        note(
            f"{stage.name}: the FLOPs of a step could not be counted ({type(error).__name__}), so there is no time/mfu"
        )
        return None
    return StepFlops(trace.flops * train.accumulate, peak)
