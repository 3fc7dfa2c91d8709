"""FSDP2, applied to a finished Task: the weights, gradients and moments of each block are sharded; everything else stays replicated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Task
from kineograph.train.ddp import LossModule
from kineograph.train.parallel import Layout

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_sharding(task: Task) -> None:
    """Raise ConfigError where FSDP2 cannot shard the task."""
    if len(task.players) > 1:
        raise ConfigError(
            f"train.parallel: FSDP2 cannot run several backward passes over one forward pass, one for each player of "
            f"{type(task).__name__} ({', '.join(task.players)}); use layout=replicate"
        )
    if not task.blocks():
        raise ConfigError(f"train.parallel: {type(task).__name__} has no blocks to shard; use layout=replicate")


class ShardedTask:
    """A task with one player whose blocks are sharded."""

    def __init__(self, task: Task, layout: Layout, precision: str) -> None:
        check_sharding(task)
        self.reshard = layout.config.reshard
        # Weights are gathered in half precision, half the traffic. Gradients are reduced in float32.
        policy = MixedPrecisionPolicy(
            param_dtype=_HALF.get(precision),
            reduce_dtype=torch.float32 if precision in _HALF else None,
            cast_forward_inputs=False,
        )
        mesh = layout.sharding_mesh()
        pin = mesh.device_type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pin) if layout.config.offload else OffloadPolicy()
        blocks = task.blocks()
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard, offload_policy=offload)
        self.blocks: Sequence[FSDPModule] = cast(Any, blocks)
        # A common root lets FSDP2 prefetch blocks. It shards no weights of its own: sampling and encoding run parts of the task without it.
        in_blocks = {p for block in blocks for p in block.parameters()}
        outside = {p for p in task.parameters() if p not in in_blocks}
        self.root = LossModule(task, task.players[0])
        fully_shard(self.root, mesh=mesh, mp_policy=policy, ignored_params=outside)
        # A block that runs before the first step, in the validation of a resumed run, would otherwise become a root itself.
        cast(Any, self.root)._get_fsdp_state()._lazy_init()

    def loss(self, batch: Batch, noise: Noise) -> Loss:
        return self.root(batch, noise)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around each micro-batch: all of them reduce, since unsharded gradients would take the memory that sharding saves."""
        return nullcontext()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Every process has all weights, so that processes may draw different numbers of samples without waiting for each other."""
        for block in self.blocks:
            block.set_reshard_after_forward(False, recurse=False)
            block.unshard()
        try:
            yield
        finally:
            for block in self.blocks:
                block.reshard()
                block.set_reshard_after_forward(self.reshard, recurse=False)
