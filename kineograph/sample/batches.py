"""How many rows are drawn at a time: as many as asked for, or as many as the GPU's memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

from kineograph.core import heartbeat

T = TypeVar("T")
MOST = 32  # rows at a time, where memory allows them
SHARE = 0.8  # of the free memory: the rest is left for fragmentation


class RowBatches:
    """Calls a function for some rows at a time.

    Without a given number, a GPU draws the first row alone and takes as many as fit by the memory that it took, at most
    `most`; a CPU takes `most`. When memory runs out, the number is halved and the same rows are tried again.
    """

    def __init__(
        self,
        rows: int | None = None,
        device: torch.device | str = "cpu",
        *,
        most: int = MOST,
        measure: bool = True,
        retry: bool = True,
        key: str = "--batch",
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.rows, self.device = rows or most, torch.device(device)
        self.key, self.note, self.retry = key, note, retry
        self._measure = rows is None and measure and self.device.type == "cuda"

    def map(self, total: int, function: Callable[[slice], T]) -> Iterator[T]:
        """Apply `function` to slices of the rows 0 … total − 1, in order."""
        start = 0
        while start < total:
            heartbeat.beat()
            left = total - start
            measures = self._measure and left > 1
            count = 1 if measures else min(self.rows, left)
            before = _read_memory(self.device) if measures else None
            try:
                result = function(slice(start, start + count))
            except torch.OutOfMemoryError:
                if count == 1 or not self.retry:
                    raise
            else:
                if before is not None:
                    self._choose_rows(before)
                yield result
                del result
                start += count
                continue
            # Outside the handler: the error holds the frames, and they hold the tensors.
            self.rows, self._measure = count // 2, False
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.note(
                f"out of memory with {count} rows at a time: going on with {self.rows} (set {self.key} to {self.rows} or less)"
            )

    def _choose_rows(self, before: Memory) -> None:
        """Take as many rows as fit, by the memory that one has taken."""
        now = _read_memory(self.device, reset=False)
        taken = max(1, now.peak - before.allocated)
        self.rows, self._measure = max(1, min(self.rows, int(SHARE * now.free / taken))), False


class Memory(NamedTuple):
    """Bytes of a GPU."""

    allocated: int
    peak: int
    free: int  # also what the allocator holds and does not use


def _read_memory(device: torch.device, reset: bool = True) -> Memory:
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free = torch.cuda.mem_get_info(device)[0] + reserved - allocated
    return Memory(allocated, torch.cuda.max_memory_allocated(device), free)
