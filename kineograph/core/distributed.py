"""Which process this is, and reductions over all of them. With one process every function is the identity.

Processes that hold one model together (tensor and sequence parallel) see the same batch: they are one *data rank*. Reductions here are
over data ranks, so that nothing is counted twice.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kineograph.core import errors
from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.text_file import escape_controls, parse_json

T = TypeVar("T")
_alone = False


@contextmanager
def single_process() -> Iterator[None]:
    """Treat this process as the only one, for work that the others do not share. Not while a checkpoint is saved in the background.

    The flag is no thread-local: compiled code reads it too.
    """
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def is_active() -> bool:
    return not _alone and dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_active() else 0


def world() -> int:
    return dist.get_world_size() if is_active() else 1


def is_first() -> bool:
    return rank() == 0


def local_rank() -> int:
    """This process's number on its machine, from the launcher."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def local_world() -> int:
    """Processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if is_active() else 1


class World(NamedTuple):
    """Processes that share a run, present or planned."""

    processes: int = 1
    local: int = 1
    """Those on one machine."""


def current_world() -> World:
    return World(world(), local_world())


_LOST = re.compile(
    r"[Cc]onnection (was likely )?(reset|closed|refused)|closed by peer|[Bb]roken pipe|[Tt]imed? ?out|remote (process|peer)|communicator was aborted"
)


def describe_group_failure(error: BaseException) -> str | None:
    """A message for an error of NCCL or gloo, which means that another process is gone or that this one failed; None for other errors."""
    text = str(error)
    is_network = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    if not is_network and (not isinstance(error, RuntimeError) or not re.search(r"[Gg]loo|NCCL|nccl|TCPStore", text)):
        return None
    plain = re.sub(r"\[/[^]]*\]\s*", "", text.splitlines()[0]).partition(". ")[0]
    if is_network or _LOST.search(text):
        return f"another process of the job is gone or does not answer ({plain})"
    reason = " ".join(text.partition("Last error:")[2].split())  # NCCL's own words
    hint = " (NCCL_DEBUG=WARN shows more)" if "nccl" in text.lower() else ""
    return f"the processes cannot communicate: {plain}{f': {reason}' if reason else ''}{hint}"


# Who sees which data -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    """This process's data rank, their number, and their process group; None: all processes."""

    rank: int
    world: int
    group: dist.ProcessGroup | None


_data: _Data | None = None  # like torch's own default group: one layout at a time


