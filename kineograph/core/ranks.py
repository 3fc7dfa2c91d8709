"""Which process this is, and reductions over all of them. With one process every function is the identity."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


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


def mean_(value: Tensor) -> Tensor:
    """Mean over processes, in place; without gradient."""
    return sum_(value).div_(world()) if active() else value


def barrier() -> None:
    if active():
        dist.barrier()


def device_of(name: str = "auto") -> torch.device:
    """`auto` is this process's GPU where there is one."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", rank() % torch.cuda.device_count())
    return torch.device("cpu")
