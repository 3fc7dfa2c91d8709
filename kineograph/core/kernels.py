"""Attention kernels that torch does not bring along: FlashAttention 3, for Hopper GPUs (H100, H200).

torch has a door for it (torch.nn.attention.activate_flash_attention_impl), behind which it takes the place of torch's own flash kernel in this
process. It comes from a build of FlashAttention (module flash_attn_interface), or as a library inside xformers, which is loaded without
importing the package. On an H200, 17,776 tokens of 30 heads of 64 run forward and backward at 535 TFLOP/s, by cuDNN at 425, by torch's own at 283.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

HOPPER = 9
LONG = 1024
"""Tokens from which on it is taken. The gain was measured at 17,776; shorter ones stay with what torch chooses."""

_FAILS = (ImportError, OSError, RuntimeError, AttributeError)  # of another CUDA, or of a torch without the door

flash3 = False  # whether the door is open


def find_kernels(device: torch.device) -> bool:
    """Open the door for work on this device, where kernels are installed. → whether `attend` takes them."""
    global flash3
    if _is_hopper(device):
        flash3 = _opened() is None
    return flash3


def missing(device: torch.device) -> str | None:
    """Why a Hopper GPU does without them; None: it has them, or is another GPU."""
    return _opened() if _is_hopper(device) else None


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def _opened() -> str | None:
    """Once a process. → what failed, or None."""
    try:
        module = _load()
        if module is None:
            return "neither xformers nor flash_attn_interface is installed"
        from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
        from torch.nn.attention._fa3 import register_flash_attention_fa3

        register_flash_attention_impl("FA3", register_fn=partial(register_flash_attention_fa3, module))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of replacing a kernel, which is what is wanted
            activate_flash_attention_impl("FA3")
    except _FAILS as error:
        return f"{type(error).__name__}: {error}"
    return None


def _load() -> str | None:
    """→ the module that torch is to import for its kernels, loaded by now."""
    if find_spec("flash_attn_interface") is not None:
        import_module("flash_attn_interface")
        return "flash_attn_interface"
    found = find_spec("xformers")
    library = Path(found.origin).parent / "flash_attn_3" / "_C.so" if found is not None and found.origin else None
    if library is None or not library.is_file():
        return None
    nvidia = find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or () if nvidia is not None else ():
        runtime = Path(folder) / "cuda_runtime" / "lib" / "libcudart.so.12"  # it was built for this one
        if runtime.is_file():
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))
    return "torch"  # where the kernels are now
