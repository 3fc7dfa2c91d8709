"""Splits clips into consecutive chunks in time and overlapping, blended tiles in space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def chunk_spans(count: int, size: int) -> list[tuple[int, int]]:
    """Start and end of each chunk of `size`; the first also takes the remainder."""
    chunks = max(count // size, 1)
    first = count - size * (chunks - 1)
    return [(0, first), *((first + size * i, first + size * (i + 1)) for i in range(chunks - 1))]


@dataclass(frozen=True)
class Tiling:
    """Tiles `stride` apart in the input, blended over `overlap` in the output."""

    size: tuple[int, int]
    stride: tuple[int, int]
    overlap: tuple[int, int]
    limit: tuple[int, int]  # of the output kept from each tile; the next one starts there

    @staticmethod
    def build(pixels: tuple[int, int], share: tuple[float, float], factor: int, decoding: bool) -> Tiling:
        """`pixels`: sides of a tile; `share` of it that overlaps; a latent covers `factor` pixels."""
        size = [side // factor for side in pixels]
        overlap = [int(side * part) for side, part in zip(size, share, strict=True)]
        stride = [side - part for side, part in zip(size, overlap, strict=True)]
        read, write = (1, factor) if decoding else (factor, 1)
        return Tiling(_scale(size, read), _scale(stride, read), _scale(overlap, write), _scale(stride, write))

    def is_needed(self, height: int, width: int) -> bool:
        return height > self.size[0] or width > self.size[1]

    def run(self, x: Tensor, code: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `code` to each tile of … H W and join the results. Two rows of tiles are in memory at a time."""
        rows: list[Tensor] = []
        above: list[Tensor] = []
        for top in range(0, x.shape[-2], self.stride[0]):
            row: list[Tensor] = []
            for left in range(0, x.shape[-1], self.stride[1]):
                tile = code(x[..., top : top + self.size[0], left : left + self.size[1]])
                if above:
                    _blend(above[len(row)], tile, self.overlap[0], -2)
                if row:
                    _blend(row[-1], tile, self.overlap[1], -1)
                row.append(tile)
            rows.append(torch.cat([tile[..., : self.limit[0], : self.limit[1]] for tile in row], dim=-1))
            above = row
        return torch.cat(rows, dim=-2)


def _scale(pair: list[int], factor: int) -> tuple[int, int]:
    return pair[0] * factor, pair[1] * factor


def _blend(before: Tensor, after: Tensor, extent: int, dim: int) -> None:
    """Fade the start of `after` in from the end of `before`, linearly and in place."""
    extent = min(before.shape[dim], after.shape[dim], extent)
    shape = [1] * after.dim()
    shape[dim] = extent
    rise = (torch.arange(extent, device=after.device, dtype=torch.float32) / max(extent, 1)).view(shape)
    head = after.narrow(dim, 0, extent)
    tail = before.narrow(dim, before.shape[dim] - extent, extent)
    head.copy_(tail * (1 - rise) + head * rise)
