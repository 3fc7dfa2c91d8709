"""FSDP2 from outside: each block's weights, gradients and moments lie in parts; what is not in a block stays whole everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Task
from kineograph.train.ddp import LossModule
from kineograph.train.parallel import Layout

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_sharding(task: Task) -> None:
    """Refuse what could not be sharded."""
    if len(task.players) > 1:
        raise ConfigError(
            f"train.parallel: the players of {type(task).__name__} ({', '.join(task.players)}) walk back over one forward pass, "
            "which FSDP2 does not take; use layout=replicate"
        )
    if not task.blocks():
        raise ConfigError(
            f"train.parallel: {type(task).__name__} names no blocks, the units of sharding; use layout=replicate"
        )


class ShardedTask:
    """A task with one player whose blocks are sharded."""

    def __init__(self, task: Task, layout: Layout, precision: str) -> None:
        check_sharding(task)
        self.reshard = layout.config.reshard
        # Half precision is what is gathered: half the traffic, and nothing keeps a second copy. Gradients are joined in float32.
        half = MixedPrecisionPolicy(
            param_dtype=_HALF.get(precision),
            reduce_dtype=torch.float32 if precision in _HALF else None,
            cast_forward_inputs=False,
        )
        keys: dict[str, Any] = {"mesh": layout.sharding_mesh(), "mp_policy": half}
        tagged = {name for name, p in task.named_parameters() if getattr(p, "no_decay", False)}
        blocks = task.blocks()
        for block in blocks:
            fully_shard(block, reshard_after_forward=self.reshard, **keys)
        self.blocks: Sequence[FSDPModule] = cast(Any, blocks)
        for name, p in task.named_parameters():
            if name in tagged:
                p.no_decay = True  # type: ignore[attr-defined]
        # The common root lets a block's weights be fetched while another computes. It owns no weights: a task is asked for more than its
        # forward pass (samples, tokens), and what is not in blocks must be there then.
        inside = {id(p) for block in blocks for p in block.parameters()}
        self.rest = [p for p in task.parameters() if id(p) not in inside]
        self.root = LossModule(task, task.players[0])
        fully_shard(self.root, ignored_params=set(self.rest), **keys)
        # Blocks may run before the first step (validation of a run that goes on), and would each take itself for the root.
        cast(Any, self.root)._get_fsdp_state()._lazy_init()

    def loss(self, batch: Batch, noise: Noise) -> Loss:
        return self.root(batch, noise)

    def last_of(self, last: bool) -> AbstractContextManager[Any]:
        """Around each micro-batch: each reduces, since whole gradients would take the memory that sharding saves."""
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every process has all weights: processes may then draw different numbers of samples, each at its own pace."""
        for block in self.blocks:
            block.set_reshard_after_forward(False, recurse=False)
            block.unshard()
        try:
            yield
        finally:
            for block in self.blocks:
                block.reshard()
                block.set_reshard_after_forward(self.reshard, recurse=False)
