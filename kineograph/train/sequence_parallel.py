"""Sequence parallelism from outside: each process of a group has a run of a clip's tokens through all blocks. In attention they exchange:
before it each gives away heads for tokens, so that it has all tokens of some heads, and after it the other way round.

Every operation here has its true adjoint on the way back, and every process takes the loss of the whole sequence. So each process's
gradients are a part, of the blocks, or all, of what stands outside them, and the mean over processes of the group is right for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.parallel_plan import ParallelPlan
from kineograph.core.task import Task
from kineograph.train.tensor_parallel import check_splits


def spread_sequence(task: Task, group: Any) -> None:
    """Hang the exchanges into every block of the task."""
    found = check_splits(task, "sequence", dist.get_world_size(group))
    stacks: dict[str, list[tuple[nn.Module, ParallelPlan]]] = {}
    names = {id(module): name for name, module in task.named_modules()}
    for block, rules in found:  # blocks that follow one another stand in one list
        stacks.setdefault(names[id(block)].rpartition(".")[0], []).append((block, rules))
    for blocks in stacks.values():
        run = _Run(group)
        for number, (block, rules) in enumerate(blocks):
            block.register_forward_pre_hook(_into(run, rules, first=number == 0))
            for name in rules.mixes:
                attention: Any = block.get_submodule(name)
                attention.heads //= run.count
                for layer, stacked in rules.columns.items():
                    if layer.startswith(f"{name}."):
                        block.get_submodule(layer).register_forward_hook(_heads_apart(run, stacked))
                for layer in rules.rows:
                    if layer.startswith(f"{name}."):
                        block.get_submodule(layer).register_forward_pre_hook(_tokens_apart(run))
        blocks[-1][0].register_forward_hook(
            lambda module, inputs, output, run=run: _Gather.apply(output, run.sizes, group)
        )


class _Run:
    """The tokens of the sequence that is now on its way, and which of them are here."""

    def __init__(self, group: Any) -> None:
        self.group, self.count, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.sizes: list[int] = []

    def begin(self, tokens: int) -> None:
        each, more = divmod(tokens, self.count)
        self.sizes = [each + (rank < more) for rank in range(self.count)]

    def mine(self, value: Tensor) -> Tensor:
        """B N … → B n …"""
        return value.narrow(1, sum(self.sizes[: self.rank]), self.sizes[self.rank])


def _into(run: _Run, rules: ParallelPlan, first: bool) -> Callable[..., Any]:
    """What a block is given, as far as it is along the tokens, is cut down to those that are here."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        taken = list(inputs)
        if first:
            run.begin(inputs[rules.along[0]].shape[1])
        for place in rules.along if first else rules.along[1:]:
            taken[place] = run.mine(inputs[place])
        return tuple(taken)

    return hook


def _heads_apart(run: _Run, stacked: int) -> Callable[..., Any]:
    """B n (s h d) → B N (s h/r d)"""

    @torch.compiler.disable  # the compiler would reorder what processes say to one another
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        sent = rearrange(output, "b n (s r c) -> (r n) b s c", s=stacked, r=run.count)
        here = run.sizes[run.rank]
        got = _Exchange.apply(sent, [here] * run.count, run.sizes, run.group)
        return rearrange(got, "n b s c -> b n (s c)")

    return hook


def _tokens_apart(run: _Run) -> Callable[..., Any]:
    """B N (h/r d) → B n (h d)"""

    @torch.compiler.disable
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        sent = rearrange(inputs[0], "b n c -> n b c")
        here = run.sizes[run.rank]
        got = _Exchange.apply(sent, run.sizes, [here] * run.count, run.group)
        return (rearrange(got, "(r n) b c -> b n (r c)", r=run.count), *inputs[1:])

    return hook


class _Exchange(torch.autograd.Function):
    """All-to-all along the first axis: so many rows to each process, so many from each."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, give: list[int], take: list[int], group: Any) -> Tensor:
        ctx.give, ctx.take, ctx.group = give, take, group
        return _exchanged(value, give, take, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchanged(gradient, ctx.take, ctx.give, ctx.group), None, None, None


def _exchanged(value: Tensor, give: list[int], take: list[int], group: Any) -> Tensor:
    received = value.new_empty(sum(take), *value.shape[1:])
    dist.all_to_all_single(received, value.contiguous(), take, give, group=group)
    return received


class _Gather(torch.autograd.Function):
    """B n … of every process → B N … on all; on the way back the sum of what all ask of the tokens that are here."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        padded = value.new_zeros(value.shape[0], max(sizes), *value.shape[2:])
        padded[:, : value.shape[1]] = value
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        rank = dist.get_rank(ctx.group)
        return total.narrow(1, sum(ctx.sizes[:rank]), ctx.sizes[rank]), None, None
