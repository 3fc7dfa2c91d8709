"""How much of a sharded model one process holds: computed from the layout, without starting any process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from kineograph.core.distributed import World
from kineograph.core.task import Task
from kineograph.train.parallel import MeshShape, ParallelConfig
from kineograph.train.tensor_parallel import split_parameters

_REDUCED = 4  # bytes per gradient element during the reduction


@dataclass(frozen=True)
class Division:
    """The share of one process; the first one has the largest."""

    share: dict[int, float] = field(default_factory=dict)  # id of a parameter → the fraction of it held here
    gathered: int = 0  # bytes of blocks gathered whole during a step
    all_blocks: int = 0  # bytes of all blocks, gathered whole for validation

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of these tensors held here, each storage once."""
        storages = {t.untyped_storage()._cdata: (t.untyped_storage().nbytes(), id(t)) for t in tensors}
        return round(sum(size * self.share.get(key, 1.0) for size, key in storages.values()))

    def share_of(self, tensor: Tensor, size: float) -> float:
        """The share of `size` bytes that belong to a parameter."""
        return size * self.share.get(id(tensor), 1.0)


def divide_task(task: Task, parallel: ParallelConfig, world: World, precision: str) -> Division:
    """Divide a task over `world` as train/fsdp.py and train/tensor_parallel.py would."""
    sizes = parallel.mesh_shape(*world)
    if sizes.tensor > 1:
        return Division({id(p): 1 / sizes.tensor for p in split_parameters(task, sizes.tensor)})
    shards = count_shards(parallel, sizes)
    if shards == 1:
        return Division()
    blocks = [list(block.parameters()) for block in task.blocks()]
    rows = {id(p): p.shape[0] for block in blocks for p in block}  # FSDP2 shards rows
    half = precision != "fp32"
    weights = [sum(p.numel() * (2 if half else p.element_size()) for p in block) for block in blocks]
    gradients = [w + _REDUCED * sum(p.numel() for p in block) for w, block in zip(weights, blocks, strict=True)]
    # Whole at once: a block's weights and the prefetched next ones (without resharding all blocks), and one block's gradients.
    pairs = [sum(weights[at : at + 2]) for at in range(len(weights))]
    gathered = (max(pairs) if parallel.reshard else sum(weights)) + max(gradients)
    # Offloaded shards lie in main memory.
    share = {key: 0.0 if parallel.offload else math.ceil(n / shards) / n for key, n in rows.items()}
    return Division(share, gathered, sum(weights))


def count_shards(parallel: ParallelConfig, shape: MeshShape) -> int:
    """Processes over which FSDP2 shards a block's weights."""
    return shape.shard * shape.sequence if parallel.layout != "replicate" else 1
