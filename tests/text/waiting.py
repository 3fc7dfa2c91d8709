"""Catches what would wait for the device: numbers that Python asks a tensor for, and shapes that depend on values."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(func.overloadpacket.__name__ == name for name in _WAITS):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
