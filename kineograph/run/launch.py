"""Start and end of the process group. Launchers tell each process its place in variables of their own; the same command runs on all.

torchrun --nproc-per-node 4 -m kineograph train muse-tiny
mpirun -n 4 python -m kineograph train muse-tiny
srun -n 4 python -m kineograph train muse-tiny
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kineograph.core.errors import InputError, KineoError, RunFailed, Stopped

PORT = 29400
_START = timedelta(minutes=30)  # for all processes to come, until the config says how long one waits for another
_A_MONTH = 30 * 24 * 3600.0  # seconds
_FAULT = "kineograph/fault"  # in the group's store: who failed first, and with which exit code


@dataclass(frozen=True)
class Place:
    """Of this process among those of the job, as its launcher says."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


class Echo(KineoError):
    """What ended another process ends this one too. It has been said there: this one is silent."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


# What launchers say ------------------------------------------------------------------------------------------------


def placed(env: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place; None where nothing launched it together with others."""
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun, and whoever sets the variables by hand
        return _place(env, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if int(env.get("WORLD_SIZE", 1)) > 1:
        raise InputError(f"WORLD_SIZE={env['WORLD_SIZE']} without RANK: start with torchrun, or set both")
    for launcher, *names in (
        (
            "mpirun",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        # The step's own count: a batch script has SLURM_NTASKS too, and is one process.
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ):
        if names[0] in env and _count(env.get(names[1], "1")) > 1:
            return _place(env, launcher, *names)
    return None


def _place(env: Mapping[str, str], launcher: str, rank: str, world: str, local: str, per_node: str) -> Place:
    size = _count(env[world])
    local_world = _count(env.get(per_node, env[world]))
    address = env.get("MASTER_ADDR")
    if address is None and launcher == "srun":
        address = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1")
    if address is None:
        if local_world < size:
            raise InputError(
                f"{size} processes, {local_world} of them on this machine, and MASTER_ADDR is not set: name the host of rank 0, "
                "such as mpirun -x MASTER_ADDR=node1 …"
            )
        address = "127.0.0.1"
    return Place(
        launcher=launcher,
        rank=int(env[rank]),
        world=size,
        local_rank=int(env.get(local, int(env[rank]) % local_world)),
        local_world=local_world,
        address=address,
        port=int(env.get("MASTER_PORT") or PORT + int(env.get("SLURM_JOB_ID") or 0) % 10_000),
    )


def _count(text: str) -> int:
    """`4`, or SLURM's `4(x2),3`: of the first node."""
    return int(re.match(r"\d+", text)[0])  # type: ignore[index]


def first_host(nodes: str) -> str:
    """`gpu[07-09,12],cpu1` → gpu07"""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return found[1] + (found[2] or "") if found else nodes


# The group ---------------------------------------------------------------------------------------------------------


@contextmanager
def sharing() -> Iterator[None]:
    """`together` for commands whose processes meet at the end: one with little to do waits for the others as long as they take."""
    with together():
        wait_at_most(_A_MONTH)
        yield


@contextmanager
def together() -> Iterator[None]:
    """Inside, the processes of this job are one group; with a single process, or in a group that is there already, nothing happens.

    An error that ends one process ends all: the first to fail says why, the others follow silently with its exit code.
    """
    place = placed()
    if place is None or _started():
        yield
        return
    import torch.distributed as dist

    from kineograph.core import distributed

    _start(place)
    try:
        yield
    except BaseException as error:
        told = distributed.describe_peer_failure(error)
        if told is not None:  # a process that was killed says nothing itself
            error = RunFailed(f"rank {place.rank}: {told}; run the same command to go on from the last checkpoint")
        code = error.exit_code if isinstance(error, KineoError) else 1
        if isinstance(error, Stopped) and place.rank:  # all of them stop, and the first one says so
            raise Echo(code) from error
        if isinstance(error, Exception) and not isinstance(error, Stopped) and not _is_first_fault(place, code):
            raise Echo(_fault_code(code)) from error
        raise error
    else:
        dist.barrier()  # rank 0 may hold the store that the others still speak through
        dist.destroy_process_group()
    finally:
        distributed.reset_data_group()


def _started() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _start(place: Place) -> None:
    import torch

    os.environ.update(
        {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.port),
        }
    )
    backend = "gloo"
    if torch.cuda.is_available():
        if place.local_rank >= torch.cuda.device_count() and place.local_world > torch.cuda.device_count():
            raise InputError(
                f"{place.local_world} processes on a machine with {torch.cuda.device_count()} GPUs: start one process a GPU"
            )
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"  # what processes say to one another stays on the host
    try:
        _join(backend, place)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"rank {place.rank} of {place.world} did not reach the others at {place.address}:{place.port} ({error}): "
            "check MASTER_ADDR and MASTER_PORT, and that as many processes were started"
        ) from None


def _join(backend: str, place: Place) -> None:
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=_START)
        return
    # torchrun's own store outlives the processes that it starts again, with the addresses of those that are gone in it. So each attempt
    # gets a shelf of its own there.
    shared = dist.TCPStore(place.address, place.port, place.world, is_master=False, timeout=_START)
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", shared)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=_START)


def wait_at_most(seconds: float) -> None:
    """How long a process waits for another from here on (`train.timeout`)."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    if _started():
        _set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)  # the only way after the start


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _is_first_fault(place: Place, code: int) -> bool:
    """Whether this process was the first to fail, which it then has told the others."""
    mine = json.dumps({"rank": place.rank, "exit_code": code})
    try:
        return _store().compare_set(_FAULT, "", mine).decode() == mine
    except Exception:  # the store went with the process that held it, and that one has spoken
        return False


def _fault_code(code: int) -> int:
    with suppress(Exception):
        return int(json.loads(_store().get(_FAULT))["exit_code"])
    return code


# Saying things once ------------------------------------------------------------------------------------------------


def speaks() -> bool:
    """Whether this process is the one that talks to people: the only one, or rank 0."""
    place = placed()
    return place is None or place.rank == 0
