"""Estimate what a stage's training takes: parameters, memory, FLOPs and time; and which settings would take less memory.

Memory and FLOPs come from step_trace.py, the speed from speed.py. A GPU that is not here is described by its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from kineograph.core import distributed
from kineograph.core.capabilities import HasMemorySavers, SupportsCaching
from kineograph.core.config import merge, nest, parse
from kineograph.core.distributed import World
from kineograph.core.errors import InputError, KineoError
from kineograph.core.task import Codec, Task, find_codec, player_parameters
from kineograph.doctor.machine import free_memory, measure_matmul_flops
from kineograph.doctor.sharded_memory import Division, count_shards
from kineograph.doctor.speed import PROBE_SECONDS, Speed, read_two_batches, time_steps
from kineograph.doctor.step_trace import ONE, READ, Memory, StepTrace, tensors_of, trace_step
from kineograph.stage.build import PlanBuilder, fake_tensors
from kineograph.stage.data import StageData, count_workers
from kineograph.stage.spec import StagePlan
from kineograph.train.config import TrainConfig
from kineograph.train.parallel import ParallelConfig
from kineograph.train.precision import resolve_precision

SLOWEST_PROBE = 3.0  # expected seconds per sample on a CPU beyond which no step is timed
EFFICIENCY = 0.3  # expected share of a matrix product's FLOP/s, to decide how many steps to time
MAX_MEMORY_SHARE = 0.9  # of the free memory


@dataclass(frozen=True)
class Target:
    """The device that a run must fit on."""

    device: torch.device
    free: int  # bytes
    precision: str
    is_hypothetical: bool = False  # a GPU of that memory which is not here

    @staticmethod
    def of(train: TrainConfig, memory: int | None = None, world: World = ONE) -> Target:
        """The device of each process, or a GPU of `memory` bytes. Processes on a CPU share the machine's memory."""
        if memory is None:
            device = distributed.resolve_device(train.device)
            free = free_memory(device) // (world.local if device.type == "cpu" else 1)
            return Target(device, free, resolve_precision(train.precision, device))
        return Target(torch.device("cuda"), memory, "bf16" if train.precision == "auto" else train.precision, True)

    def __str__(self) -> str:
        return "a GPU of that size" if self.is_hypothetical else str(self.device)


@dataclass(frozen=True)
class Estimate:
    """The memory, arithmetic and time of one stage. `speed` is None if no step was timed; `not_timed` says why."""

    stage: StagePlan
    task: str
    target: Target
    trained: dict[str, int]  # parameters by player
    frozen: int
    tokens: int | None
    encoded: str | None  # the shape of a clip's tokens or latents
    memory: Memory
    scaled_because: str | None  # why memory was measured on a few samples and scaled up
    flops: float  # of a whole step
    micro: int  # rows of a micro-batch, of the largest bucket
    speed: Speed | None = None
    not_timed: str | None = None
    measured: bool = False  # memory was measured on the device
    sample_bytes: float = 0.0  # activations per additional sample
    savings: dict[str, Memory] = field(default_factory=dict)  # setting → memory with it, smallest first
    combined: tuple[tuple[str, ...], Memory] | None = None  # settings that fit together, if none does alone
    combinations: tuple[tuple[tuple[str, ...], Memory], ...] = ()  # more and more settings together, if asked for
    world: World = ONE  # the planned processes; memory is that of one of them
    all_blocks: int = 0  # additional bytes during validation, when sharded blocks are gathered

    @property
    def fits(self) -> bool:
        return self.memory.total <= MAX_MEMORY_SHARE * self.target.free

    def largest_batch(self) -> int:
        """About the largest micro-batch that fits."""
        left = MAX_MEMORY_SHARE * self.target.free - self.memory.total
        return max(0, self.micro + math.floor(left / max(1.0, self.sample_bytes)))

    @property
    def step_seconds(self) -> float | None:
        """Workers read while the device computes; without workers one waits for the other."""
        if self.speed is None:
            return None
        train = self.stage.train
        reading = self.speed.read_seconds * train.batch_size / count_data_ranks(train, self.world)
        workers = count_workers(train, self.world.local)
        return max(self.speed.step_seconds, reading / workers) if workers else self.speed.step_seconds + reading

    @property
    def seconds(self) -> float | None:
        if self.stage.train.seconds is not None:
            return self.stage.train.seconds
        return None if self.step_seconds is None else self.step_seconds * self.stage.train.steps


