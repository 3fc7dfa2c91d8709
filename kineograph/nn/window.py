"""Which tokens of a clip a place may see: those in a window around it in time, height and width that come before it.

The tokens of a clip lie on a grid (T, Y, X) and are written in raster order, token k at k = (t · Y + y) · X + x. The network reads
[BOS, token 0, …, token N − 2]; position i predicts token i and stands at that token's place. It sees BOS, and token k (at position k + 1)
if k < i and k lies in the window around place i. Earlier frames are seen on all sides of the place, its own frame only as far as it is drawn.
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
    """`size` frames, rows and columns: the place's own frame and those before it, and as many rows and columns on either side. `dilation` d
    takes every d-th of each, d times as far."""

    size: tuple[int, int, int]
    dilation: int = 1

    def __post_init__(self) -> None:
        frames, rows, columns = self.size
        if frames < 1 or min(rows, columns) < 1 or rows % 2 == 0 or columns % 2 == 0:
            raise ConfigError(
                f"window={list(self.size)} has no middle: use [frames, rows, columns] from 1 on with odd rows and columns, such as [5, 3, 3]"
            )
        if self.dilation < 1:
            raise ConfigError(f"dilation={self.dilation} steps nowhere: use 1 or more")

    @property
    def frames(self) -> int:
        """Frames between the oldest that is seen and the present one, both counted: what a cache must keep, however long the clip."""
        return (self.size[0] - 1) * self.dilation + 1

    def offsets(self) -> list[tuple[int, int, int]]:
        """Steps in t, y and x from a place to every token that it may see; each comes before it in raster order: t, y, x < 0, 0, 0."""
        t, y, x = self.size
        steps = product(range(1 - t, 1), range(-(y // 2), y // 2 + 1), range(-(x // 2), x // 2 + 1))
        return [(a * self.dilation, b * self.dilation, c * self.dilation) for a, b, c in steps if (a, b, c) < (0, 0, 0)]

    def covers(self, grid: Grid) -> bool:
        """Whether every place sees all that comes before it."""
        t, y, x = self.size
        near = t >= grid[0] and y // 2 >= grid[1] - 1 and x // 2 >= grid[2] - 1
        return near and (self.dilation == 1 or grid == (1, 1, 1))


def places(index: Tensor, grid: Grid) -> Tensor:
    """t, y and x of tokens in raster order, n → n 3. Frames beyond the grid's go on."""
    _, rows, columns = grid
    return torch.stack([index // (rows * columns), index // columns % rows, index % columns], dim=-1)


@dataclass(frozen=True)
class Neighbours:
    """A window on a grid as tables. How far back in raster order a neighbour lies is the same for every place; whether it is on the grid
    depends on the place within the frame. So they hold for any number of frames, and a place is looked up without asking the device. W has some
    spare columns that are never seen."""

    back: Tensor  # W, int64
    inside: Tensor  # (Y X) W, bool

    @staticmethod
    def of(grid: Grid, window: Window, device: torch.device | str | None = None) -> Neighbours:
        _, rows, columns = grid
        steps = torch.tensor(window.offsets(), dtype=torch.int64, device=device).reshape(-1, 3)  # W 3
        back = -(steps[:, 0] * rows + steps[:, 1]) * columns - steps[:, 2]
        _, y, x = places(torch.arange(rows * columns, device=device), grid)[..., None].unbind(1)  # (Y X) 1 each
        y, x = y + steps[:, 1], x + steps[:, 2]  # (Y X) W
        inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        spare = (
            -(len(back) + 1) % 16
        )  # with BOS a multiple of 16, which fused attention takes without a copy of the mask
        return Neighbours(F.pad(back, (0, spare)), F.pad(inside, (0, spare)))

    def seen(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that places may see, n → n W, and which of them exist."""
        tokens = index[:, None] - self.back
        return tokens, self.inside.index_select(0, index % self.inside.shape[0]) & (tokens >= 0)


def nearby_mask(grid: Grid, window: Window | None, device: torch.device | str | None = None) -> Tensor:
    """N N, bool: which input positions a place may see. Without a window: all that came before."""
    length = prod(grid)
    if window is None:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()
    tokens, seen = Neighbours.of(grid, window, device).seen(torch.arange(length, device=device))
    positions = F.pad(torch.where(seen, tokens + 1, 0), (1, 0))  # N 1+W; BOS is position 0
    return torch.zeros(length, length, dtype=torch.bool, device=device).scatter_(1, positions, True)


class Shelf:
    """Tables that are made once for a grid, a window and a device, each an attribute. torch.compile looks them up while tracing, as it could not in
    a dict or a cached function: it guards the one attribute that it read, so that another grid's table does not make it compile anew."""
