"""The window of 3D nearby attention (3DNA): earlier tokens within a range in time, height and width.

The tokens of a clip lie on a grid (T, Y, X) in raster order, k = (t · Y + y) · X + x. The network reads [BOS, token 0, …,
token N − 2]; position i predicts token i. It attends to BOS and to token k (at position k + 1) if k < i and k lies in the
window around token i: on all sides in earlier frames, only backwards in its own frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from kineograph.core.errors import ConfigError

Grid = tuple[int, int, int]  # frames, rows, columns


@dataclass(frozen=True)
class Window:
    """`size`: frames (the current and earlier ones), rows and columns (centred). `dilation` d takes every d-th, d times as far."""

    size: tuple[int, int, int]
    dilation: int = 1

    def __post_init__(self) -> None:
        frames, rows, columns = self.size
        if frames < 1 or min(rows, columns) < 1 or rows % 2 == 0 or columns % 2 == 0:
            raise ConfigError(
                f"window={list(self.size)} has no centre: use [frames, rows, columns] of at least 1, with odd rows and columns, such as [5, 3, 3]"
            )
        if self.dilation < 1:
            raise ConfigError(f"dilation={self.dilation}: use 1 or more")

    @property
    def frames(self) -> int:
        """Frames from the oldest visible one to the current one, inclusive: what a cache must hold."""
        return (self.size[0] - 1) * self.dilation + 1

    def offsets(self) -> list[tuple[int, int, int]]:
        """Offsets (t, y, x) of all visible tokens; each precedes in raster order: (t, y, x) < (0, 0, 0)."""
        t, y, x = self.size
        steps = product(range(1 - t, 1), range(-(y // 2), y // 2 + 1), range(-(x // 2), x // 2 + 1))
        return [(a * self.dilation, b * self.dilation, c * self.dilation) for a, b, c in steps if (a, b, c) < (0, 0, 0)]

    def covers(self, grid: Grid) -> bool:
        """Whether every position sees everything before it."""
        t, y, x = self.size
        near = t >= grid[0] and y // 2 >= grid[1] - 1 and x // 2 >= grid[2] - 1
        return near and (self.dilation == 1 or grid == (1, 1, 1))


def grid_coordinates(index: Tensor, grid: Grid) -> Tensor:
    """(t, y, x) of raster indices, n → n 3; t may exceed the grid's frames."""
    _, rows, columns = grid
    return torch.stack([index // (rows * columns), index // columns % rows, index % columns], dim=-1)


@dataclass(frozen=True)
class Neighbours:
    """Lookup tables of a window on a grid, for any number of frames. A neighbour's raster offset is the same everywhere;
    whether it is inside the grid depends on the position in the frame. W is padded with columns that are never visible."""

    back: Tensor  # W, int64
    inside: Tensor  # (Y X) W, bool

    @staticmethod
    def build(grid: Grid, window: Window, device: torch.device | str | None = None) -> Neighbours:
        _, rows, columns = grid
        steps = torch.tensor(window.offsets(), dtype=torch.int64, device=device).reshape(-1, 3)  # W 3
        back = -(steps[:, 0] * rows + steps[:, 1]) * columns - steps[:, 2]
        _, y, x = grid_coordinates(torch.arange(rows * columns, device=device), grid)[..., None].unbind(
            1
        )  # (Y X) 1 each
        y, x = y + steps[:, 1], x + steps[:, 2]  # (Y X) W
        inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        # With BOS a multiple of 16, which fused attention takes without copying the mask.
        spare = -(len(back) + 1) % 16
        return Neighbours(F.pad(back, (0, spare)), F.pad(inside, (0, spare)))

    def visible(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Visible tokens of positions, n → n W, and which of them exist."""
        tokens = index[:, None] - self.back
        return tokens, self.inside.index_select(0, index % self.inside.shape[0]) & (tokens >= 0)


def nearby_mask(grid: Grid, window: Window | None, device: torch.device | str | None = None) -> Tensor:
    """N N, bool: input positions that each position attends to. Without a window: all before it."""
    length = prod(grid)
    if window is None:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()
    tokens, seen = Neighbours.build(grid, window, device).visible(torch.arange(length, device=device))
    positions = F.pad(torch.where(seen, tokens + 1, 0), (1, 0))  # N 1+W; BOS is position 0
    return torch.zeros(length, length, dtype=torch.bool, device=device).scatter_(1, positions, True)


class TableCache:
    """Tables cached per grid, window and device, each as an attribute. torch.compile guards the one attribute it reads,
    so another grid's table triggers no recompilation; with a dict or a cached function it would."""
