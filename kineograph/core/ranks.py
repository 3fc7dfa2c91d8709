"""Which process this is, and reductions over all of them. With one process every function is the identity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kineograph.core.errors import InputError

_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process counts as the only one: for what it does without the others, which must not wait for them."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def active() -> bool:
    return not _alone and dist.is_available() and dist.is_initialized()


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


def table(values: Sequence[float]) -> list[list[float]]:
    """[rank][i] of a few numbers that every process has."""
    mine = torch.tensor(values, dtype=torch.float64)
    if not active():
        return [mine.tolist()]
    parts = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(parts, mine)
    return torch.stack(parts).tolist()


def tensors_to_first(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """[rank][i] of CPU tensors, however many each process has and of whatever shape: on the first one. Elsewhere its own alone."""
    everyone = gather_json([[str(value.dtype).removeprefix("torch."), *value.shape] for value in tensors])
    if not is_first():
        for value in tensors:
            dist.send(value.contiguous(), 0)
        return [list(tensors) if other == rank() else [] for other in range(world())]
    found = [list(tensors)]
    for other, told in enumerate(everyone[1:], start=1):
        found.append([torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, *shape in told])
        for value in found[-1]:
            dist.recv(value, other)
    return found


def gather_json(value: Any, device: torch.device | str = "cpu") -> list[Any]:
    """What each process has to say, in the order of their ranks: anything that JSON can hold. Nothing is unpickled."""
    if not active():
        return [value]
    line = torch.frombuffer(bytearray(json.dumps(value).encode() + b"\n"), dtype=torch.uint8)
    told = gather_rows(line.to(device)).cpu().numpy().tobytes()
    return [json.loads(part) for part in told.splitlines()]


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
