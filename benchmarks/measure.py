"""Measure one call: synchronised time, peak memory, floating-point operations."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call."""

    ms: float
    """Median, with the device synchronised before and after each call."""
    low: float
    high: float
    """Quartiles."""
    pipelined_ms: float
    """Mean over calls issued back to back with one synchronisation at the end, as in a training loop."""
    repeats: int
    peak_gib: float | None
    """GPU memory reserved by the process, pools of CUDA graphs included; on a CPU its resident memory."""


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(call: Callable[[], object], device: torch.device, warmup: int, repeat: int) -> Timing:
    """Time `call` after a warm-up, which covers compilation and first-use costs."""
    for _ in range(warmup):
        call()
    synchronise(device)
    reset_peak(device)
    seconds = []
    for _ in range(repeat):
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    synchronise(device)
    pipelined = (time.perf_counter() - start) / repeat
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if repeat > 1 else seconds * 3
    return Timing(
        ms=1000 * statistics.median(seconds),
        low=1000 * low,
        high=1000 * high,
        pipelined_ms=1000 * pipelined,
        repeats=repeat,
        peak_gib=read_peak_gib(device),
    )


# Memory ----------------------------------------------------------------------------------------------------------


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # drop memory of the warm-up
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # on Linux, 5 resets the peak of resident memory
            Path("/proc/self/clear_refs").write_text("5")


def read_peak_gib(device: torch.device) -> float | None:
    if device.type == "cuda":
        # Reserved, not allocated: replayed CUDA graphs allocate nothing but hold their pools.
        return torch.cuda.max_memory_reserved(device) / 2**30
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20  # in KiB
    return None


def release_memory(device: torch.device) -> None:
    """Free the memory of the last case, compiled graphs included."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Arithmetic ------------------------------------------------------------------------------------------------------


class _FlopCounter(TorchDispatchMode):
    """Sums torch's own FLOP formula of each operator.

    torch's FlopCounterMode also tracks modules, and fails on steps that call autograd.grad (adaptive weights, gradient penalties).
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:  # inference mode does not decompose composite operators
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


def count_flops(call: Callable[[], object]) -> float:
    """Floating-point operations of one eager call: matrix products, convolutions and attention, forward and backward."""
    with _FlopCounter() as operations:
        call()
    return float(operations.total)


def measure_matmul_flops(device: torch.device, small: bool = False) -> float:
    """FLOP/s of a large matrix product on this device, the denominator of MFU; bf16 on a GPU, fp32 on a CPU.

    On random data, since zeros run faster.
    """
    size = 8192 if device.type == "cuda" else 512 if small else 2048
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timing = time_calls(lambda: left @ right, device, warmup=3, repeat=10)
    return 2 * size**3 / (timing.ms / 1000)
