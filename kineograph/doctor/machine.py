"""This machine: devices, memory, speed, packages."""

from __future__ import annotations

import gc
import importlib.metadata
import re
import shutil
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from kineograph.core.memory import main_memory

# Package, purpose, how to install it.
OPTIONAL = (
    ("wandb", "train.trackers=[wandb]", "pip install 'kineograph[wandb]'"),
    ("torchmetrics", "FID, KID and IS", "pip install 'kineograph[metrics]'"),
    ("peft", "LoRA adapters of CogVideoX", "pip install 'kineograph[cogvideox]'"),
    ("aiohttp", "--resume-from and init over https://", "pip install 'kineograph[http]'"),
)


def required_packages() -> list[str]:
    """The packages that pyproject.toml declares without an extra."""
    declared = importlib.metadata.requires("kineograph") or []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in declared if "extra ==" not in line]


@dataclass(frozen=True)
class Device:
    name: str
    memory: int  # bytes
    free: int


def installed_version(package: str) -> str | None:
    """The version of a package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def list_gpus() -> list[Device]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Device(torch.cuda.get_device_name(index), total, free))
    return gpus


def driver_version() -> str | None:
    """The version of the NVIDIA driver, if there is one."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        return line.split("Kernel Module")[-1].split()[0]
    except (OSError, IndexError):
        return None


def free_memory(device: torch.device) -> int:
    """Bytes of a device that a run may use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)  # torch's own reserve is free to us
    return main_memory().available


def free_disk(path: Path) -> int:
    """Free bytes of the disk that holds `path`, or will hold it."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def release_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Peak TFLOP/s of dense 16-bit matrix products, by the makers' data sheets; the first name that matches counts.
_PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("A40", 150.0),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L4", 121.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


def peak_flops(name: str, precision: str) -> float | None:
    """Peak FLOP/s of a GPU in 16 bits; None if it is unknown, or for fp32, which has several speeds."""
    if precision not in ("bf16", "fp16"):
        return None
    words = name.split()
    for known, peak in _PEAKS:
        if all(any(word == part or word.startswith(f"{part}-") for word in words) for part in known.split()):
            return peak * 1e12
    return None


@lru_cache(maxsize=1)
def measure_matmul_flops() -> float:
    """FLOP/s of this CPU in a float32 matrix product."""
    size = 512
    a = torch.full((size, size), 0.5)
    torch.mm(a, a)
    began, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - began < 0.05:
        torch.mm(a, a)
        rounds += 1
    return 2 * size**3 * rounds / (time.perf_counter() - began)
