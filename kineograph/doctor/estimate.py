"""What a stage needs before it is trained: parameters, memory, arithmetic and time; and which switches would need less.

Memory and arithmetic come from tracing.py, speed from probing.py. A device that is not here can be imagined by its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import nn

from kineograph.core import distributed
from kineograph.core.capabilities import HasMemorySavers, SupportsCaching
from kineograph.core.config import merge, nest, parse
from kineograph.core.distributed import World
from kineograph.core.errors import InputError, KineoError
from kineograph.core.task import Codec, Task, find_codec, player_parameters
from kineograph.doctor.machine import free_memory, matmul_rate
from kineograph.doctor.sharded_memory import Division, count_shards
from kineograph.doctor.speed import PROBE_SECONDS, Speed, read_two_batches, time_steps
from kineograph.doctor.step_trace import ONE, READ, Memory, Traced, tensors_of, trace_step
from kineograph.stage.build import PlanBuilder, fake_tensors
from kineograph.stage.data import StageData, count_workers
from kineograph.stage.spec import StagePlan
from kineograph.train.config import TrainConfig
from kineograph.train.parallel import ParallelConfig
from kineograph.train.precision import resolve_precision

SLOWEST_PROBE = 3.0  # seconds that one sample's step may be expected to take on a CPU
EFFICIENCY = 0.3  # of a plain matrix product's speed that training is expected to reach, to plan the probe
ROOM = 0.9  # share of the free memory that a run may take


@dataclass(frozen=True)
class Target:
    """Where a run is to fit."""

    device: torch.device
    free: int  # bytes
    precision: str
    imagined: bool = False  # a GPU of so much memory, which is not here

    @staticmethod
    def of(train: TrainConfig, memory: int | None = None, world: World = ONE) -> Target:
        """The device that each process of the run would take, or a GPU of `memory` bytes. On a CPU they share the machine's memory."""
        if memory is None:
            device = distributed.resolve_device(train.device)
            free = free_memory(device) // (world.local if device.type == "cpu" else 1)
            return Target(device, free, resolve_precision(train.precision, device))
        return Target(torch.device("cuda"), memory, "bf16" if train.precision == "auto" else train.precision, True)

    def __str__(self) -> str:
        return "a GPU of that size" if self.imagined else str(self.device)


@dataclass(frozen=True)
class Estimate:
    """One stage. `speed` is None where nothing was probed, and `unprobed` says why."""

    stage: StagePlan
    task: str
    target: Target
    trained: dict[str, int]  # parameters by player
    frozen: int
    tokens: int | None
    code: str | None  # what the codec makes of a clip
    memory: Memory
    traced: str | None  # why memory is not from the whole micro-batch, if it is not
    flops: float  # of a whole step
    micro: int  # rows a micro-batch, of the largest bucket where there are several
    speed: Speed | None = None
    unprobed: str | None = None
    measured: bool = False  # memory is what the device really took
    sample_bytes: float = 0.0  # activations that one more sample takes
    savings: dict[str, Memory] = field(default_factory=dict)  # switch → memory with it, the one that saves most first
    together: tuple[tuple[str, ...], Memory] | None = None  # switches that make it fit, where none does alone
    world: World = ONE  # processes that the run is meant for; memory is that of one of them
    judged: int = 0  # bytes more while it judges, where blocks lie in parts

    @property
    def free(self) -> int:
        return self.target.free

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def precision(self) -> str:
        return self.target.precision

    @property
    def fits(self) -> bool:
        return self.memory.total <= ROOM * self.free

    def largest_batch(self) -> int:
        """Samples a micro-batch for which there is memory, about."""
        left = ROOM * self.free - self.memory.total
        return max(0, self.micro + math.floor(left / max(1.0, self.sample_bytes)))

    @property
    def step_seconds(self) -> float | None:
        """Compute and reading side by side where there are workers, one after the other where there are none."""
        if self.speed is None:
            return None
        train = self.stage.train
        reading = self.speed.read_seconds * train.batch_size / data_world(train, self.world)
        workers = count_workers(train, self.world.local)
        return max(self.speed.step_seconds, reading / workers) if workers else self.speed.step_seconds + reading

    @property
    def seconds(self) -> float | None:
        return None if self.step_seconds is None else self.step_seconds * self.stage.train.steps


