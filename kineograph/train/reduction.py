"""Gradients of all processes, joined. Losses are sums; both ways here give the mean over processes, and the Stepper knows of how many."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Task

_MIB = 2**20


class Descent(nn.Module):
    """The whole way from a batch to a player's loss, as the one forward pass that DDP wants to see."""

    def __init__(self, task: Task, player: str) -> None:
        super().__init__()
        self.task, self.player = task, player

    def forward(self, batch: Batch, noise: Noise) -> Loss:
        return self.task.loss(self.player, self.task(batch, noise))


class Replicated:
    """DDP around a task with one player: gradients are reduced while the backward pass still runs."""

    def __init__(self, task: Task, bucket_mb: float, find_unused: bool, group: Any = None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its heir is not in every torch yet
            self.module = DistributedDataParallel(
                Descent(task, task.players[0]),
                process_group=group,
                broadcast_buffers=False,  # what changes buffers reduces over ranks by itself
                bucket_cap_mb=bucket_mb,
                find_unused_parameters=find_unused,
                gradient_as_bucket_view=True,
            )

    def loss(self, batch: Batch, noise: Noise) -> Loss:
        try:
            return self.module(batch, noise)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise ConfigError(
                "train.parallel.find_unused=false: some parameters took no part in the last step, and the others wait for their gradients; "
                "set it to true"
            ) from None

    def last_of(self, last: bool) -> AbstractContextManager[Any]:
        """Around each micro-batch: only the last of a step reduces."""
        return nullcontext() if last else self.module.no_sync()


class Reduction:
    """Mean of gradients over a group after the last backward pass, in buckets.

    For what DDP does not take: the players of one step walk back over one shared forward pass, each in a backward of its own, with the others'
    parameters asleep, and DDP's reducer expects one backward for each forward, in which every parameter takes part. Also for parameters
    of which some are cut over processes, or sharded, and some are not.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_mb: float, group: Any = None) -> None:
        self.parameters, self.group = list(parameters), group
        self.size = int(bucket_mb * _MIB)
        self.world = dist.get_world_size(group)

    @torch.no_grad()
    def __call__(self) -> None:
        """A parameter that took no part anywhere has no gradient afterwards either; all processes must agree on that."""
        if not self.parameters:
            return
        there = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.uint8)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=self.group)
        taking_part = [p for p, found in zip(self.parameters, there.tolist(), strict=True) if found]
        for p in taking_part:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        under_way: deque[tuple[Tensor, Any, list[Tensor]]] = deque()
        for bucket in self._buckets(taking_part):
            under_way.append(self._reduce(bucket))
            if len(under_way) > 2:  # each is a copy of its gradients
                self._finish(*under_way.popleft())
        for reduced in under_way:
            self._finish(*reduced)

    def _finish(self, flat: Tensor, work: Any, gradients: list[Tensor]) -> None:
        work.wait()
        flat.div_(self.world)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _reduce(self, gradients: list[Tensor]) -> tuple[Tensor, Any, list[Tensor]]:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        return flat, dist.all_reduce(flat, group=self.group, async_op=True), gradients

    def _buckets(self, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
        """Gradients of one type, together of about the size of a bucket."""
        bucket: list[Tensor] = []
        filled = 0
        for p in parameters:
            assert p.grad is not None
            if bucket and (filled >= self.size or p.grad.dtype != bucket[0].dtype):
                yield bucket
                bucket, filled = [], 0
            bucket.append(p.grad)
            filled += p.grad.numel() * p.grad.element_size()
        if bucket:
            yield bucket
