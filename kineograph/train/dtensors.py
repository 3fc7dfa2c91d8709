"""Parameters of which each process holds a part: what is known of the whole, and how one is made of the other.

Optimizers and averages work on parts alone, as plain tensors: their arithmetic is elementwise, and a part of a parameter is updated like
the whole. Only norms, saving and loading look across processes, through here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


class Piece(Protocol):
    """Of one parameter."""

    groups: tuple[Any, ...]
    """Process groups over which its parts lie."""


class Sharded:
    """A parameter that FSDP2 keeps as a DTensor; its part is the local tensor."""

    def __init__(self, parameter: DTensor) -> None:
        self.mesh, self.placements = parameter.device_mesh, parameter.placements
        self.shape, self.stride = parameter.shape, parameter.stride()
        self.groups = tuple(
            self.mesh.get_group(number) for number, at in enumerate(self.placements) if isinstance(at, Shard)
        )

    def distributed(self, part: Tensor) -> DTensor:
        """The parameter, or something else with its rows: the scales of 8-bit moments."""
        shape, stride = self.shape, self.stride
        if part.shape[1:] != shape[1:]:  # FSDP2 cuts rows
            whole = torch.empty(self.shape[0], *part.shape[1:], device="meta")
            shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)


class Cut:
    """A matrix (or its bias) that is cut along `dim` over a group, each of its `stacked` equal members alike: queries, keys and values."""

    def __init__(self, group: Any, dim: int, stacked: int = 1) -> None:
        self.group, self.dim, self.stacked = group, dim, stacked
        self.groups = (group,)

    def whole(self, part: Tensor) -> Tensor:
        """Put together what all processes of the group have; each must ask."""
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        joined = torch.stack([piece.transpose(0, self.dim) for piece in parts])  # ranks, stacked · n, …
        return rearrange(joined, "r (s n) ... -> (s r n) ...", s=self.stacked).transpose(0, self.dim)

    def part(self, whole: Tensor) -> Tensor:
        """This process's."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        by_rank = rearrange(whole.transpose(0, self.dim), "(s r n) ... -> r (s n) ...", s=self.stacked, r=size)
        return by_rank[rank].transpose(0, self.dim).contiguous()


class Whole:
    """What every process has."""

    groups: tuple[Any, ...] = ()


WHOLE = Whole()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """What an optimizer moves: the parameter itself, or its part, in the same memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad)


def total_norm(gradients: list[Tensor], pieces: list[Piece]) -> Tensor:
    """√Σ |g|² over all processes' parts, each once. `gradients` are parts."""
    by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient, piece in zip(gradients, pieces, strict=True):
        by_groups.setdefault(piece.groups, []).append(gradient)
    if by_groups.keys() <= {()}:
        return torch.nn.utils.get_total_norm(gradients)
    squares = []
    for groups, found in by_groups.items():
        square = torch.nn.utils.get_total_norm(found).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()
