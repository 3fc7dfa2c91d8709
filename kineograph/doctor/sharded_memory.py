"""What one process holds of a model that several hold together: arithmetic over a layout, for which nothing needs to be started."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from kineograph.core.distributed import World
from kineograph.core.task import Task
from kineograph.train.parallel import MeshShape, ParallelConfig
from kineograph.train.tensor_parallel import split_parameters

_REDUCED = 4  # bytes of a gradient's number while it is joined


@dataclass(frozen=True)
class Division:
    """Of one process, of which the first has most."""

    share: dict[int, float] = field(default_factory=dict)  # id of a parameter → the part of it that lies here
    gathered: int = 0  # bytes of blocks that lie whole for a while in each step
    judged: int = 0  # bytes of all blocks, which are whole while the model is judged

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Of the parts of these tensors, each memory once."""
        found = {t.untyped_storage()._cdata: (t.untyped_storage().nbytes(), id(t)) for t in tensors}
        return round(sum(size * self.share.get(key, 1.0) for size, key in found.values()))

    def part(self, tensor: Tensor, size: float) -> float:
        """Of `size` bytes that belong to a parameter."""
        return size * self.share.get(id(tensor), 1.0)


def divide_task(task: Task, parallel: ParallelConfig, world: World, precision: str) -> Division:
    """How train/fsdp.py and train/tensor_parallel.py would divide this task over `world`."""
    sizes = parallel.mesh_shape(*world)
    if sizes.tensor > 1:
        return Division({id(p): 1 / sizes.tensor for p in split_parameters(task, sizes.tensor)})
    over = count_shards(parallel, sizes)
    if over == 1:
        return Division()
    blocks = [list(block.parameters()) for block in task.blocks()]
    rows = {id(p): p.shape[0] for block in blocks for p in block}  # FSDP2 cuts rows
    half = precision != "fp32"
    weights = [sum(p.numel() * (2 if half else p.element_size()) for p in block) for block in blocks]
    gradients = [w + _REDUCED * sum(p.numel() for p in block) for w, block in zip(weights, blocks, strict=True)]
    # A block's weights while the next one's are fetched, or those of all where they stay; and one block's gradients, as they are made and as
    # they are joined.
    pairs = [sum(weights[at : at + 2]) for at in range(len(weights))]
    gathered = (max(pairs) if parallel.reshard else sum(weights)) + max(gradients)
    return Division({key: math.ceil(n / over) / n for key, n in rows.items()}, gathered, sum(weights))


def count_shards(parallel: ParallelConfig, shape: MeshShape) -> int:
    """Processes over which FSDP2 lays a block's weights."""
    return shape.shard * shape.sequence if parallel.layout != "replicate" else 1
