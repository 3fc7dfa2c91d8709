"""Gradients averaged over processes: by DDP, or after the last backward pass where DDP cannot."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from kineograph.core.batch import Batch
from kineograph.core.device_copy import copy_to_device
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Mean, Task
from kineograph.train.dtensors import to_local


class LossModule(nn.Module):
    """From a batch to a player's loss in one forward pass, as DDP and FSDP2 need it."""

    def __init__(self, task: Task, player: str) -> None:
        super().__init__()
        self.task, self.player = task, player

    def forward(self, batch: Batch, noise: Noise) -> Loss:
        return self.task.loss(self.player, self.task(batch, noise))


class _ExposedTotal(nn.Module):
    """→ the total as a plain tensor beside the loss: DDP's static graph hooks into the tensors of a tuple, and sees none in a Loss."""

    def __init__(self, inner: LossModule) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch, noise: Noise) -> tuple[Tensor, Loss]:
        loss = self.inner(batch, noise)
        return loss.total.sum, loss


class ReplicatedTask:
    """A task with one player in DDP: gradients are reduced while the backward pass runs."""

    def __init__(self, task: Task, bucket_mb: float, find_unused: bool, static_graph: bool = False) -> None:
        self.static_graph = static_graph
        with warnings.catch_warnings():
            # torch 2.11 does not have its successor yet
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            self.module = DistributedDataParallel(
                _ExposedTotal(LossModule(task, task.players[0])),
                broadcast_buffers=False,  # code that updates buffers reduces them itself
                bucket_cap_mb=bucket_mb,
                find_unused_parameters=find_unused and not static_graph,
                static_graph=static_graph,
                gradient_as_bucket_view=True,
            )

    def loss(self, batch: Batch, noise: Noise) -> Loss:
        total, loss = self.module(batch, noise)
        return replace(loss, total=Mean(total, loss.total.count))

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Around each micro-batch: only the last of a step reduces."""
        try:
            with nullcontext() if is_last else self.module.no_sync():
                yield
        except RuntimeError as error:
            if "finished reduction in the prior iteration" in str(error) and not self.static_graph:
                raise ConfigError(
                    "train.parallel.find_unused=false: some parameters got no gradient in the last step; set it to true"
                ) from None
            if "finished reduction" in str(error) or "training graph has changed" in str(error):
                raise ConfigError(
                    "train.parallel.static_graph=true: this step used other parameters than the first; set it to false"
                ) from None
            raise


class GradientAverage:
    """Averages gradients over a group after the last backward pass, in buckets.

    DDP expects one backward pass for each forward pass, over all parameters. The players of one step each run their own backward pass over one
    shared forward pass; and tensor parallelism and FSDP2 leave parameters that need different groups.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        bucket_mb: float,
        find_unused: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.parameters, self.find_unused, self.group = dict(parameters), find_unused, group
        self.bucket_bytes = int(bucket_mb * 2**20)
        self.world = dist.get_world_size(group)

    @torch.no_grad()
    def __call__(self) -> None:
        """Average; a parameter without a gradient on every process keeps none, so the optimizer leaves it alone."""
        if self.world > 1 and self.parameters:
            self._add_missing_gradients()
            for bucket in self._buckets():
                flat = _flatten_dense_tensors(bucket)
                dist.all_reduce(flat, group=self.group)
                flat.div_(self.world)
                torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))

    def _add_missing_gradients(self) -> None:
        """Zeros where another process has a gradient. Only a process that lacks one waits for the answer."""
        missing = [name for name, p in self.parameters.items() if p.grad is None]
        if not self.find_unused:
            if missing:
                raise ConfigError(
                    f"train.parallel.find_unused=false: parameters got no gradient in this step ({len(missing)}, the first is {missing[0]}); "
                    "set it to true"
                )
            return
        is_used = torch.tensor([p.grad is not None for p in self.parameters.values()], dtype=torch.uint8)
        is_used = copy_to_device(is_used, next(iter(self.parameters.values())).device)
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=self.group)
        if missing:
            for p, used in zip(self.parameters.values(), is_used.tolist(), strict=True):
                if used and p.grad is None:
                    p.grad = torch.zeros_like(p)

    def _buckets(self) -> Iterator[list[Tensor]]:
        """Gradients of one dtype, together about as large as a bucket."""
        bucket: list[Tensor] = []
        size = 0
        for gradient in [to_local(p.grad) for p in self.parameters.values() if p.grad is not None]:
            if bucket and (size >= self.bucket_bytes or gradient.dtype != bucket[0].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.nbytes
        if bucket:
            yield bucket
