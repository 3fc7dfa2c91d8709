"""What is saved, copied to the host, so that training goes on while the copy is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Staging:
    """Host buffers by name, kept from one save to the next. On a GPU they are pinned: the copies queue up behind the step that was just
    launched, and the host waits for neither."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: Any = None  # the event behind the last copy

    def copy(self, name: str, value: Tensor) -> Tensor:
        """The buffer that will hold `value` as it is now, once `finish` has returned."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = self._buffers[name] = _buffer_for(value)
        buffer.copy_(value, non_blocking=True)
        if value.is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()
        return buffer

    def finish(self) -> None:
        """Wait until the copies are there; for whoever writes them, in the background."""
        if self._copied is not None:
            self._copied.synchronize()


def _buffer_for(value: Tensor) -> Tensor:
    shape: Mapping[str, Any] = {"size": tuple(value.shape), "dtype": value.dtype}
    if value.is_cuda:
        try:
            return torch.empty(**shape, pin_memory=True)
        except RuntimeError:  # the system allows no more of it: slower, but it works
            pass
    return torch.empty(**shape)
