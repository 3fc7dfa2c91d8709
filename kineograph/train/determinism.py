"""`train.deterministic`: the same command on the same kind of device gives the same losses and weights, bit by bit.

Data order, noise and drawings are keyed (core/noise.py) and need no switch. The order of additions varies: kernels with atomic
additions (the backward passes of attention and of indexing), algorithms that libraries choose by timing them, and NVSwitch reductions.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kineograph.core import distributed
from kineograph.core.errors import ConfigError, InputError, RunFailed

_WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic."""
_NO_IMPLEMENTATION = "does not have a deterministic implementation"


def check_deterministic_device(device: torch.device) -> None:
    """Refuse devices for which torch promises nothing."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"train.deterministic=true works on cpu and cuda, and train.device={device.type}: use one of those, or deterministic=false"
        )


def set_deterministic_environment() -> None:
    """Set the variables that cuBLAS and NCCL read at their first use; refuse values that the user has set otherwise."""
    allowed: dict[str, tuple[str, ...]] = {"CUBLAS_WORKSPACE_CONFIG": _WORKSPACES}
    if distributed.is_active():
        # Reductions inside NVSwitch (NVLS) add in the order of arrival.
        allowed["NCCL_NVLS_ENABLE"] = ("0",)
    for name, values in allowed.items():
        if os.environ.setdefault(name, values[0]) not in values:
            raise InputError(
                f"train.deterministic=true needs {name}={' or '.join(values)}, and it is {os.environ[name]}: unset it"
            )


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Allow only algorithms that give the same bits every time. An operation that has none fails, by name."""
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.benchmark, cudnn.deterministic, memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # also: torch.compile chooses nothing by timing it
    cudnn.benchmark, cudnn.deterministic = False, True
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it helps to debug, and is slow
    try:
        _check_cublas(device)
        yield
    except RuntimeError as error:
        operation = re.search(rf"(\S+) {_NO_IMPLEMENTATION}", str(error))
        if operation is None:
            raise
        raise RunFailed(
            f"train.deterministic=true: torch has no deterministic implementation of {operation[1]} on {device.type}; "
            "train without what needs it, on the CPU (train.device=cpu), or with train.deterministic=false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, cudnn.deterministic, memory.fill_uninitialized_memory = flags  # type: ignore[attr-defined]


@contextmanager
def allow_all_algorithms() -> Iterator[None]:
    """Inside `deterministic_algorithms`, let operations run that have no deterministic one: metrics and drawings change no weights."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f".*{_NO_IMPLEMENTATION}")
            yield
    finally:
        torch.use_deterministic_algorithms(True)


def _check_cublas(device: torch.device) -> None:
    """Refuse a process in which cuBLAS began before `set_deterministic_environment`."""
    if device.type != "cuda":
        return
    one = torch.ones(1, 1, device=device)
    try:
        one @ one
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        raise InputError(
            f"train.deterministic=true: this process used cuBLAS before; set CUBLAS_WORKSPACE_CONFIG={_WORKSPACES[0]} before Python starts"
        ) from None
