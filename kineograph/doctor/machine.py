"""The machine that this is: devices, memory, speed, packages."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import shutil
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

OPTIONAL = (  # package, what it is for, how it is installed
    ("wandb", "train.trackers=[wandb]", "pip install 'kineograph[wandb]'"),
    ("torchmetrics", "FID, KID and IS", "pip install 'kineograph[metrics]'"),
    ("diffusers", "CogVideoX weights in and out", "pip install 'kineograph[cogvideox]'"),
    ("peft", "LoRA adapters", "pip install 'kineograph[cogvideox]'"),
)
NEEDED = (
    "torch",
    "numpy",
    "pydantic",
    "pillow",
    "av",
    "tokenizers",
    "transformers",
    "safetensors",
    "vector-quantize-pytorch",
)


@dataclass(frozen=True)
class Device:
    name: str
    memory: int  # bytes
    free: int


def version_of(package: str) -> str | None:
    """Without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> list[Device]:
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Device(torch.cuda.get_device_name(index), total, free))
    return found


def driver() -> str | None:
    """Of the NVIDIA kernel module, where there is one."""
    try:
        return (
            Path("/proc/driver/nvidia/version")
            .read_text(encoding="utf-8")
            .splitlines()[0]
            .split("Kernel Module")[-1]
            .split()[0]
        )
    except (OSError, IndexError):
        return None


def memory() -> tuple[int, int]:
    """Bytes of main memory: all, and what is available to a new process."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        return sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


def free_memory(device: torch.device) -> int:
    """Bytes that a run may take on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)  # what this process keeps in reserve is free to it
    return memory()[1]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy() -> float:
    """Processes that want to run, by core, over the last minute."""
    return os.getloadavg()[0] / cores() if hasattr(os, "getloadavg") else 0.0


def disk_free(path: Path) -> int:
    """Where `path` lies or will lie."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def release_memory() -> None:
    """Give back what was only needed for a while."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def system() -> str:
    return f"{platform.system()} {platform.release()}, {platform.machine()}"


# Dense 16-bit matrix products of the tensor cores, 10¹² operations a second, as their makers state them; the first name that fits counts.
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
    """Of a GPU of this name in 16 bits; None where it is not known, or for fp32, which has several speeds."""
    if precision not in ("bf16", "fp16"):
        return None
    words = name.split()
    for known, peak in _PEAKS:
        if all(any(word == part or word.startswith(f"{part}-") for word in words) for part in known.split()):
            return peak * 1e12
    return None


@lru_cache(maxsize=1)
def matmul_rate() -> float:
    """Floating-point operations a second of this CPU, on a plain float32 matrix product."""
    size = 512
    a = torch.full((size, size), 0.5)
    torch.mm(a, a)
    began, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - began < 0.05:
        torch.mm(a, a)
        rounds += 1
    return 2 * size**3 * rounds / (time.perf_counter() - began)
