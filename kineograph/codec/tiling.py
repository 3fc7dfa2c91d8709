"""A clip in pieces: chunks of time that follow one another, tiles of the picture that overlap and are blended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def chunk_spans(count: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of each chunk: `size` each, and what is left over goes to the first."""
    chunks = max(count // size, 1)
    first = count - size * (chunks - 1)
    return [(0, first), *((first + size * i, first + size * (i + 1)) for i in range(chunks - 1))]


@dataclass(frozen=True)
class Tiling:
    """Tiles that begin `stride` apart, in what is read, and are blended over `overlap`, in what is written."""

    size: tuple[int, int]
    stride: tuple[int, int]
    overlap: tuple[int, int]
    limit: tuple[int, int]  # what is kept of a tile: the next one begins there

    @staticmethod
    def of(pixels: tuple[int, int], share: tuple[float, float], factor: int, decoding: bool) -> Tiling:
        """`pixels` of a tile on a side and the share of it that overlaps; a latent covers `factor` pixels."""
        size = [side // factor for side in pixels]
        overlap = [int(side * part) for side, part in zip(size, share, strict=True)]
        stride = [side - part for side, part in zip(size, overlap, strict=True)]
        read, write = (1, factor) if decoding else (factor, 1)
        return Tiling(_times(size, read), _times(stride, read), _times(overlap, write), _times(stride, write))

    def needed(self, height: int, width: int) -> bool:
        return height > self.size[0] or width > self.size[1]

    def run(self, x: Tensor, code: Callable[[Tensor], Tensor]) -> Tensor:
        """`code` on each tile of … H W, joined. Two rows of tiles are held at a time."""
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


def _times(pair: list[int], factor: int) -> tuple[int, int]:
    return pair[0] * factor, pair[1] * factor


def _blend(before: Tensor, after: Tensor, extent: int, dim: int) -> None:
    """The beginning of `after` rises from the end of `before`, linearly; in place."""
    extent = min(before.shape[dim], after.shape[dim], extent)
    shape = [1] * after.dim()
    shape[dim] = extent
    rise = (torch.arange(extent, device=after.device, dtype=torch.float32) / max(extent, 1)).view(shape)
    head = after.narrow(dim, 0, extent)
    tail = before.narrow(dim, before.shape[dim] - extent, extent)
    head.copy_(tail * (1 - rise) + head * rise)
