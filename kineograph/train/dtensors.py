"""Parameters that FSDP2 or tensor parallelism keeps as DTensors: local shards, full tensors, norms.

Optimizers and averages work on the local shards as plain tensors, because their arithmetic is elementwise. Only norms, saving and
loading look across processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def to_local(tensor: Tensor) -> Tensor:
    """The shard of this process, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter that an optimizer updates: this one, or its local shard in the same memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(to_local(parameter.detach()), requires_grad=parameter.requires_grad)


def shard_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """A moment or average of `parameter`'s local shard as a DTensor with its placements; a scalar or plain tensor as it is."""
    if not isinstance(parameter, DTensor) or not shard.ndim:
        return shard
    shape, stride = parameter.shape, parameter.stride()
    if shard.shape != to_local(parameter).shape:  # the scales of 8-bit moments share only the rows, which FSDP2 shards
        full = torch.empty(shape[0], *shard.shape[1:], device="meta")
        shape, stride = full.shape, full.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard.detach(), mesh, placements, run_check=False, shape=shape, stride=stride)


def is_strided(tensor: Tensor) -> bool:
    """Whether the local shard is several separate blocks of rows: queries, keys and values of some heads."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor; every process of its mesh must call this. A plain tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    placement = tensor.placements[0]
    if not isinstance(placement, _StridedShard):
        return tensor.full_tensor()
    # torch 2.11 cannot gather a _StridedShard: gather (stacked, rows / stacked, …) along its second dimension instead.
    stacked = tensor.to_local().unflatten(0, (placement.split_factor, -1))
    return DTensor.from_local(stacked, tensor.device_mesh, [Shard(1)], run_check=False).full_tensor().flatten(0, 1)


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """√Σ |g|² of plain tensors and DTensors together, each element counted once."""
    gradients = list(gradients)
    by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in gradients:
        by_groups.setdefault(_shard_groups(gradient), []).append(to_local(gradient))
    if by_groups.keys() <= {()}:
        return torch.nn.utils.get_total_norm(by_groups.get((), []))
    # Offloaded shards are in main memory; their norm is reduced, and added to the others, on the mesh's device.
    kind = next(gradient.device_mesh.device_type for gradient in gradients if isinstance(gradient, DTensor))
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    squares = []
    for groups, shards in by_groups.items():
        square = torch.nn.utils.get_total_norm(shards).square().to(device)
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _shard_groups(tensor: Tensor) -> tuple[Any, ...]:
    """Process groups over which the shards of a tensor lie; none for a plain or replicated tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    placements = enumerate(tensor.placements)
    return tuple(tensor.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())
