"""Tensor parallelism from outside: the matrices of each block are cut over a group of processes, by the rules that the block states.

    y = Σᵣ f(x Aᵣ) Bᵣ        A in columns, B in rows, f elementwise or within a head: one sum of all processes a pair of matrices

All processes of the group see the same batch, and all that is not cut is computed by each of them alike.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.errors import ConfigError
from kineograph.core.parallel_plan import HasParallelPlan, ParallelPlan
from kineograph.core.task import Task
from kineograph.train.dtensors import Cut, Piece


def check_splits(task: Task, key: str, count: int) -> list[tuple[nn.Module, ParallelPlan]]:
    """The blocks with their rules; a ConfigError where there are none, or where heads do not divide."""
    blocks = task.blocks()
    if not blocks or not all(isinstance(block, HasParallelPlan) for block in blocks):
        raise ConfigError(
            f"train.parallel.{key}={count}: the blocks of {type(task).__name__} do not say how they are cut; use replicate, or shard"
        )
    found = [(block, cast(HasParallelPlan, block).splits()) for block in blocks]
    for block, rules in found:
        for name in rules.heads:
            heads = int(block.get_submodule(name).heads)  # type: ignore[arg-type]
            if heads % count:
                raise ConfigError(
                    f"train.parallel.{key}={count} does not divide the {heads} heads of {type(task).__name__}: use one of "
                    f"{', '.join(str(n) for n in range(2, heads + 1) if heads % n == 0)}"
                )
        for name in (*rules.columns, *rules.rows):
            if type(block.get_submodule(name)) is not nn.Linear:
                raise ConfigError(
                    f"train.parallel.{key}={count}: {name} of {type(task).__name__} has adapters, which are not cut; use replicate or shard"
                )
    return found


def cut_blocks(task: Task, group: Any) -> dict[str, Piece]:
    """Cut every block in place. → the parameters that are cut, by name."""
    count = dist.get_world_size(group)
    names = {id(p): name for name, p in task.named_parameters()}
    pieces: dict[str, Piece] = {}
    for block, rules in check_splits(task, "tensor", count):
        for name, stacked in rules.columns.items():
            layer = cast(nn.Linear, block.get_submodule(name))
            for parameter in layer.parameters():
                pieces[names[id(parameter)]] = _cut(parameter, Cut(group, 0, stacked))
            layer.out_features //= count
            layer.register_forward_pre_hook(lambda module, inputs: (_enter(inputs[0], group), *inputs[1:]))
        for name in rules.rows:
            layer = cast(nn.Linear, block.get_submodule(name))
            pieces[names[id(layer.weight)]] = _cut(layer.weight, Cut(group, 1))
            layer.in_features //= count
            layer.forward = _summed(layer, group)  # type: ignore[method-assign]
        for name in rules.heads:
            module: Any = block.get_submodule(name)
            module.heads //= count
        for name in rules.inside:
            for parameter in block.get_submodule(name).parameters():
                parameter.register_hook(lambda gradient: _sum(gradient, group))  # each process saw its own heads only
    return pieces


def _cut(parameter: Tensor, piece: Cut) -> Piece:
    size = parameter.shape[piece.dim] // piece.stacked
    if size % dist.get_world_size(piece.group):
        raise ConfigError(
            f"train.parallel.tensor={dist.get_world_size(piece.group)} does not divide a layer of {size} channels: use another number"
        )
    parameter.data = piece.part(parameter.data)
    return piece


def _sum(value: Tensor, group: Any) -> Tensor:
    return collectives.all_reduce(value.contiguous(), "sum", group)


class _Enter(torch.autograd.Function):
    """The identity; on the way back, the sum of what each process's columns ask for."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum over processes; on the way back the identity, since all take the same loss of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        return _sum(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _enter(value: Tensor, group: Any) -> Tensor:
    return _Enter.apply(value, group)


def _summed(layer: nn.Linear, group: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        total = _Leave.apply(F.linear(x, layer.weight), group)
        return total if layer.bias is None else total + layer.bias.to(total.dtype)

    return forward
