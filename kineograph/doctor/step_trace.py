"""One training step on tensors that have a shape and no numbers: its memory and arithmetic, for a model of any size on any machine."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kineograph.core.batch import Batch
from kineograph.core.config import StageConfig
from kineograph.core.distributed import World
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import Task, player_parameters
from kineograph.doctor.sharded_memory import divide_task
from kineograph.stage.build import PlanBuilder, fake_tensors
from kineograph.stage.spec import StagePlan
from kineograph.text.clip_embedding import ClipEmbedder
from kineograph.text.pretrained import PretrainedText
from kineograph.train.config import TrainConfig
from kineograph.train.low_memory_adamw import LowMemoryState
from kineograph.train.parallel import ParallelConfig
from kineograph.train.stepper import Stepper

ONE = World()
READ = 4  # real samples that a batch without numbers is shaped after


@dataclass(frozen=True)
class Memory:
    """Bytes of one process. Activations are everything that lives only during a step, at its peak, for one micro-batch."""

    weights: int  # trained and frozen, with those of earlier stages
    gradients: int
    optimizer: int
    ema: int
    activations: int
    text: int = 0  # weights of frozen text encoders, where captions are encoded while training
    gathered: int = 0  # blocks that lie in parts, where they are whole for a while (dividing.py)
    lean_optimizer: int = 0  # what `optimizer` would be with train.optimizer=adamw_8bit

    @property
    def total(self) -> int:
        state = self.weights + self.gradients + self.optimizer + self.ema
        return state + self.activations + self.text + self.gathered


@dataclass(frozen=True)
class Traced:
    task: Task
    memory: Memory
    flops: float  # of one micro-batch, by however many processes
    judged: int = 0  # bytes of blocks that lie in parts, where they are whole for judging


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


def trace_step(
    builder: PlanBuilder,
    stage: StagePlan,
    train: TrainConfig,
    precision: str,
    sample: Batch,
    micro: int,
    numbers: torch.device | None = None,
    config: StageConfig | None = None,
    world: World = ONE,
    encoders_in: int = 2,
) -> Traced:
    """One step's gradients on a micro-batch of `micro` rows shaped after `sample`; with `numbers`, on a small one for real there, and scaled.

    Without numbers the device does not matter but for its precision: the tensors pretend to lie in main memory. `config` in place of the stage's.
    The step is that of one process, of the whole model; what it holds of it in a `world` under `train.parallel` is worked out from that.
    `encoders_in`: bytes a parameter of frozen text encoders.
    """
    rows = min(micro, READ) if numbers else micro
    device = numbers or torch.device("cpu")
    if not numbers:
        precision = "bf16" if precision == "fp16" else precision  # the same size, and CPUs have it
    with nullcontext() if numbers else fake_tensors():
        torch.manual_seed(0)
        task = builder.build(stage.name, device, config)
        alone = {"compile": False, "precision": precision, "parallel": ParallelConfig()}
        stepper = Stepper(task, train.model_copy(update=alone), stage.players, device)
        task.train()
        batch = _widened(sample, rows, task).to(device)
        everything = tensors_of(task)
        trained = {player: player_parameters(task, player) for player in task.players}
        owned = [p for named in trained.values() for p in named.values()]
        for p in owned:  # as they are after the first micro-batch, so that they do not count as activations
            p.grad = torch.zeros_like(p)
        ledger = _Ledger()
        ledger.ignore([*everything, *(p.grad for p in owned if p.grad is not None), *_tensors_in(batch)])
        with ledger, warnings.catch_warnings(action="ignore"):  # CPU kernels that mind bf16: none of them runs
            stepper.accumulate_gradients(
                max(0, train.steps - 1), [batch]
            )  # late in training, when every player has joined in
        averaged = [
            p for player, named in trained.items() if stage.players[player].ema.decay > 0 for p in named.values()
        ]
        here = divide_task(task, train.parallel, world, precision)
        moments = [
            here.part(p, optimizer.state_bytes(name))
            for optimizer in stepper.optimizers.values()
            for name, p in optimizer.parameters.items()
        ]
        memory = Memory(
            weights=here.bytes_of(everything),
            gradients=here.bytes_of(owned),
            optimizer=round(sum(moments)),
            ema=round(sum(here.part(p, p.numel() * max(4, p.element_size())) for p in averaged)),  # float32 at least
            activations=round(ledger.peak * micro / rows),
            text=0 if (config or stage.spec.config).cache is True else encoder_bytes(task, encoders_in),
            gathered=here.gathered,
            lean_optimizer=round(sum(here.part(p, LowMemoryState(p, eight_bits=True).bytes) for p in owned)),
        )
    return Traced(task, memory, ledger.flops * micro / rows, here.judged)


def _widened(batch: Batch, rows: int, task: Task) -> Batch:
    """As many rows as wanted, of the same shapes. What a frozen text encoder would make of captions is put in its place."""
    wide = batch.map(lambda tensor: tensor[:1].expand(rows, *tensor.shape[1:]).clone())
    captions = (batch.captions * math.ceil(rows / len(batch.captions)))[:rows] if batch.captions else None
    wide = fill_text_embeddings(replace(wide, slots=torch.arange(rows), captions=captions), task)
    clip = next((part for part in task.modules() if isinstance(part, ClipEmbedder)), None)
    if clip is not None and clip.adapter is not None:  # it would have to be loaded
        stand_ins = {name: torch.zeros(rows, clip.width) for name in ("image_embed", "text_embed")}
        wide.extra = stand_ins | wide.extra
        wide.text_embeds = torch.zeros(rows, clip.adapter.length, clip.adapter.text_width)
        wide.text_mask = torch.ones(rows, clip.adapter.length, dtype=torch.bool)
    return wide


def fill_text_embeddings(batch: Batch, task: Task) -> Batch:
    """With stand-ins for what a frozen text encoder makes of captions: it is large, and runs once a caption in a cache."""
    text = next((part for part in task.modules() if isinstance(part, TextEncoder) and not part.trained), None)
    if text is None or batch.text_embeds is not None:
        return batch
    rows = len(batch)
    return replace(
        batch,
        text_embeds=torch.zeros(rows, text.length, text.width),
        text_mask=torch.ones(rows, text.length, dtype=torch.bool),
    )


def encoder_bytes(task: nn.Module, wide: int = 2) -> int:
    """Of the pretrained text encoders that a task loads when it meets a caption; `wide`: bytes a parameter."""
    return wide * sum(module.count() for module in task.modules() if isinstance(module, PretrainedText))


def tensors_of(task: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a task and of the stages that it refers to, each once."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in [*task.parameters(), *task.buffers()]}
    for stage in task.stages.values() if isinstance(task, Task) else ():
        found |= {id(tensor): tensor for tensor in tensors_of(stage)}
    return list(found.values())


def _tensors_in(batch: Batch) -> list[Tensor]:
    values = [getattr(batch, item.name) for item in fields(batch)]
    return [value for value in [*values, *batch.extra.values()] if isinstance(value, Tensor)]
