"""The lines that `kineo doctor` and `kineo train --dry-run` print: the machine, and what each stage takes of it."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kineograph.core import distributed, kernels
from kineograph.core.distributed import World
from kineograph.core.memory import main_memory
from kineograph.core.notes import Note
from kineograph.core.units import format_count, format_size
from kineograph.data.open_source import BlankSource
from kineograph.doctor import machine
from kineograph.doctor.estimate import MAX_MEMORY_SHARE, Estimate, count_data_ranks, estimate_stage
from kineograph.doctor.sharded_memory import count_shards
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData, count_cores, count_workers, find_missing_weights
from kineograph.stage.spec import Plan
from kineograph.train.config import TrainConfig
from kineograph.train.phases import Cursor, is_finished, schedule_position, skip_removed_phases
from kineograph.train.precision import resolve_precision

_LABEL_WIDTH = 14
ROOMY = 0.25  # of the free memory: up to here nobody needs the settings that save memory

# The machine -----------------------------------------------------------------------------------------------------


def report_environment(out: Note) -> None:
    """Print versions, devices, free memory and packages."""
    from kineograph import __version__

    line = _make_line_writer(out)
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    line("kineograph", f"{__version__}, Python {platform.python_version()}, {system}")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    driver = machine.driver_version()
    line("torch", f"{torch.__version__}, {cuda}" + (f", driver {driver}" if driver else ""))
    total, available = main_memory()
    gflops = machine.measure_matmul_flops() / 1e9
    memory = f"{format_size(available)} of {format_size(total)} memory free"
    line("cpu", f"{count_cores()} cores, {memory}, {gflops:.0f} GFLOP/s in float32")
    for index, gpu in enumerate(machine.list_gpus()):
        line(f"cuda:{index}", f"{gpu.name}, {format_size(gpu.free)} of {format_size(gpu.memory)} free")
        reason = kernels.explain_missing(torch.device("cuda", index))
        if reason is not None:
            line(
                "", f"no FlashAttention 3, which speeds up long clips ({reason}): run kineo weights get {kernels.NAME}"
            )
    line("disk", f"{format_size(machine.free_disk(Path('runs')))} free for runs/")
    device = distributed.resolve_device()
    compiles = "on" if device.type == "cuda" else "off"
    precision = resolve_precision("auto", device)
    workers = count_workers(TrainConfig())
    line("auto picks", f"device {device}, precision {precision}, compile {compiles}, {workers} data workers")
    versions = {name: machine.installed_version(name) for name in machine.required_packages()}
    line("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    for name, version in versions.items():
        if version is None:
            line("missing", f"{name}: run pip install -e . to install all required packages")
    for name, purpose, remedy in machine.OPTIONAL:
        version = machine.installed_version(name)
        text = f"{name} {version}, for {purpose}" if version else f"{name} is not installed, for {purpose}: {remedy}"
        line("optional", text)


START = Cursor()

# A plan ----------------------------------------------------------------------------------------------------------


def report_plan(
    plan: Plan,
    data: dict[str, StageData],
    out: Note,
    world: World,
    memory: int | None = None,
    saved: Mapping[str, Cursor] | None = None,
) -> None:
    """Print what each stage of a plan takes, on this device or on a GPU of `memory` bytes. `saved`: where each stage of a run is."""
    builder = PlanBuilder(plan, data, out)
    seconds: list[float | None] = []
    for stage in plan.stages:
        if stage.name not in data:
            out(f"{stage.name}: skipped (stages.{stage.name}.skip=true)\n")
            continue
        cursor = skip_removed_phases(stage.train, (saved or {}).get(stage.name, START))
        if is_finished(stage.train, cursor):
            out(f"{stage.name}: finished at step {cursor.step:,}; it is not trained again\n")
            continue
        estimate = estimate_stage(builder, stage, data[stage.name], memory=memory, world=world)
        for line in describe_estimate(estimate, data[stage.name], cursor):
            out(line)
        out("")
        left = 1 - schedule_position(stage.train, cursor) / stage.train.steps
        seconds.append(None if estimate.seconds is None else estimate.seconds * left)
    known = [value for value in seconds if value is not None]
    if known and len(known) == len(seconds):
        where = "this machine" if world.processes == 1 else f"{world.processes} devices like this one"
        what = "what is left" if saved else "all stages"
        out(f"{plan.name}: about {format_time(sum(known))} for {what} on {where}, without validation and samples")


def describe_estimate(estimate: Estimate, data: StageData, cursor: Cursor = START) -> list[str]:
    """Describe one stage, in lines. `cursor`: where it is."""
    done = cursor.step
    lines: list[str] = []
    line = _make_line_writer(lines.append)
    stage, memory = estimate.stage, estimate.memory
    players = ", ".join(f"{name} {format_count(n)}" for name, n in estimate.trained.items())
    lines.append(
        f"{stage.name}: {estimate.task}, {format_count(sum(estimate.trained.values()))} parameters to train"
        + (f" ({players})" if len(estimate.trained) > 1 else "")
        + (f", {format_count(estimate.frozen)} frozen" if estimate.frozen else "")
        + (f"; continues from step {done:,}" if done else "")
    )
    missing = find_missing_weights(stage, data, hub=False)
    if missing is not None:
        line("MISSING", f"{missing}; estimated without them")
    items = len(data.source)
    size = "none found: the figures below assume some" if isinstance(data.source, BlankSource) else f"{items:,} items"
    line("data", f"{stage.spec.data.source}, {size if items < 2**32 else 'endless'}")
    shape = stage.spec.data.shape
    line(
        "clip" if shape.frames > 1 else "picture",
        (f"{shape.frames} frames of " if shape.frames > 1 else "")
        + f"{shape.height} × {shape.width}, {_plural(shape.channels, 'channel')}"
        + (f" → {estimate.encoded}" if estimate.encoded else "")
        + (f"; {estimate.tokens:,} in a sequence" if estimate.tokens else ""),
    )
    parts = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer, "EMA": memory.ema}
    parts |= {"text encoder": memory.text} if memory.text else {}
    parts |= {"gathered blocks": memory.gathered} if memory.gathered else {}
    listed = " · ".join(f"{name} {format_size(part)}" for name, part in parts.items())
    activations = f"{format_size(memory.activations)} (micro-batch {estimate.micro}, {estimate.target.precision})"
    kind = "measured" if estimate.measured else "estimated"
    line("memory", f"{listed} · activations {activations} = {format_size(memory.total)}, {kind}")
    for index, text in enumerate(_describe_processes(estimate)):
        line("" if index else "processes", text)
    if estimate.scaled_because:
        line("", f"activations are scaled up from a few samples: {estimate.scaled_because}")
    line("fits" if estimate.fits else "DOES NOT FIT", _describe_fit(estimate))
    is_roomy = memory.total <= ROOMY * estimate.target.free
    for index, (setting, smaller) in enumerate(() if is_roomy else estimate.savings.items()):
        fits = "" if estimate.fits else ", fits" if _fits(estimate, smaller.total) else ", does not fit yet"
        saved = f"{format_size(memory.total - smaller.total)} less, {format_size(smaller.total)} in all"
        line("" if index else "less memory", f"{setting}: {saved}{fits}")
    if estimate.combined is not None:
        settings, smaller = estimate.combined
        line("together", f"{' '.join(settings)}: {format_size(smaller.total)}, fits")
    batch_size = stage.train.batch_size
    line("arithmetic", f"{format_flops(estimate.flops)} per step of {_plural(batch_size, 'sample')}")
    _describe_speed(estimate, line, cursor)
    return lines


def _describe_processes(estimate: Estimate) -> list[str]:
    """How the planned processes share the stage, and what the estimate does not know."""
    train, world = estimate.stage.train, estimate.world
    if world.processes == 1:
        return []
    parallel, mesh = train.parallel, train.parallel.mesh_shape(*world)
    rows = f"{train.batch_size // count_data_ranks(train, world)} of a step's {train.batch_size} samples"
    lines = [f"{world.processes}, {rows} each; the memory is that of one process"]
    shards = count_shards(parallel, mesh)
    if shards > 1:
        lines.append(
            f"blocks are sharded over {shards} processes, all else is replicated; gathered blocks are computed"
        )
        if parallel.offload:
            lines.append("the shards lie in main memory and are not counted")
        lines.append(f"validation gathers all blocks: {format_size(estimate.all_blocks)} more, and fewer activations")
    if parallel.layout == "hybrid" and parallel.shard is None:
        lines.append(f"assuming {world.local} processes per machine: set train.parallel.shard to be sure")
    if mesh.tensor > 1:
        lines.append(f"the matrices of blocks are split over {mesh.tensor} processes")
    if parallel.model_ranks > 1:
        key = "tensor" if mesh.tensor > 1 else "sequence"
        lines.append(f"activations are estimated without train.parallel.{key}, which makes them smaller")
    return lines


def _fits(estimate: Estimate, size: float) -> bool:
    return size <= MAX_MEMORY_SHARE * estimate.target.free


def _describe_fit(estimate: Estimate) -> str:
    free = "on" if estimate.target.is_hypothetical else "free on"
    room = f"{format_size(estimate.memory.total)} of {format_size(estimate.target.free)} {free} {estimate.target}"
    largest = estimate.largest_batch()
    if estimate.fits:
        return f"{room}; micro-batches up to about {largest:,} would"
    fitting = [setting for setting, memory in estimate.savings.items() if _fits(estimate, memory.total)]
    if largest == 0:
        return f"{room}; " + (f"use {', or '.join(fitting)}" if fitting else _describe_last_resort(estimate))
    remedies = [f"train.accumulate={_fewest_micro_batches(estimate, largest)} (micro-batches of at most {largest})"]
    remedies += [setting for setting in fitting if not setting.startswith("train.accumulate")]
    remedies += [f"train.batch_size={min(largest, estimate.stage.train.batch_size)}"]
    return f"{room}; use {', or '.join(remedies)}"


def _describe_last_resort(estimate: Estimate) -> str:
    """The remedy if not even one sample fits and no setting alone is enough."""
    if estimate.combined is not None:
        return f"use {' with '.join(estimate.combined[0])}"
    state = estimate.memory.total - estimate.memory.activations
    room = MAX_MEMORY_SHARE * estimate.target.free
    checkpointed = estimate.savings.get("train.checkpointing=true")
    if checkpointed is not None and state + checkpointed.activations / estimate.micro <= room:
        rows = max(1, int((room - state) / (checkpointed.activations / estimate.micro)))
        return f"use train.checkpointing=true with train.accumulate={_fewest_micro_batches(estimate, rows)}"
    remedy = "make clips smaller (data.frames, data.size)" if state < room else "make the model smaller"
    sizes = f"weights, gradients, optimizer and EMA take {format_size(state)}, one sample {format_size(estimate.sample_bytes)}"
    return f"{sizes}: {remedy} or use a larger device"


def _fewest_micro_batches(estimate: Estimate, largest: int) -> int:
    """The smallest train.accumulate whose micro-batches have at most `largest` rows."""
    train = estimate.stage.train
    rows = train.batch_size // count_data_ranks(train, estimate.world)
    return next(k for k in range(1, rows + 1) if rows % k == 0 and rows // k <= largest)


def _describe_speed(estimate: Estimate, line: Callable[[str, str], None], cursor: Cursor) -> None:
    train, speed = estimate.stage.train, estimate.speed
    if speed is None or estimate.step_seconds is None or estimate.seconds is None:
        line("speed", f"not timed: {estimate.not_timed}")
        return
    how = f"{speed.steps} steps of {_plural(speed.samples, 'sample')} on {estimate.target.device}"
    if estimate.world.processes > 1:
        how += f", as one of {estimate.world.processes} processes that had nothing to exchange"
    if estimate.target.device.type == "cuda" and not speed.compiled and train.compile:
        how += ", without torch.compile, which makes training faster"
    rate = train.batch_size / estimate.step_seconds
    line("speed", f"{3600 / estimate.step_seconds:,.0f} steps an hour, {rate:,.0f} samples/s (timed: {how})")
    if estimate.step_seconds > 1.2 * speed.step_seconds:
        workers = count_workers(train, estimate.world.local)
        reason = "data workers are too slow" if workers else "computing waits for reading"
        more = min(count_cores(), 2 * workers + 1)
        milliseconds = 1000 * speed.read_seconds
        line("", f"{reason} ({milliseconds:.1f} ms a sample): raise train.workers from {workers} to {more}")
    if estimate.target.device.type == "cpu" and (load := os.getloadavg()[0] / count_cores()) > 0.5:
        line("", f"other processes slow this machine down ({load:.1f} per core over the last minute)")
    done = cursor.step
    if train.seconds is not None:
        left_seconds = train.seconds * (1 - cursor.share.now)
        steps = f"about {math.ceil(left_seconds / estimate.step_seconds):,} steps" + (" more" if done else "")
        line(
            "time",
            f"{format_time(left_seconds)} (train.minutes), enough for {steps} without compilation, validation and samples",
        )
        return
    left = train.steps - done
    steps = f"the last {left:,} of {train.steps:,} steps" if done else f"{train.steps:,} steps"
    time = format_time(estimate.seconds * left / train.steps)
    line("time", f"{time} for {steps}, without validation and samples")


# Formatting ------------------------------------------------------------------------------------------------------


def _make_line_writer(out: Note) -> Callable[[str, str], None]:
    return lambda label, text: out(f"  {label:<{_LABEL_WIDTH}}{text}")


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def format_flops(number: float) -> str:
    return f"{number / 1e12:,.3g} TFLOP" if number >= 1e12 else f"{number / 1e9:.3g} GFLOP"


def format_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
