"""Sequence parallelism, applied to a finished Task: each process of a group runs every block on its own tokens of each clip.

Around self-attention the processes exchange tokens for heads (all-to-all), so that each attends over all tokens of some heads, as in
DeepSpeed-Ulysses. No matrix is split.

Each process computes the loss of the whole sequence, and every collective has its true adjoint. So the mean of gradients over processes is
right both for the blocks, where each process has a part, and for everything outside, where each has all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.distributed import all_to_all_with_grad
from kineograph.core.parallel_plan import ParallelPlan
from kineograph.core.task import Task
from kineograph.train.tensor_parallel import parallel_plans


def apply_sequence_parallel(task: Task, group: dist.ProcessGroup) -> None:
    """Register the exchanges as hooks of every block."""
    names = {module: name for name, module in task.named_modules()}
    stacks: dict[str, list[tuple[nn.Module, ParallelPlan]]] = {}
    for block, plan in parallel_plans(task, "sequence", dist.get_world_size(group)):
        stacks.setdefault(names[block].rpartition(".")[0], []).append((block, plan))  # one ModuleList, one stack
    for stack in stacks.values():
        tokens = _Tokens(group)
        for index, (block, plan) in enumerate(stack):
            block.register_forward_pre_hook(_keep_local_tokens(tokens, plan, is_first=index == 0))
            for name in plan.self_attentions:
                attention: Any = block.get_submodule(name)
                attention.heads //= tokens.world
                for layer, stacked in plan.column_layers.items():
                    if layer.startswith(f"{name}."):
                        block.get_submodule(layer).register_forward_hook(_gather_tokens(tokens, stacked))
                for layer in plan.row_layers:
                    if layer.startswith(f"{name}."):
                        block.get_submodule(layer).register_forward_pre_hook(_gather_heads(tokens))
        stack[-1][0].register_forward_hook(lambda module, inputs, output, tokens=tokens: tokens.all_gather(output))


class _Tokens:
    """How the tokens of the current sequence are divided over a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.world, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.sizes: list[int] = []  # tokens of each process; the first ones have one more where they do not divide

    def divide(self, count: int) -> None:
        each, rest = divmod(count, self.world)
        self.sizes = [each + (rank < rest) for rank in range(self.world)]

    def local(self, value: Tensor) -> Tensor:
        """B N … → B n …"""
        return value.narrow(1, sum(self.sizes[: self.rank]), self.sizes[self.rank])

    def scatter(self, value: Tensor) -> Tensor:
        """N … of which each process gets its tokens → (ranks n) …: this process's tokens from each."""
        return all_to_all_with_grad(value, [self.sizes[self.rank]] * self.world, self.sizes, self.group)

    def gather(self, value: Tensor) -> Tensor:
        """(ranks n) …: this process's tokens for each process → N …"""
        return all_to_all_with_grad(value, self.sizes, [self.sizes[self.rank]] * self.world, self.group)

    def all_gather(self, value: Tensor) -> Tensor:
        """B n … → B N …, the same on all. An all-to-all of copies: unlike all_gather, it takes uneven sizes."""
        copies = value.transpose(0, 1).expand(self.world, *value.transpose(0, 1).shape).flatten(0, 1)
        return self.gather(copies).transpose(0, 1)


def _keep_local_tokens(tokens: _Tokens, plan: ParallelPlan, is_first: bool) -> Callable[..., Any]:
    """Pre-hook of a block. The hidden state is divided before the first block only, the other arguments before each."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if is_first:
            tokens.divide(inputs[plan.token_arguments[0]].shape[1])
        divided = plan.token_arguments if is_first else plan.token_arguments[1:]
        return tuple(tokens.local(value) if index in divided else value for index, value in enumerate(inputs))

    return hook


def _gather_tokens(tokens: _Tokens, stacked: int) -> Callable[..., Any]:
    """Hook behind queries, keys and values: B n (s h d) → B N (s h/r d)"""

    @torch.compiler.disable  # the compiler would reorder collectives
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        by_rank = rearrange(output, "b n (s r c) -> (r n) b s c", s=stacked, r=tokens.world)
        return rearrange(tokens.gather(by_rank), "n b s c -> b n (s c)")

    return hook


def _gather_heads(tokens: _Tokens) -> Callable[..., Any]:
    """Pre-hook of the output projection: B N (h/r d) → B n (h d)"""

    @torch.compiler.disable
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        by_rank = tokens.scatter(rearrange(inputs[0], "b n c -> n b c"))
        return (rearrange(by_rank, "(r n) b c -> b n (r c)", r=tokens.world), *inputs[1:])

    return hook
