"""What a stage needs before it is trained: parameters, memory, arithmetic and time.

Memory and arithmetic come from one training step on tensors that have a shape and no numbers, so that a model of any size is
examined on any machine. Speed comes from a few real steps on the real device, where that takes seconds.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kineograph.core import ranks
from kineograph.core.batch import Batch
from kineograph.core.errors import KineoError
from kineograph.core.noise import key_of
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext, Task, freeze, parameters_of
from kineograph.data.loader import Loader
from kineograph.run.machine import free_memory, matmul_rate
from kineograph.run.plan import Plan, StagePlan
from kineograph.run.stage_data import StageData, workers_for
from kineograph.sample.stages import read_stage
from kineograph.train import checkpoint
from kineograph.train.config import TrainConfig
from kineograph.train.stepper import Stepper, precision_for

PROBE_SECONDS = 2.0  # of timed steps a stage
SLOWEST_PROBE = 3.0  # seconds that one sample's step may be expected to take on a CPU
EFFICIENCY = 0.3  # of a plain matrix product's speed that training is expected to reach, to plan the probe
ROOM = 0.9  # share of the free memory that a run may take
_READ = 4  # real samples that a batch without numbers is shaped after


@dataclass(frozen=True)
class Memory:
    """Bytes. Activations are everything that lives only during a step, at its peak, for one micro-batch."""

    weights: int  # trained and frozen, with those of earlier stages
    gradients: int
    optimizer: int
    ema: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.ema + self.activations


@dataclass(frozen=True)
class Speed:
    step_seconds: float
    samples: int  # a probed step
    steps: int  # that were timed
    read_seconds: float  # to read one sample
    compiled: bool


@dataclass(frozen=True)
class Estimate:
    """One stage. `speed` is None where nothing was probed, and `unprobed` says why."""

    stage: StagePlan
    task: str
    device: torch.device
    precision: str
    trained: dict[str, int]  # parameters by player
    frozen: int
    tokens: int | None
    code: str | None  # what the codec makes of a clip
    memory: Memory
    traced: str | None  # why memory is not from the whole micro-batch, if it is not
    flops: float  # of a whole step
    free: int  # bytes on the device
    speed: Speed | None = None
    unprobed: str | None = None
    measured: bool = False  # memory is what the device really took
    sample_bytes: float = 0.0  # activations that one more sample takes
    savings: dict[str, Memory] = field(default_factory=dict)  # switch → memory with it

    @property
    def micro(self) -> int:
        return micro_batch(self.stage.train)

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
        reading, workers = self.speed.read_seconds * self.stage.train.batch_size, workers_for(self.stage.train)
        return max(self.speed.step_seconds, reading / workers) if workers else self.speed.step_seconds + reading

    @property
    def seconds(self) -> float | None:
        return None if self.step_seconds is None else self.step_seconds * self.stage.train.steps


def micro_batch(train: TrainConfig) -> int:
    return max(1, train.batch_size // (train.accumulate * ranks.world()))


# Building --------------------------------------------------------------------------------------------------------


class Builder:
    """Builds the stages of a plan with fresh weights; an earlier stage that one refers to stands in untrained and frozen."""

    def __init__(self, plan: Plan, data: dict[str, StageData], note: Callable[[str], None]) -> None:
        self.plan, self.data, self.note = plan, data, note
        self._assets: dict[str, dict[str, str]] = {}  # a vocabulary is learned once a stage
        self._said: set[str] = set()

    def build(self, name: str, device: torch.device) -> Task:
        """A stage of the plan, to be trained; `device` is where the stages that it refers to go."""
        stage = next(stage for stage in self.plan.stages if stage.name == name)
        context = BuildContext(
            shape=stage.spec.data.shape,
            seed=key_of(self.plan.seed, name) >> 1,
            stage=lambda reference: self._earlier(reference, device),
            captions=self._captions(stage),
            assets=self._assets.get(name, {}),
            note=self._say,
        )
        task = stage.spec.task.build(stage.spec.config, context)
        self._assets[name] = task.assets()
        return task

    def _earlier(self, reference: str, device: torch.device) -> Task:
        if "/" not in reference:
            return _frozen(self.build(reference, device), device)
        path = Path(reference)
        run = RunFolder.existing(path.parent)
        assets = checkpoint.choose(run.checkpoints(path.name)).state().get("assets", {})
        spec = read_stage(run.config(), path.name)
        context = BuildContext(
            shape=spec.data.shape,
            stage=lambda name: self._earlier(name if "/" in name else f"{path.parent}/{name}", device),
            assets=assets,
            note=self._say,
        )
        return _frozen(spec.task.build(spec.config, context), device)

    def _captions(self, stage: StagePlan) -> Callable[[], list[str]]:
        return self.data[stage.name].captions if stage.name in self.data else list

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.note(line)


def _frozen(task: Task, device: torch.device) -> Task:
    return freeze(task if device.type == "cpu" else task.to(device))  # type: ignore[return-value]


# Without numbers -------------------------------------------------------------------------------------------------


class _Ledger(TorchDispatchMode):
    """Counts what happens inside: the most bytes that were alive at once of what was made, and floating-point operations."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.flops = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # Not FlopCounterMode: its hooks on modules do not bear torch.autograd.grad inside a loss.
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """What was there before."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@dataclass(frozen=True)
class _Traced:
    task: Task
    memory: Memory
    flops: float  # of one micro-batch


def _trace(
    builder: Builder, stage: StagePlan, train: TrainConfig, device: torch.device, sample: Batch, numbers: bool
) -> _Traced:
    """One step's gradients on a micro-batch shaped after `sample`; with `numbers`, on a small one for real, and scaled.

    Without numbers the device does not matter but for its precision: the tensors pretend to lie in main memory.
    """
    rows = min(micro_batch(train), _READ) if numbers else micro_batch(train)
    precision = precision_for(train.precision, device)
    if not numbers:
        device = torch.device("cpu")
        precision = "bf16" if precision == "fp16" else precision  # the same size, and CPUs have it
    mode: AbstractContextManager = nullcontext() if numbers else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        torch.manual_seed(0)
        task = builder.build(stage.name, device)
        if not numbers:
            task.to = lambda *where: task  # type: ignore[method-assign,assignment,misc]  # pretended tensors cannot be moved, and need not
        stepper = Stepper(
            task, train.model_copy(update={"compile": False, "precision": precision}), stage.players, device
        )
        task.train()
        batch = _widened(sample, rows, task).to(device)
        everything = _tensors(task)
        owned = [p for player in task.players for p in parameters_of(task, player).values()]
        for p in owned:  # as they are after the first micro-batch, so that they do not count as activations
            p.grad = torch.zeros_like(p)
        ledger = _Ledger()
        ledger.ignore([*everything, *(p.grad for p in owned if p.grad is not None), *_tensors_of(batch)])
        with ledger, warnings.catch_warnings(action="ignore"):  # CPU kernels that mind bf16: none of them runs
            stepper.gradients(max(0, train.steps - 1), [batch])  # late in training, when every player has joined in
        trained = {player: parameters_of(task, player) for player in task.players}
        averaged = [
            p for player, named in trained.items() if stage.players[player].ema.decay > 0 for p in named.values()
        ]
        memory = Memory(
            weights=_bytes(everything),
            gradients=_bytes(owned),
            optimizer=2 * _bytes(owned),
            ema=_bytes(averaged),
            activations=round(ledger.peak * micro_batch(train) / rows),
        )
    return _Traced(task, memory, ledger.flops * micro_batch(train) / rows)


def _widened(batch: Batch, rows: int, task: Task) -> Batch:
    """As many rows as wanted, of the same shapes. What a frozen text encoder would make of captions is put in its place."""
    wide = batch.map(lambda tensor: tensor[:1].expand(rows, *tensor.shape[1:]).clone())
    captions = (batch.captions * math.ceil(rows / len(batch.captions)))[:rows] if batch.captions else None
    wide = replace(wide, slots=torch.arange(rows), captions=captions)
    text = getattr(task, "text", None)
    if text is not None and not getattr(text, "trained", True) and wide.text_embeds is None:
        wide.text_embeds = torch.zeros(rows, text.length, text.width)
        wide.text_mask = torch.ones(rows, text.length, dtype=torch.bool)
    clip: Any = getattr(task, "clip", None)
    if getattr(clip, "adapter", None) is not None:  # it would have to be loaded
        stand_ins = {name: torch.zeros(rows, clip.width) for name in ("image_embed", "text_embed")}
        wide.extra = stand_ins | wide.extra
        wide.text_embeds = torch.zeros(rows, clip.length, clip.text_width)
        wide.text_mask = torch.ones(rows, clip.length, dtype=torch.bool)
    return wide


def _tensors(task: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a task and of the stages that it refers to, each once."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in [*task.parameters(), *task.buffers()]}
    for stage in getattr(task, "stages", {}).values():
        found |= {id(tensor): tensor for tensor in _tensors(stage)}
    return list(found.values())


def _tensors_of(batch: Batch) -> list[Tensor]:
    values = [getattr(batch, item.name) for item in fields(batch)]
    return [value for value in [*values, *batch.extra.values()] if isinstance(value, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


# The whole estimate ----------------------------------------------------------------------------------------------


def estimate(builder: Builder, stage: StagePlan, data: StageData, probe: bool = True) -> Estimate:
    """Examine one stage of the builder's plan."""
    train = stage.train
    device = ranks.device_of(train.device)
    reading = Loader(data.source, data.seed, _READ).steps(0, 2)
    sample = next(reading)[0]  # the first opens files and fills caches
    started = time.perf_counter()
    next(reading)
    read_seconds = (time.perf_counter() - started) / _READ

    def trace(**changes: Any) -> _Traced:
        return _trace(builder, stage, train.model_copy(update=changes), device, sample, numbers)

    numbers, why = False, None
    try:
        found = trace()
    except KineoError:
        raise
    except Exception as error:  # a Task may look at numbers (`if loss > 1`), which these tensors do not have
        numbers, why = True, f"it needs real numbers ({type(error).__name__})"
        found = trace()
    task, micro = found.task, micro_batch(train)
    # Some of what a step holds does not grow with the batch, such as a weight's fresh gradient: two sizes tell it apart.
    half = trace(batch_size=train.batch_size // micro * (micro // 2)) if micro > 1 else None
    slope = (
        (found.memory.activations - half.memory.activations) / (micro - micro // 2)
        if half
        else found.memory.activations
    )
    finer = {f"train.accumulate={2 * train.accumulate}": half.memory} if half and micro % 2 == 0 else {}
    trained = {player: sum(p.numel() for p in parameters_of(task, player).values()) for player in task.players}
    result = Estimate(
        stage=stage,
        task=type(task).__name__,
        device=device,
        precision=precision_for(train.precision, device),
        trained=trained,
        frozen=sum(t.numel() for t in _tensors(task) if isinstance(t, nn.Parameter)) - sum(trained.values()),
        tokens=task.tokens_per_clip(),
        code=_code(task, stage),
        memory=found.memory,
        traced=why,
        flops=found.flops * train.accumulate * ranks.world(),
        free=free_memory(device),
        sample_bytes=slope,
        savings=finer | _savings(found, train, device, trace),
    )
    if probe:
        result = _probed(result, builder, data, read_seconds, found.flops)
    if result.unprobed and device.type == "cpu" and result.precision == "fp32":
        result.savings["a GPU, in bf16"] = trace(precision="bf16").memory
    return result


def _code(task: Task, stage: StagePlan) -> str | None:
    """What the stage's codec makes of a clip."""
    codec: Any = task if hasattr(task, "shape_for") else task.stages.get("codec")
    if codec is None or not hasattr(codec, "shape_for"):
        return None
    shape = stage.spec.data.shape
    sides = " × ".join(map(str, codec.shape_for(shape.frames, shape.height, shape.width)))
    codes = getattr(codec, "vocabulary", None)  # of a generator that knows which clips fit: latents
    return f"{sides} tokens of {codes:,} codes" if codes else f"{sides} latents"


def _savings(
    found: _Traced, train: TrainConfig, device: torch.device, trace: Callable[..., _Traced]
) -> dict[str, Memory]:
    """What each switch would leave of the memory."""
    savings: dict[str, Memory] = {}
    if found.task.blocks() and not train.checkpointing:
        savings["train.checkpointing=true"] = trace(checkpointing=True).memory
    if device.type == "cuda" and precision_for(train.precision, device) == "fp32":
        savings["train.precision=bf16"] = trace(precision="bf16").memory
    return savings


# Real steps ------------------------------------------------------------------------------------------------------


def _probed(found: Estimate, builder: Builder, data: StageData, read_seconds: float, flops: float) -> Estimate:
    """The estimate with the speed of a few real steps, or with the reason why there are none."""
    train, micro = found.stage.train, found.micro
    state = found.memory.total - found.memory.activations
    if not found.largest_batch():
        return replace(found, unprobed="not even one sample fits in the memory of this device")
    samples = min(micro, found.largest_batch())
    if found.device.type == "cpu":
        one = flops / micro / (EFFICIENCY * matmul_rate())  # seconds
        if one > SLOWEST_PROBE:
            reason = f"one sample alone would take about {one:.0f} s on this CPU; run kineo doctor on the machine that trains"
            return replace(found, unprobed=reason)
        samples = max(1, min(samples, int(PROBE_SECONDS / 2 / one)))
    compiled = train.compile is True
    changes = {"batch_size": samples, "accumulate": 1, "compile": compiled}
    torch.manual_seed(0)
    task = builder.build(found.stage.name, found.device)
    text = getattr(task, "text", None)
    stepper = Stepper(task, train.model_copy(update=changes), found.stage.players, found.device)
    task.train()
    batches = Loader(data.source, data.seed, samples).steps(0, 2)
    given = [_as_encoded(next(batches)[0], text) for _ in range(2)]
    on_gpu = found.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(found.device)
    first = max(0, train.steps - 8)
    stepper.step(first, [given[0]])  # allocates the optimizer's moments, warms caches up
    _wait(found.device)
    began, steps = time.perf_counter(), 0
    while steps < 1 or (steps < 50 and time.perf_counter() - began < PROBE_SECONDS):
        stepper.step(first + steps % 8, [given[steps % 2]])
        steps += 1
        if steps % 4 == 0:
            _wait(found.device)
    _wait(found.device)
    taken = (time.perf_counter() - began) / steps
    # One micro-batch after the other; the update itself is small beside them.
    speed = Speed(taken * micro / samples * train.accumulate, samples, steps, read_seconds, compiled)
    if on_gpu and samples == micro:
        peak = torch.cuda.max_memory_allocated(found.device)
        found = replace(found, memory=replace(found.memory, activations=max(0, peak - state)), measured=True)
    return replace(found, speed=speed)


def _as_encoded(batch: Batch, text: Any) -> Batch:
    """A frozen text encoder is not loaded for a probe: it runs once a caption in a cache, and is large."""
    if text is None or getattr(text, "trained", True) or batch.text_embeds is not None:
        return batch
    rows = len(batch)
    return replace(
        batch,
        text_embeds=torch.zeros(rows, text.length, text.width),
        text_mask=torch.ones(rows, text.length, dtype=torch.bool),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
