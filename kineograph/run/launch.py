"""Start and end the process group. The same command runs under torchrun, mpirun and srun.

torchrun --nproc-per-node 4 -m kineograph train muse-tiny
mpirun -n 4 python -m kineograph train muse-tiny
srun -n 4 python -m kineograph train muse-tiny
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from kineograph.core.errors import InputError, RunFailed

DEFAULT_PORT = 29400
NO_TIMEOUT = 30 * 24 * 3600.0  # seconds: a month
_START_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class LauncherEnv:
    """Rank, world size and rendezvous address of this process, as its launcher set them."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


# Environment variables of each launcher: rank, world size, local rank, processes on this machine.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OTHER_LAUNCHERS = (
    ("mpirun", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")),
    ("mpirun", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    # SLURM_STEP_NUM_TASKS, not SLURM_NTASKS: a batch script sets the latter too and is one process.
    ("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
)  # fmt: skip


def read_launcher_env(env: Mapping[str, str] = os.environ) -> LauncherEnv | None:
    """Return what the launcher set, or None for a single process."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return _parse_env(env, "torchrun", *_TORCHRUN)
    if int(env.get("WORLD_SIZE", 1)) > 1:
        raise InputError(f"WORLD_SIZE={env['WORLD_SIZE']} without RANK: start with torchrun, or set both")
    for launcher, names in _OTHER_LAUNCHERS:
        if names[0] in env and _parse_count(env.get(names[1], "1")) > 1:
            return _parse_env(env, launcher, *names)
    return None


def is_main_process() -> bool:
    """Whether this is the only process, or rank 0."""
    env = read_launcher_env()
    return env is None or env.rank == 0


def _parse_env(env: Mapping[str, str], launcher: str, rank: str, world: str, local: str, per_node: str) -> LauncherEnv:
    size = _parse_count(env[world])
    local_world = _parse_count(env.get(per_node, env[world]))
    address = env.get("MASTER_ADDR")
    if address is None and launcher == "srun":
        address = first_slurm_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1")
    if address is None:
        if local_world < size:
            raise InputError(
                f"{size} processes, {local_world} of them on this machine, and MASTER_ADDR is not set: name the host of rank 0, "
                "such as mpirun -x MASTER_ADDR=node1 …"
            )
        address = "127.0.0.1"
    return LauncherEnv(
        launcher=launcher,
        rank=int(env[rank]),
        world=size,
        local_rank=int(env.get(local, int(env[rank]) % local_world)),
        local_world=local_world,
        address=address,
        port=int(env.get("MASTER_PORT") or DEFAULT_PORT + int(env.get("SLURM_JOB_ID") or 0) % 10_000),
    )


def _parse_count(text: str) -> int:
    """`4`, or SLURM's `4(x2),3`: the count of the first node."""
    return int(re.match(r"\d+", text)[0])  # type: ignore[index]


def first_slurm_host(nodes: str) -> str:
    """`gpu[07-09,12],cpu1` → gpu07"""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return match[1] + (match[2] or "") if match else nodes


@contextmanager
def process_group(timeout: float | None = None) -> Iterator[None]:
    """Join the job's process group. Does nothing in a single process or inside another `process_group`.

    `timeout`: seconds that a rank waits for another; NO_TIMEOUT for commands whose ranks only meet at the end.
    """
    env = read_launcher_env()
    if env is None or _is_initialized():
        yield
        return
    import torch.distributed as dist

    from kineograph.core import distributed

    _initialize(env)
    if timeout is not None:
        set_group_timeout(timeout)
    try:
        yield
    except Exception as error:
        failure = distributed.describe_group_failure(error)
        if failure is None:
            raise
        raise RunFailed(f"{failure}; run the same command to go on from the last checkpoint") from error
    else:
        dist.barrier()  # rank 0 may host the store: it must not leave first
        dist.destroy_process_group()
    finally:
        distributed.reset_data_group()


def _is_initialized() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _initialize(env: LauncherEnv) -> None:
    import torch

    os.environ.update(
        {
            "RANK": str(env.rank),
            "WORLD_SIZE": str(env.world),
            "LOCAL_RANK": str(env.local_rank),
            "LOCAL_WORLD_SIZE": str(env.local_world),
            "MASTER_ADDR": env.address,
            "MASTER_PORT": str(env.port),
        }
    )
    backend = "gloo"
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        sees_only_its_own = "SLURM_GPUS_PER_TASK" in os.environ
        if env.local_rank >= gpus and env.local_world > gpus and not sees_only_its_own:
            raise InputError(f"{env.local_world} processes on a machine with {gpus} GPUs: start one process per GPU")
        torch.cuda.set_device(env.local_rank % gpus)
        backend = "cpu:gloo,cuda:nccl"
    try:
        _init_process_group(backend, env)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"rank {env.rank} of {env.world} did not reach the others at {env.address}:{env.port} ({error}): "
            "check MASTER_ADDR and MASTER_PORT, and that all processes were started"
        ) from None


def _init_process_group(backend: str, env: LauncherEnv) -> None:
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=_START_TIMEOUT)
        return
    # torchrun's store survives a restart, with the addresses of dead processes in it: use one prefix per attempt.
    agent_store = dist.TCPStore(env.address, env.port, env.world, is_master=False, timeout=_START_TIMEOUT)
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", agent_store)
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world, timeout=_START_TIMEOUT)


def set_group_timeout(seconds: float) -> None:
    """Set how long a rank waits for another from here on (`train.timeout`)."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    if _is_initialized():
        _set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)  # torch has no public way after the start
