"""Token shift: part of what a place knows is moved there from the tokens next to it, before any attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.nn.window import Grid, places


@dataclass(frozen=True)
class ShiftCache:
    """The shifted channels of the last frame's worth of tokens; token k is in slot k mod (Y · X)."""

    kept: Tensor  # B (Y X) 2s: those that move in t, then those that move in y
    grid: Grid

    def clear(self) -> None:
        self.kept.zero_()


class TokenShift(nn.Module):
    """A quarter of the channels comes from the token one frame before the place, one from the token above it, one from the token left of it;
    the last quarter stays. Zero where there is no such token.

    As in nearby attention a position stands at the place that it predicts. The token left of that place is the one that the position itself
    holds, so the third quarter stays too, save at the start of a row, where the token held lies at the end of the row before.
    """

    def forward(self, x: Tensor, grid: Grid, cache: ShiftCache | None = None) -> Tensor:
        """B N D by input position → B N D. A cache is filled, for `step` to go on."""
        (_, rows, columns), length = grid, x.shape[1]
        where = places(torch.arange(length, device=x.device), grid)[..., None] > 0  # N 3 1
        share = x.shape[2] // 4
        t, y, rest = x.split([share, share, x.shape[2] - 2 * share], dim=2)
        if cache is not None:
            self._fill(cache, x[..., : 2 * share])
        # token k is at position k + 1: a step of one frame is Y · X − 1 positions, of one row X − 1
        return self._join(_later(t, rows * columns - 1), _later(y, columns - 1), rest, where, share)

    @staticmethod
    def _join(t: Tensor, y: Tensor, rest: Tensor, where: Tensor, share: int) -> Tensor:
        """`where` is n 3 1: whether a place has a token before it in t, y and x."""
        moved = [torch.where(has, part, 0) for has, part in zip(where.unbind(1), (t, y, rest[..., :share]))]
        return torch.cat([*moved, rest[..., share:]], dim=2)

    def cache(
        self, batch: int, width: int, grid: Grid, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> ShiftCache:
        kept = torch.zeros(batch, grid[1] * grid[2], 2 * (width // 4), device=device, dtype=dtype)
        return ShiftCache(kept, grid)

    @staticmethod
    def _fill(cache: ShiftCache, moving: Tensor) -> None:
        """With the last frame's worth of tokens among the positions given, B n 2s."""
        length, frame = moving.shape[1], cache.kept.shape[1]
        first = max(1, length - frame)
        slots = (torch.arange(first, length, device=moving.device) - 1) % frame
        cache.kept.index_copy_(1, slots, moving[:, first:].to(cache.kept.dtype))

    def step(self, x: Tensor, index: Tensor, cache: ShiftCache) -> Tensor:
        """One position, B 1 D, `index` its number on the device."""
        index, frame, columns = index.view(1), cache.kept.shape[1], cache.grid[2]
        share = x.shape[2] // 4
        # Position i holds token i − 1. BOS goes where token −1 would be: no place asks for it before it is written over.
        cache.kept.index_copy_(1, (index - 1) % frame, x[..., : 2 * share].to(cache.kept.dtype))
        t = cache.kept.index_select(1, index % frame)[..., :share].to(x.dtype)  # token i − Y · X
        y = cache.kept.index_select(1, (index - columns) % frame)[..., share:].to(x.dtype)
        where = places(index, cache.grid)[..., None] > 0
        return self._join(t, y, x[..., 2 * share :], where, share)


def _later(x: Tensor, positions: int) -> Tensor:
    """B N s, moved on by some positions, zeros first."""
    return F.pad(x, (0, 0, positions, 0))[:, : x.shape[1]]