def set_data_group(rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """Make this process data rank `rank` of `world` in `group`."""
    global _data
    _data = _Data(rank, world, group)


def reset_data_group() -> None:
    """Make every process a data rank."""
    global _data
    _data = None


def data_rank() -> int:
    return _data.rank if _data is not None and is_active() else rank()


def data_world() -> int:
    return _data.world if _data is not None and is_active() else world()


def is_data_leader() -> bool:
    """Whether this process is the first of its data rank, and sends for all of it."""
    return rank() % (world() // data_world()) == 0


def _group() -> dist.ProcessGroup | None:
    return _data.group if _data is not None else None


# Numbers of all data ranks -----------------------------------------------------------------------------------------


def all_reduce_(value: Tensor) -> Tensor:
    """Sum over data ranks, in place; without gradient."""
    if is_active():
        dist.all_reduce(value, group=_group())
    return value


def broadcast_(value: Tensor) -> Tensor:
    """Broadcast from the first data rank, in place, for random numbers that all ranks share."""
    if is_active():
        dist.broadcast(value, group=_group(), group_src=0)
    return value


def all_gather_with_grad(value: Tensor) -> Tensor:
    """Concatenate the rows of all data ranks, of which each has equally many: B … → world · B ….

    Every rank's loss depends on every row, so the gradient of a row is the sum over ranks. With the gradients of parameters summed over
    ranks too, the result is the gradient of one process with all rows.
    """
    if not is_active():
        return value
    # The backward pass of an all-to-all of copies is the sum over ranks, with gloo too.
    sizes = [len(value)] * data_world()
    group = _group() or dist.distributed_c10d._get_default_group()
    return all_to_all_with_grad(value.expand(data_world(), *value.shape).flatten(0, 1), sizes, sizes, group)


def all_to_all_with_grad(
    value: Tensor, output_sizes: list[int], input_sizes: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange rows: send `input_sizes[r]` of them to rank r of the group and receive `output_sizes[r]`."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    # The copy waits for the result. Compiled modules lose the gradient of one that is not waited for.
    return all_to_all_single_autograd(value.contiguous(), output_sizes, input_sizes, group).clone()


def all_gather_rows(value: Tensor) -> Tensor:
    """The rows of all data ranks in their order, however many each has (also none); without gradient."""
    if not is_active():
        return value
    return torch.cat(_gather_rows(value, data_world(), _group()))


def count_rows_before(count: int, device: torch.device) -> int:
    """The index of this rank's first row in `all_gather_rows`, where it has `count` of them."""
    return int(all_gather_rows(torch.tensor([count], device=device))[: data_rank()].sum()) if is_active() else 0


def _gather_rows(value: Tensor, world: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The rows of each of the `world` processes of a group."""
    counts = [torch.empty(1, dtype=torch.int64, device=value.device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(value)], device=value.device), group=group)
    sizes = torch.cat(counts).tolist()
    padded = value.new_zeros(max(sizes), *value.shape[1:])
    padded[: len(value)] = value
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


# Objects of all processes --------------------------------------------------------------------------------------------


def run_on_first(work: Callable[[], T]) -> T | None:
    """Do `work` on the first rank. → its result there, None elsewhere. Its error is raised on all ranks, if it is one for people."""
    if not is_active():
        return work()
    result, failure = None, None
    if is_first():
        try:
            result = work()
        except errors.KineoError as error:
            failure = error
    said = broadcast_object(failure and [type(failure).__name__, str(failure)])
    if failure is not None:
        raise failure
    if said is not None:
        raise getattr(errors, said[0], errors.RunFailed)(said[1])
    return result


def barrier() -> None:
    if is_active():
        dist.barrier()


def broadcast_object(value: Any) -> Any:
    """Broadcast rank 0's value as JSON (nothing is pickled)."""
    if not is_active():
        return value
    text = torch.tensor(list(json.dumps(value).encode() if is_first() else b""), dtype=torch.uint8)
    size = torch.tensor([len(text)])
    dist.broadcast(size, 0)
    text = text if is_first() else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return parse_json(bytes(text.tolist()))


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, by rank, as JSON. `group`: a CPU group of all ranks; None: the default one."""
    return _gather_json(value, world(), group, "cpu") if is_active() else [value]


def data_all_gather_object(value: Any, device: torch.device | str = "cpu") -> list[Any]:
    """The values of all data ranks, in order, as JSON. `device`: one that their group can communicate on."""
    return _gather_json(value, data_world(), _group(), device) if is_active() else [value]


def _gather_json(value: Any, world: int, group: dist.ProcessGroup | None, device: torch.device | str) -> list[Any]:
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [parse_json(part.cpu().numpy().tobytes()) for part in _gather_rows(text.to(device), world, group)]


def print_note(line: str) -> None:
    """Print a line to stderr."""
    # One write: lines of several processes would mix.
    print(f"{escape_controls(line)}\n", end="", file=sys.stderr, flush=True)


def on_first_rank(note: Note) -> Note:
    """`note`, called on the first rank only."""

    def note_if_first(line: str) -> None:
        if is_first():
            note(line)

    return note_if_first


def all_gather_floats(values: Sequence[float]) -> list[list[float]]:
    """[rank][i] of equally many numbers of every process."""
    mine = torch.tensor(values, dtype=torch.float64)
    if not is_active():
        return [mine.tolist()]
    parts = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(parts, mine)
    return torch.stack(parts).tolist()


def gather_tensors(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """[rank][i] of CPU tensors, of any number and shape per process: all on the first rank, elsewhere its own alone."""
    specs = all_gather_object([[str(value.dtype).removeprefix("torch."), *value.shape] for value in tensors])
    if not is_first():
        for value in tensors:
            dist.send(value.contiguous(), 0)
        return [list(tensors) if other == rank() else [] for other in range(world())]
    gathered = [list(tensors)]
    for other, tensor_specs in enumerate(specs[1:], start=1):
        gathered.append([torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, *shape in tensor_specs])
        for value in gathered[-1]:
            dist.recv(value, other)
    return gathered


def resolve_device(name: str = "auto") -> torch.device:
    """`auto` is this process's GPU where there is one. A GPU becomes the current one, to which new streams and events belong."""
    device = _parse_device(name) if name != "auto" else _choose_device()
    # Before CUDA is initialised, GPU 0 is the current one: a process that computes nothing takes no memory of it.
    if device.type == "cuda" and device.index is not None and (device.index or torch.cuda.is_initialized()):
        torch.cuda.set_device(device)
    return device


def _choose_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def _parse_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        is_available = torch.get_device_module(device).is_available()
    except RuntimeError:
        raise InputError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:1") from None
    if device.type != "cuda" and not is_available:
        raise InputError(f"device {name} is not there: use auto or cpu (kineo doctor shows more)")
    count = torch.cuda.device_count() if is_available else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(
            f"device {name} is not there: this machine has {count} CUDA devices; use auto or cpu (kineo doctor shows more)"
        )
    if device.type == "cuda" and device.index is not None and local_world() > 1:
        raise InputError(f"device {name} is one GPU for {local_world()} processes: use auto, which gives each its own")
    return device
