"""Tensor parallelism, applied to a finished Task: torch's ColwiseParallel and RowwiseParallel on the layers that each block's plan names.

    y = Σᵣ f(x Aᵣ) Bᵣ        A split by columns, B by rows, f elementwise or within a head: one all-reduce for each pair

All processes of the mesh see the same batch and compute everything else alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from kineograph.core.errors import ConfigError
from kineograph.core.parallel_plan import HasParallelPlan, ParallelPlan
from kineograph.core.task import Task


def parallel_plans(task: Task, key: str, count: int) -> list[tuple[nn.Module, ParallelPlan]]:
    """The blocks with their plans. Raises ConfigError where a block has none, or where `count` does not divide its heads."""
    blocks = task.blocks()
    if not blocks or not all(isinstance(block, HasParallelPlan) for block in blocks):
        raise ConfigError(
            f"train.parallel.{key}={count}: the blocks of {type(task).__name__} have no parallel plan; use replicate, or shard"
        )
    plans = [(block, cast(HasParallelPlan, block).parallel_plan()) for block in blocks]
    for block, plan in plans:
        for name in plan.attentions:
            heads = int(block.get_submodule(name).heads)  # type: ignore[arg-type]
            if heads % count:
                raise ConfigError(
                    f"train.parallel.{key}={count} does not divide the {heads} heads of {type(task).__name__}: use one of "
                    f"{', '.join(str(n) for n in range(2, heads + 1) if heads % n == 0)}"
                )
    return plans


def check_tensor_parallel(task: Task, count: int) -> list[tuple[nn.Module, ParallelPlan]]:
    """The blocks with their plans. Raises ConfigError where a layer cannot be split over `count` processes."""
    plans = parallel_plans(task, "tensor", count)
    for block, plan in plans:
        for name in (*plan.column_layers, *plan.row_layers):
            layer = block.get_submodule(name)
            if type(layer) is not nn.Linear:
                raise ConfigError(
                    f"train.parallel.tensor={count}: {name} of {type(task).__name__} has adapters, which are not split; "
                    "use replicate, shard or sequence"
                )
            channels = layer.in_features if name in plan.row_layers else layer.out_features // plan.column_layers[name]
            if channels % count:
                raise ConfigError(
                    f"train.parallel.tensor={count} does not divide the {channels} channels of {name}: use another number"
                )
    return plans


def split_parameters(task: Task, count: int) -> list[nn.Parameter]:
    """The parameters of which `apply_tensor_parallel` leaves each process 1 / `count`."""
    parameters: list[nn.Parameter] = []
    for block, plan in check_tensor_parallel(task, count):
        for name in plan.column_layers:
            parameters += block.get_submodule(name).parameters()
        parameters += [block.get_parameter(f"{name}.weight") for name in plan.row_layers]
    return parameters


def apply_tensor_parallel(task: Task, mesh: DeviceMesh) -> None:
    """Split every block in place: its column and row layers get DTensor parameters."""
    for block, plan in check_tensor_parallel(task, mesh.size()):
        styles: dict[str, ParallelStyle] = {
            name: StackedColwiseParallel(stacked) if stacked > 1 else ColwiseParallel()
            for name, stacked in plan.column_layers.items()
        }
        styles |= {name: RowwiseParallel() for name in plan.row_layers}
        parallelize_module(block, mesh, styles, src_data_rank=None)  # no broadcast: every process has the same weights
        for name in plan.attentions:
            attention: Any = block.get_submodule(name)
            attention.heads //= mesh.size()
        for name in plan.head_norms:
            for parameter in block.get_submodule(name).parameters():
                parameter.register_hook(
                    partial(_all_reduce, group=mesh.get_group())
                )  # each process has some heads only


def _all_reduce(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.all_reduce(value.contiguous(), "sum", group)


class StackedColwiseParallel(ParallelStyle):
    """ColwiseParallel for a layer whose output stacks several tensors, such as queries, keys and values: each is split by itself.

    The weight is a DTensor with torch's `_StridedShard`. Its matrix product is local, since torch 2.11 has none for this placement.
    """

    def __init__(self, stacked: int) -> None:
        self.stacked = stacked

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, self._partition)
        module.forward = partial(_linear, cast(nn.Linear, module), device_mesh)  # type: ignore[method-assign]
        return module

    def _partition(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        placement = _StridedShard(0, split_factor=self.stacked)
        for key, parameter in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(shard, requires_grad=parameter.requires_grad))


def _linear(layer: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """B N D → this process's channels of each stacked tensor. The gradient of x is summed over the mesh."""
    x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    weight, bias = cast(DTensor, layer.weight), cast(DTensor | None, layer.bias)
    return F.linear(x, weight.to_local(), None if bias is None else bias.to_local())