def micro_batch(train: TrainConfig, data: StageData | None = None, world: World = ONE) -> int:
    """Rows of one process's micro-batch; of the largest bucket, where there are several."""
    rows = train.batch_size
    if data is not None and data.buckets is not None:
        shape, _ = data.largest_bucket()
        rows = next(
            n for other, n in zip(data.buckets.shapes, data.buckets.batch_sizes(rows), strict=True) if other == shape
        )
    return max(1, rows // (train.accumulate * data_world(train, world)))


def data_world(train: TrainConfig, world: World) -> int:
    """Processes that see data of their own."""
    return train.parallel.data_rank_of(0, world.processes)[1]


def estimate(
    builder: PlanBuilder,
    stage: StagePlan,
    data: StageData,
    probing: bool = True,
    memory: int | None = None,
    world: World = ONE,
) -> Estimate:
    """Examine one stage of the builder's plan; `memory` is that of a GPU which is not here, `world` the processes of which this is one."""
    train, target = stage.train, Target.of(stage.train, memory, world)
    micro = micro_batch(train, data, world)
    (sample, _), _ = read_two_batches(data, READ)
    numbers: torch.device | None = None
    why = None

    def traced(changes: dict[str, Any] | None = None, rows: int = micro) -> Traced:
        """With other values of `train.*`, or of the stage's own keys."""
        changes = changes or {}
        own = {key: value for key, value in changes.items() if not key.startswith("train.")}
        over = {key.removeprefix("train."): value for key, value in changes.items() if key.startswith("train.")}
        precision = over.get("precision", target.precision)
        config = _changed(stage.spec.config, own) if own else None
        wide = 4 if target.device.type == "cpu" and precision == "fp32" else 2  # text encoders: bf16 on GPUs
        over_train = train.model_copy(update=over)
        return trace_step(builder, stage, over_train, precision, sample, rows, numbers, config, world, wide)

    try:
        found = traced()
    except KineoError:
        raise
    except Exception as error:  # a Task may look at numbers (`if loss > 1`), which these tensors do not have
        _refuse_real(builder, stage, target, error)
        numbers = torch.device("cpu") if target.imagined else target.device
        why = f"it needs real numbers ({type(error).__name__})"
        found = traced()
    task = found.task
    # Some of what a step holds does not grow with the batch, such as a weight's fresh gradient: two sizes tell it apart.
    half = traced(rows=micro // 2) if micro > 1 else None
    slope = (
        (found.memory.activations - half.memory.activations) / (micro - micro // 2)
        if half
        else found.memory.activations
    )
    trained = {player: sum(p.numel() for p in player_parameters(task, player).values()) for player in task.players}
    result = Estimate(
        stage=stage,
        task=type(task).__name__,
        target=target,
        trained=trained,
        frozen=sum(t.numel() for t in tensors_of(task) if isinstance(t, nn.Parameter)) - sum(trained.values()),
        tokens=task.tokens_per_clip(),
        code=_code(task, stage),
        memory=found.memory,
        traced=why,
        flops=found.flops * train.accumulate * data_world(train, world),
        micro=micro,
        sample_bytes=slope,
        world=world,
        judged=found.judged,
    )
    savings = {f"train.accumulate={2 * train.accumulate}": half.memory} if half and micro % 2 == 0 else {}
    switches = _switches(found, stage, target, world)
    for switch, changes in switches.items():
        savings[switch] = _without(found.memory, switch) or traced(changes).memory
    if probing:
        result = _probed(result, builder, data, found.flops)
    if result.unprobed and target.device.type == "cpu" and target.precision == "fp32":
        savings["a GPU, in bf16"] = traced({"train.precision": "bf16"}).memory
    less = {switch: memory for switch, memory in savings.items() if memory.total < found.memory.total}
    result = replace(result, savings=dict(sorted(less.items(), key=lambda pair: pair[1].total)))
    return replace(result, together=_together(result, switches, traced))


def _refuse_real(builder: PlanBuilder, stage: StagePlan, target: Target, error: Exception) -> None:
    """Real numbers are tried where there is surely room for them: a doctor must not take the machine down."""
    try:
        with fake_tensors():
            size = Division().bytes_of(tensors_of(builder.build(stage.name, torch.device("cpu"))))
    except Exception:  # not even built: its size is not known
        size = None
    there = free_memory(torch.device("cpu") if target.imagined else target.device)
    if (size is None and target.imagined) or (size is not None and 8 * size > there):
        raise InputError(
            f"stage {stage.name} cannot be examined without numbers ({type(error).__name__}: {str(error)[:200]}), and is too large to be tried here"
        ) from error


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    tree = config.model_dump(exclude_unset=True)
    for key, value in changes.items():
        tree = merge(tree, nest(key, value))
    return parse(type(config), tree)


def _code(task: Task, stage: StagePlan) -> str | None:
    """What the stage's codec makes of a clip."""
    codec = task if isinstance(task, Codec) else find_codec(task)
    if codec is None:
        return None
    shape = stage.spec.data.shape
    sides = " × ".join(map(str, codec.shape_for(shape.frames, shape.height, shape.width)))
    return f"{sides} tokens of {codec.vocabulary:,} codes" if codec.vocabulary else f"{sides} latents"


# Switches --------------------------------------------------------------------------------------------------------

_CACHED = "kineo cache beforehand"
_NO_AVERAGE = "train.ema.decay=0"
_LEAN = "train.optimizer=adamw_8bit"


def _switches(found: Traced, stage: StagePlan, target: Target, world: World) -> dict[str, dict[str, Any]]:
    """What could be set to need less memory: as a person would write it → the keys that it changes."""
    train = stage.train
    switches: dict[str, dict[str, Any]] = {}
    if found.task.blocks():
        for value in _others(train, "checkpointing", {False: 0, "light": 1, "selective": 2, True: 3}):
            switches[f"train.checkpointing={str(value).lower()}"] = {"train.checkpointing": value}
    if target.device.type == "cuda" and target.precision == "fp32":
        switches["train.precision=bf16"] = {"train.precision": "bf16"}
    if (
        world.processes > 1
        and train.parallel == ParallelConfig()
        and len(found.task.players) == 1
        and found.task.blocks()
    ):
        switches["train.parallel=shard"] = {"train.parallel": ParallelConfig(layout="shard")}
    savers = stage.spec.task.memory_savers(stage.spec.config) if issubclass(stage.spec.task, HasMemorySavers) else {}
    for key, value in savers.items():
        switches[f"stages.{stage.name}.{key}={value}"] = {key: value}
    if found.memory.ema:
        switches[_NO_AVERAGE] = {}
    switches[_LEAN] = {}
    if (
        found.memory.text
        and issubclass(stage.spec.task, SupportsCaching)
        and stage.spec.task.can_cache(stage.spec.config)
    ):
        switches[_CACHED] = {}
    return switches


def _others(train: TrainConfig, key: str, leanness: dict[Any, int]) -> list[Any]:
    """Values of a key that are leaner than the one it has, of those that this config knows."""
    annotation = TrainConfig.model_fields[key].annotation
    known = {False, True} | {value for part in get_args(annotation) for value in get_args(part)}
    return [value for value, rank in leanness.items() if value in known and rank > leanness[getattr(train, key)]]


def _without(memory: Memory, switch: str) -> Memory | None:
    """For switches that take away a part, which need no tracing."""
    if switch == _NO_AVERAGE:
        return replace(memory, ema=0)
    if switch == _LEAN:
        return replace(memory, optimizer=memory.lean_optimizer)
    return replace(memory, text=0) if switch == _CACHED else None


def _together(
    found: Estimate, switches: dict[str, dict[str, Any]], traced: Callable[..., Traced]
) -> tuple[tuple[str, ...], Memory] | None:
    """Where no switch is enough alone: one after another, that which saves most first, until it fits, each sample on its own if need be."""
    room = ROOM * found.free
    if found.fits or any(memory.total <= room for memory in found.savings.values()):
        return None
    taken: list[str] = []
    changes: dict[str, Any] = {}
    memory = found.memory
    for switch in found.savings:
        if switch not in switches or any(key in changes for key in switches[switch]):
            continue
        taken.append(switch)
        changes |= switches[switch]
        memory = _all_without(traced(changes).memory, taken)
        if memory.total <= room:
            return tuple(taken), memory
    if found.micro > 1:
        alone = _all_without(traced(changes, 1).memory, taken)
        if alone.total <= room:
            accumulate = found.stage.train.accumulate * found.micro
            return (*taken, f"train.accumulate={accumulate}"), alone
    return None


def _all_without(memory: Memory, switches: list[str]) -> Memory:
    for switch in switches:
        memory = _without(memory, switch) or memory
    return memory


# Real steps ------------------------------------------------------------------------------------------------------


def _probed(found: Estimate, builder: PlanBuilder, data: StageData, flops: float) -> Estimate:
    """The estimate with the speed of a few real steps, or with the reason why there are none."""
    if found.target.imagined:
        return replace(found, unprobed="that device is not here")
    parallel, sizes = found.stage.train.parallel, found.stage.train.parallel.mesh_shape(*found.world)
    if sizes.tensor * sizes.sequence * count_shards(parallel, sizes) > 1:
        return replace(found, unprobed="several processes hold the model together, and one alone cannot try that")
    if not found.largest_batch():
        return replace(found, unprobed="not even one sample fits in the memory of this device")
    samples = min(found.micro, found.largest_batch())
    if found.device.type == "cpu":
        one = flops / found.micro / (EFFICIENCY * matmul_rate())  # seconds
        if one > SLOWEST_PROBE:
            reason = f"one sample alone would take about {one:.0f} s on this CPU; run kineo doctor on the machine that trains"
            return replace(found, unprobed=reason)
        samples = max(1, min(samples, int(PROBE_SECONDS / 2 / one)))
    speed, peak = time_steps(builder, found.stage, data, found.device, samples, found.micro)
    if peak is not None and samples == found.micro:
        state = found.memory.total - found.memory.activations - found.memory.text
        found = replace(found, memory=replace(found.memory, activations=max(0, peak - state)), measured=True)
    return replace(found, speed=speed)
