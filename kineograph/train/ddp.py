"""Gradients of all processes, joined. Losses are sums; both ways here give the mean over processes, and the Stepper knows of how many."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Task
from kineograph.core.transfer import to_device

_MIB = 2**20


class LossModule(nn.Module):
    """The whole way from a batch to a player's loss, as the one forward pass that DDP wants to see."""

    def __init__(self, task: Task, player: str) -> None:
        super().__init__()
        self.task, self.player = task, player

    def forward(self, batch: Batch, noise: Noise) -> Loss:
        return self.task.loss(self.player, self.task(batch, noise))


class Replicated:
    """DDP around a task with one player: gradients are reduced while the backward pass still runs."""

    def __init__(self, task: Task, bucket_mb: float, find_unused: bool) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its heir is not in every torch yet
            self.module = DistributedDataParallel(
                LossModule(task, task.players[0]),
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

    With `find_unused` a parameter may have no gradient. Each bucket then ends with a number for each of its parameters: how many processes
    have one. Only a process that lacks some looks at these numbers; one that has all knows what they say, and waits for nothing.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], bucket_mb: float, find_unused: bool = True, group: Any = None
    ) -> None:
        self.parameters, self.find_unused, self.group = dict(parameters), find_unused, group
        self.size = int(bucket_mb * _MIB)
        self.world = dist.get_world_size(group)

    @torch.no_grad()
    def __call__(self) -> None:
        """A parameter that took no part anywhere has no gradient afterwards either."""
        if self.world == 1:
            return
        absent = [name for name, p in self.parameters.items() if p.grad is None]
        if absent and not self.find_unused:
            raise ConfigError(
                f"train.parallel.find_unused=false: {absent[0]} took no part in this step"
                + (f", nor did {len(absent) - 1} other parameters" if len(absent) > 1 else "")
                + ", and the other processes wait for its gradient; set it to true"
            )
        lacking = {id(self.parameters[name]) for name in absent}
        for name in absent:
            self.parameters[name].grad = torch.zeros_like(self.parameters[name])
        under_way: deque[_Bucket] = deque()
        doubtful: list[_Bucket] = []
        for parameters in self._buckets():
            under_way.append(self._reduce(parameters, lacking))
            if not lacking.isdisjoint(map(id, parameters)):
                doubtful.append(under_way[-1])
            if len(under_way) > 2:  # each is a copy of its gradients
                self._finish(under_way.popleft())
        for bucket in under_way:
            self._finish(bucket)
        for bucket in doubtful:
            for p, having in zip(bucket.parameters, bucket.having.tolist(), strict=True):
                if not having:
                    p.grad = None

    def _reduce(self, parameters: list[nn.Parameter], lacking: set[int]) -> _Bucket:
        gradients = [_gradient(p).flatten() for p in parameters]
        if self.find_unused:
            there = [id(p) not in lacking for p in parameters]
            like = gradients[0]
            host = None if all(there) else torch.tensor(there, dtype=like.dtype)
            gradients.append(like.new_ones(len(there)) if host is None else to_device(host, like.device))
        flat = torch.cat(gradients)
        return _Bucket(parameters, flat, dist.all_reduce(flat, group=self.group, async_op=True))

    def _finish(self, bucket: _Bucket) -> None:
        bucket.work.wait()
        bucket.flat.div_(self.world)
        sizes = [p.numel() for p in bucket.parameters]
        *parts, bucket.having = bucket.flat.split([*sizes, len(bucket.flat) - sum(sizes)])
        for p, part in zip(bucket.parameters, parts, strict=True):
            _gradient(p).copy_(part.view_as(p))
        bucket.having = bucket.having.clone()  # a view would keep the copy of the gradients alive
        del bucket.flat

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Of one type, their gradients together of about the size of a bucket."""
        bucket: list[nn.Parameter] = []
        filled = 0
        for p in self.parameters.values():
            if bucket and (filled >= self.size or _gradient(p).dtype != _gradient(bucket[0]).dtype):
                yield bucket
                bucket, filled = [], 0
            bucket.append(p)
            filled += p.numel() * _gradient(p).element_size()
        if bucket:
            yield bucket


@dataclass
class _Bucket:
    """Gradients on their way."""

    parameters: list[nn.Parameter]
    flat: Tensor
    work: Any
    having: Tensor = field(init=False)  # the share of processes that have a gradient, a number for each parameter


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
