"""The window of 3D nearby attention (3DNA): earlier tokens within a range in time, height and width.

The tokens of a clip lie on a grid (T, Y, X) in raster order, k = (t · Y + y) · X + x. The network reads [BOS, token 0, …,
token N − 2]; position i predicts token i. It attends to BOS and to token k (at position k + 1) if k < i and k lies in the
window around token i: on all sides in earlier frames, only backwards in its own frame.

The last rows of each frame may hold the tokens of its sound (`Window.sound_rows`). They have no place in the picture, so a sound
token sees all tokens before it in the frames of the window, and every token sees all sound of the earlier ones.
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
    """`size`: frames (the current and earlier ones), rows and columns (centred). `dilation` d takes every d-th, d times as far.

    `sound_rows`: rows at the end of each frame that hold its sound.
    """

    size: tuple[int, int, int]
    dilation: int = 1
    sound_rows: int = 0

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
        near = t >= grid[0] and y // 2 >= grid[1] - self.sound_rows - 1 and x // 2 >= grid[2] - 1
        return near and (self.dilation == 1 or grid == (1, 1, 1))


def grid_coordinates(index: Tensor, grid: Grid) -> Tensor:
    """(t, y, x) of raster indices, n → n 3; t may exceed the grid's frames."""
    _, rows, columns = grid
    return torch.stack([index // (rows * columns), index // columns % rows, index % columns], dim=-1)


@dataclass(frozen=True)
class Neighbours:
    """Lookup tables of a window on a grid, for any number of frames, by the position in the frame. W is padded with columns that
    are never visible."""

    back: Tensor  # (Y X) W, int64: how many tokens earlier
    inside: Tensor  # (Y X) W, bool: whether there is such a token in the grid

    @staticmethod
    def build(grid: Grid, window: Window, device: torch.device | str | None = None) -> Neighbours:
        _, rows, columns = grid
        rows -= window.sound_rows
        steps = torch.tensor(window.offsets(), dtype=torch.int64, device=device).reshape(-1, 3)  # W 3
        back = -(steps[:, 0] * grid[1] + steps[:, 1]) * columns - steps[:, 2]
        _, y, x = grid_coordinates(torch.arange(grid[1] * columns, device=device), grid)[..., None].unbind(
            1
        )  # (Y X) 1 each
        is_sound = y >= rows
        y, x = y + steps[:, 1], x + steps[:, 2]  # (Y X) W
        inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        back = back.expand_as(inside)
        if window.sound_rows:
            whole, is_seen = _see_frames(grid, window, back.device)
            back = torch.cat([back, whole], dim=1)
            inside = torch.cat([inside & ~is_sound, is_seen], dim=1)
        # With BOS a multiple of 16, which fused attention takes without copying the mask.
        spare = -(back.shape[1] + 1) % 16
        return Neighbours(F.pad(back, (0, spare)), F.pad(inside, (0, spare)))

    def visible(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Visible tokens of positions, n → n W, and which of them exist."""
        place = index % self.inside.shape[0]
        tokens = index[:, None] - self.back.index_select(0, place)
        return tokens, self.inside.index_select(0, place) & (tokens >= 0)


def _see_frames(grid: Grid, window: Window, device: torch.device) -> tuple[Tensor, Tensor]:
    """All tokens of the window's frames as seen from each position: how many tokens earlier, and whether they are visible."""
    area = grid[1] * grid[2]
    first_sound = area - window.sound_rows * grid[2]
    place = torch.arange(area, device=device)  # of the position, and of the other token
    ages = torch.arange(window.size[0], device=device) * window.dilation  # frames earlier
    back = ages[:, None] * area + place[:, None, None] - place  # (Y X) ages (Y X)
    is_sound = place >= first_sound
    seen = (is_sound[:, None, None] | is_sound).expand_as(back) & (back > 0)
    return back.flatten(1), seen.flatten(1)


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