def micro_batch(train: TrainConfig, data: StageData | None = None, world: World = ONE) -> int:
    """Rows of one process's micro-batch, of the largest bucket."""
    rows = train.batch_size
    if data is not None and data.buckets is not None:
        shape, _ = data.largest_bucket()
        rows = next(
            n for other, n in zip(data.buckets.shapes, data.buckets.batch_sizes(rows), strict=True) if other == shape
        )
    return max(1, rows // (train.accumulate * count_data_ranks(train, world)))


def count_data_ranks(train: TrainConfig, world: World) -> int:
    """Processes that read different data."""
    return train.parallel.data_rank_of(0, world.processes)[1]


def estimate_stage(
    builder: PlanBuilder,
    stage: StagePlan,
    data: StageData,
    timed: bool = True,
    memory: int | None = None,
    world: World = ONE,
    combine_all: bool = False,
) -> Estimate:
    """Estimate one stage of the builder's plan, for this device or a GPU of `memory` bytes, as one process of `world`.

    `combine_all` fills `combinations`, from which a fit for any size of memory can be read.
    """
    train, target = stage.train, Target.of(stage.train, memory, world)
    micro = micro_batch(train, data, world)
    (sample, _), _ = read_two_batches(data, READ)
    real_device: torch.device | None = None
    scaled_because = None

    def trace_with(changes: dict[str, Any] | None = None, rows: int = micro) -> StepTrace:
        """Trace a step with other values of `train.*`, or of the stage's own keys."""
        changes = changes or {}
        own = {key: value for key, value in changes.items() if not key.startswith("train.")}
        over = {key.removeprefix("train."): value for key, value in changes.items() if key.startswith("train.")}
        precision = over.get("precision", target.precision)
        config = _change_config(stage.spec.config, own) if own else None
        width = 4 if target.device.type == "cpu" and precision == "fp32" else 2  # text encoders are bf16 on GPUs
        changed = train.model_copy(update=over)
        return trace_step(builder, stage, changed, precision, sample, rows, real_device, config, world, width)

    try:
        trace = trace_with()
    except KineoError:
        raise
    except Exception as error:  # a Task may read tensor values (`if loss > 1`), which fake tensors do not have
        _check_room_for_real(builder, stage, target, error)
        real_device = torch.device("cpu") if target.is_hypothetical else target.device
        scaled_because = f"it needs real numbers ({type(error).__name__})"
        trace = trace_with()
    task, activations = trace.task, trace.memory.activations
    # Part of a step's memory does not grow with the batch, such as a new gradient: two sizes tell it apart.
    half = trace_with(rows=micro // 2) if micro > 1 else None
    slope = (activations - half.memory.activations) / (micro - micro // 2) if half else activations
    trained = {player: sum(p.numel() for p in player_parameters(task, player).values()) for player in task.players}
    result = Estimate(
        stage=stage,
        task=type(task).__name__,
        target=target,
        trained=trained,
        frozen=sum(t.numel() for t in tensors_of(task) if isinstance(t, nn.Parameter)) - sum(trained.values()),
        tokens=task.tokens_per_clip(),
        encoded=_describe_encoded(task, stage),
        memory=trace.memory,
        scaled_because=scaled_because,
        flops=trace.flops * train.accumulate * count_data_ranks(train, world),
        micro=micro,
        sample_bytes=slope,
        world=world,
        all_blocks=trace.all_blocks,
    )
    savings = {f"train.accumulate={2 * train.accumulate}": half.memory} if half and micro % 2 == 0 else {}
    settings = _memory_settings(trace, stage, target, world)
    for setting, changes in settings.items():
        savings[setting] = _remove_part(trace.memory, setting) or trace_with(changes).memory
    if timed:
        result = _add_speed(result, builder, data, trace.flops)
    if result.not_timed and target.device.type == "cpu" and target.precision == "fp32":
        savings["a GPU, in bf16"] = trace_with({"train.precision": "bf16"}).memory
    less = {setting: memory for setting, memory in savings.items() if memory.total < trace.memory.total}
    result = replace(result, savings=dict(sorted(less.items(), key=lambda pair: pair[1].total)))
    if combine_all:
        result = replace(result, combinations=tuple(_iterate_combinations(result, settings, trace_with)))
    return replace(result, combined=_combine_settings(result, settings, trace_with))


def _check_room_for_real(builder: PlanBuilder, stage: StagePlan, target: Target, error: Exception) -> None:
    """Refuse to build a task of real tensors unless it surely fits: an estimate must not exhaust the machine."""
    try:
        with fake_tensors():
            size = Division().bytes_of(tensors_of(builder.build(stage.name, torch.device("cpu"))))
    except Exception:  # it cannot even be built, so its size is unknown
        size = None
    free = free_memory(torch.device("cpu") if target.is_hypothetical else target.device)
    if (size is None and target.is_hypothetical) or (size is not None and 8 * size > free):
        raise InputError(
            f"stage {stage.name} cannot be traced on fake tensors ({type(error).__name__}: {str(error)[:200]}), "
            "and is too large to be run here"
        ) from error


def _change_config(config: Any, changes: dict[str, Any]) -> Any:
    tree = config.model_dump(exclude_unset=True)
    for key, value in changes.items():
        tree = merge(tree, nest(key, value))
    return parse(type(config), tree)


def _describe_encoded(task: Task, stage: StagePlan) -> str | None:
    """The shape of a clip's tokens or latents."""
    codec = task if isinstance(task, Codec) else find_codec(task)
    if codec is None:
        return None
    shape = stage.spec.data.shape
    sides = " × ".join(map(str, codec.shape_for(shape.frames, shape.height, shape.width)))
    return f"{sides} tokens of {codec.vocabulary:,} codes" if codec.vocabulary else f"{sides} latents"


# Settings --------------------------------------------------------------------------------------------------------

_CACHED = "kineo cache beforehand"
_NO_AVERAGE = "train.ema.decay=0"
_LOW_MEMORY = "train.optimizer=adamw_8bit"
_CHECKPOINTING = (False, "light", "selective", True)  # values of train.checkpointing, from most memory to least


def _memory_settings(trace: StepTrace, stage: StagePlan, target: Target, world: World) -> dict[str, dict[str, Any]]:
    """Settings that may take less memory, as typed → the keys that they change."""
    train = stage.train
    settings: dict[str, dict[str, Any]] = {}
    if trace.task.blocks():
        for value in _CHECKPOINTING[_CHECKPOINTING.index(train.checkpointing) + 1 :]:
            settings[f"train.checkpointing={str(value).lower()}"] = {"train.checkpointing": value}
    if target.device.type == "cuda" and target.precision == "fp32":
        settings["train.precision=bf16"] = {"train.precision": "bf16"}
    if (
        world.processes > 1
        and train.parallel == ParallelConfig()
        and len(trace.task.players) == 1
        and trace.task.blocks()
    ):
        settings["train.parallel=shard"] = {"train.parallel": ParallelConfig(layout="shard")}
    savers = stage.spec.task.memory_savers(stage.spec.config) if issubclass(stage.spec.task, HasMemorySavers) else {}
    for key, value in savers.items():
        settings[f"stages.{stage.name}.{key}={value}"] = {key: value}
    if trace.memory.ema:
        settings[_NO_AVERAGE] = {}
    settings[_LOW_MEMORY] = {}
    if (
        trace.memory.text
        and issubclass(stage.spec.task, SupportsCaching)
        and stage.spec.task.can_cache(stage.spec.config)
    ):
        settings[_CACHED] = {}
    return settings


def _remove_part(memory: Memory, setting: str) -> Memory | None:
    """The memory with a setting that removes one part of it, which needs no trace; None for other settings."""
    if setting == _NO_AVERAGE:
        return replace(memory, ema=0)
    if setting == _LOW_MEMORY:
        return replace(memory, optimizer=memory.low_memory_optimizer)
    return replace(memory, text=0) if setting == _CACHED else None


def _combine_settings(
    estimate: Estimate, settings: dict[str, dict[str, Any]], trace_with: Callable[..., StepTrace]
) -> tuple[tuple[str, ...], Memory] | None:
    """If no setting fits alone, add them up, largest saving first, until the stage fits; if need be with micro-batches of one."""
    room = MAX_MEMORY_SHARE * estimate.target.free
    if estimate.fits or any(memory.total <= room for memory in estimate.savings.values()):
        return None
    together = estimate.combinations or _iterate_combinations(estimate, settings, trace_with)
    return next(((chosen, memory) for chosen, memory in together if memory.total <= room), None)


def _iterate_combinations(
    estimate: Estimate, settings: dict[str, dict[str, Any]], trace_with: Callable[..., StepTrace]
) -> Iterator[tuple[tuple[str, ...], Memory]]:
    """One more setting each time, largest saving first; at last with micro-batches of one."""
    chosen: list[str] = []
    changes: dict[str, Any] = {}
    traced = estimate.memory
    for setting in estimate.savings:
        if setting not in settings or any(key in changes for key in settings[setting]):
            continue
        chosen.append(setting)
        if settings[setting]:
            changes |= settings[setting]
            traced = estimate.savings[setting] if len(chosen) == 1 else trace_with(changes).memory
        yield tuple(chosen), _remove_parts(traced, chosen)
    if estimate.micro > 1:
        accumulate = f"train.accumulate={estimate.stage.train.accumulate * estimate.micro}"
        yield (*chosen, accumulate), _remove_parts(trace_with(changes, 1).memory, chosen)


def _remove_parts(memory: Memory, settings: list[str]) -> Memory:
    for setting in settings:
        memory = _remove_part(memory, setting) or memory
    return memory


# Real steps ------------------------------------------------------------------------------------------------------


def _add_speed(estimate: Estimate, builder: PlanBuilder, data: StageData, flops: float) -> Estimate:
    """Add the speed of a few real steps, or the reason why none was timed."""
    if estimate.target.is_hypothetical:
        return replace(estimate, not_timed="that device is not here")
    parallel = estimate.stage.train.parallel
    mesh = parallel.mesh_shape(*estimate.world)
    if mesh.tensor * mesh.sequence * count_shards(parallel, mesh) > 1:
        return replace(estimate, not_timed="several processes share the model, and one alone cannot run it")
    if not estimate.largest_batch():
        return replace(estimate, not_timed="not even one sample fits in the memory of this device")
    samples = min(estimate.micro, estimate.largest_batch())
    if estimate.target.device.type == "cpu":
        seconds = flops / estimate.micro / (EFFICIENCY * measure_matmul_flops())
        if seconds > SLOWEST_PROBE:
            reason = (
                f"one sample would take about {seconds:.0f} s on this CPU; run kineo doctor on the machine that trains"
            )
            return replace(estimate, not_timed=reason)
        samples = max(1, min(samples, int(PROBE_SECONDS / 2 / max(seconds, 1e-9))))
    try:
        speed, peak = time_steps(builder, estimate.stage, data, estimate.target.device, samples, estimate.micro)
    except torch.OutOfMemoryError:
        state = estimate.memory.total - estimate.memory.activations
        memory = replace(estimate.memory, activations=max(estimate.memory.activations, estimate.target.free - state))
        reason = f"a step of {samples} samples ran out of memory: it takes more than was estimated"
        return replace(estimate, memory=memory, not_timed=reason)
    if peak is not None and samples == estimate.micro:
        state = estimate.memory.total - estimate.memory.activations - estimate.memory.text
        memory = replace(estimate.memory, activations=max(0, peak - state))
        estimate = replace(estimate, memory=memory, measured=True)
    return replace(estimate, speed=speed)
