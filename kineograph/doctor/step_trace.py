"""Trace one training step on fake tensors: its memory and FLOPs, for a model of any size on any machine."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
READ = 4  # real samples that give a fake batch its shape


@dataclass(frozen=True)
class Memory:
    """Bytes of one process. Activations are the peak of everything that lives only during a micro-batch."""

    weights: int  # trained and frozen, including earlier stages
    gradients: int
    optimizer: int
    ema: int
    activations: int
    text: int = 0  # weights of frozen text encoders that encode captions during training
    gathered: int = 0  # sharded blocks while they are gathered (sharded_memory.py)
    low_memory_optimizer: int = 0  # `optimizer` with train.optimizer=adamw_8bit

    @property
    def total(self) -> int:
        state = self.weights + self.gradients + self.optimizer + self.ema
        return state + self.activations + self.text + self.gathered


@dataclass(frozen=True)
class StepTrace:
    task: Task
    memory: Memory
    flops: float  # of one micro-batch
    all_blocks: int = 0  # bytes of sharded blocks when they are gathered for validation


class _AllocationCounter(TorchDispatchMode):
    """Counts the peak bytes of the tensors made inside, and FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.flops = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # Not FlopCounterMode: its module hooks break with torch.autograd.grad inside a loss.
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out tensors that existed before."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def trace_step(
    builder: PlanBuilder,
    stage: StagePlan,
    train: TrainConfig,
    precision: str,
    sample: Batch,
    micro: int,
    real_device: torch.device | None = None,
    config: StageConfig | None = None,
    world: World = ONE,
    encoder_width: int = 2,
) -> StepTrace:
    """Trace the gradients of a micro-batch of `micro` rows shaped like `sample`, on fake tensors.

    With `real_device` a smaller one is run there for real, and scaled up. `config` replaces the stage's. One process runs
    the whole model; its share in a `world` under `train.parallel` is computed. `encoder_width`: bytes per text encoder weight.
    """
    rows = min(micro, READ) if real_device else micro
    device = real_device or torch.device("cpu")
    if not real_device:
        precision = "bf16" if precision == "fp16" else precision  # of the same size, and CPUs support it
    with nullcontext() if real_device else fake_tensors():
        torch.manual_seed(0)
        task = builder.build(stage.name, device, config)
        alone = {"compile": False, "precision": precision, "parallel": ParallelConfig()}
        stepper = Stepper(task, train.model_copy(update=alone), stage.players, device)
        task.train()
        batch = _repeat_rows(sample, rows, task).to(device)
        existing = tensors_of(task)
        trained = {player: player_parameters(task, player) for player in task.players}
        owned = [p for named in trained.values() for p in named.values()]
        # As after the first micro-batch, so that gradients do not count as activations.
        for p in owned:
            p.grad = torch.zeros_like(p)
        counter = _AllocationCounter()
        counter.ignore([*existing, *(p.grad for p in owned if p.grad is not None), *batch.tensors()])
        # Ignored: warnings about bf16 on CPUs, since no kernel runs. The last step, at which every player is active.
        with counter, warnings.catch_warnings(action="ignore"):
            stepper.accumulate_gradients(max(0, train.steps - 1), [batch])
        averaged = [
            p for player, named in trained.items() if stage.players[player].ema.decay > 0 for p in named.values()
        ]
        shares = divide_task(task, train.parallel, world, precision)
        moments = [
            shares.share_of(p, optimizer.state_bytes(name))
            for optimizer in stepper.optimizers.values()
            for name, p in optimizer.parameters.items()
        ]
        memory = Memory(
            weights=shares.bytes_of(existing),
            gradients=shares.bytes_of(owned),
            optimizer=round(sum(moments)),
            # The average is float32 at least.
            ema=round(sum(shares.share_of(p, p.numel() * max(4, p.element_size())) for p in averaged)),
            activations=round(counter.peak * micro / rows),
            text=0
            if (config or stage.spec.config).cache in (True, "if_possible")
            else encoder_bytes(task, encoder_width),
            gathered=shares.gathered,
            low_memory_optimizer=round(
                sum(shares.share_of(p, LowMemoryState(p, eight_bits=True).bytes) for p in owned)
            ),
        )
    return StepTrace(task, memory, counter.flops * micro / rows, shares.all_blocks)


def _repeat_rows(batch: Batch, rows: int, task: Task) -> Batch:
    """Repeat the first row, with zeros in place of the embeddings of frozen encoders."""
    wide = batch.map(lambda tensor: tensor[:1].expand(rows, *tensor.shape[1:]).clone())
    captions = (batch.captions * math.ceil(rows / len(batch.captions)))[:rows] if batch.captions else None
    wide = fill_text_embeddings(replace(wide, slots=torch.arange(rows), captions=captions), task)
    clip = next((part for part in task.modules() if isinstance(part, ClipEmbedder)), None)
    if clip is not None and clip.adapter is not None:  # a pretrained CLIP, which is not loaded
        zeros = {name: torch.zeros(rows, clip.width) for name in ("image_embed", "text_embed")}
        wide.extra = zeros | wide.extra
        wide.text_embeds = torch.zeros(rows, clip.adapter.length, clip.adapter.text_width)
        wide.text_mask = torch.ones(rows, clip.adapter.length, dtype=torch.bool)
    return wide


def fill_text_embeddings(batch: Batch, task: Task) -> Batch:
    """Put zeros in place of a frozen text encoder's embeddings: it is large, and a cache runs it once per caption."""
    text = next((part for part in _text_encoders(task) if not part.trained), None)
    if text is None or batch.text_embeds is not None:
        return batch
    rows = len(batch)
    return replace(
        batch,
        text_embeds=torch.zeros(rows, text.length, text.width),
        text_mask=torch.ones(rows, text.length, dtype=torch.bool),
    )


def encoder_bytes(task: nn.Module, width: int = 2) -> int:
    """Bytes of the pretrained text encoders that a task loads for its first caption, at `width` bytes per weight."""
    return width * sum(module.count() for module in _text_encoders(task) if isinstance(module, PretrainedText))


def _text_encoders(task: nn.Module) -> list[TextEncoder]:
    """The text encoders of a task; of a critic, which has none, those of its generator."""
    own = [part for part in task.modules() if isinstance(part, TextEncoder)]
    stages = task.stages.values() if isinstance(task, Task) else ()
    return own or [part for stage in stages for part in _text_encoders(stage)]


def tensors_of(task: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a task and of the stages that it refers to, each once."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in [*task.parameters(), *task.buffers()]}
    for stage in task.stages.values() if isinstance(task, Task) else ():
        found |= {id(tensor): tensor for tensor in tensors_of(stage)}
    return list(found.values())
