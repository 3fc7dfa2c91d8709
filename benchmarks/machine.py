"""The hardware, software and commit of a measurement."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

COMMIT_VARIABLE = "KINEO_COMMIT"
"""The commit, for a copy of the tree without git history."""


@dataclass(frozen=True)
class Machine:
    device: str
    cores: int
    python: str
    torch: str
    cuda: str | None
    commit: str | None
    matmul_tflops: float


def describe(device: torch.device, matmul_flops: float) -> Machine:
    return Machine(
        device=get_device_name(device),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if device.type == "cuda" else None,
        commit=find_commit(),
        matmul_tflops=round(matmul_flops / 1e12, 3),
    )


def get_device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def slugify_device(device: torch.device) -> str:
    """The device in a file name: `cpu`, `nvidia-h200`."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def find_commit() -> str | None:
    if os.environ.get(COMMIT_VARIABLE):
        return os.environ[COMMIT_VARIABLE]
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
