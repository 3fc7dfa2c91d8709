"""Which process this is, and reductions over all of them. With one process every function is the identity."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kineograph.core.errors import InputError


def active() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if active() else 0


def world() -> int:
    return dist.get_world_size() if active() else 1


def is_first() -> bool:
    return rank() == 0


def sum_(value: Tensor) -> Tensor:
    """Sum over processes, in place; without gradient."""
    if active():
        dist.all_reduce(value)
    return value


def gather(value: Tensor) -> Tensor:
    """The rows of all processes in the order of their ranks, each having equally many: B … → world · B ….

    Every process's loss depends on every row, so a row's gradient is the sum of what all of them send back. With gradients of
    parameters summed over processes, the result is the gradient that one process with all rows would have.
    """
    return _Gather.apply(value) if active() else value


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        parts = [torch.empty_like(value) for _ in range(world())]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(world())[rank()]


def from_first(value: int) -> int:
    """The first process's number, for all."""
    if not active():
        return value
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    told = torch.tensor([value], dtype=torch.int64, device=device)
    dist.broadcast(told, 0)
    return int(told)


def barrier() -> None:
    if active():
        dist.barrier()


def gather_rows(value: Tensor) -> Tensor:
    """The rows of all processes in the order of their ranks, however many each has (also none); without gradient."""
    if not active():
        return value
    counts = torch.zeros(world(), dtype=torch.int64, device=value.device)
    counts[rank()] = len(value)
    sizes = sum_(counts).tolist()
    padded = value.new_zeros(max(sizes), *value.shape[1:])
    padded[: len(value)] = value
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def device_of(name: str = "auto") -> torch.device:
    """`auto` is this process's GPU where there is one."""
    if name != "auto":
        return _checked(name)
    if torch.cuda.is_available():
        return torch.device("cuda", rank() % torch.cuda.device_count())
    return torch.device("cpu")


def _checked(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:1") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(
            f"device {name} is not there: this machine has {count} CUDA devices; use auto or cpu (kineo doctor shows more)"
        )
    return device
