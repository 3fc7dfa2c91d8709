"""Token shift: before attention, part of each token's channels is taken from neighbouring tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.nn.window import Grid, grid_coordinates


@dataclass(frozen=True)
class ShiftCache:
    """The shifted channels of the last frame's worth of tokens; token k is in slot k mod (Y · X)."""

    kept: Tensor  # B (Y X) 2s: channels shifted in t, then those shifted in y
    grid: Grid

    def clear(self) -> None:
        self.kept.zero_()


class TokenShift(nn.Module):
    """Take a quarter of the channels from the token one frame back, one from the token above, one from the token to the
    left; the last quarter stays. Zero where there is no such token.

    As in nearby attention, position i is located at the token that it predicts. The token to its left is its own input,
    so the third quarter stays as well, except at the start of a row, where it is zero.
    """

    def forward(self, x: Tensor, grid: Grid, cache: ShiftCache | None = None) -> Tensor:
        """B N D → B N D. Fills `cache`, if given, for `step` to continue."""
        (_, rows, columns), length = grid, x.shape[1]
        where = grid_coordinates(torch.arange(length, device=x.device), grid)[..., None] > 0  # N 3 1
        share = x.shape[2] // 4
        t, y, rest = x.split([share, share, x.shape[2] - 2 * share], dim=2)
        if cache is not None:
            self._fill(cache, x[..., : 2 * share])
        # Token k is at position k + 1: one frame back is Y · X − 1 positions, one row X − 1.
        return self._join(_delay(t, rows * columns - 1), _delay(y, columns - 1), rest, where, share)

    @staticmethod
    def _join(t: Tensor, y: Tensor, rest: Tensor, where: Tensor, share: int) -> Tensor:
        """`where` (n 3 1): whether there is a token before the position in t, y and x."""
        moved = [torch.where(has, part, 0) for has, part in zip(where.unbind(1), (t, y, rest[..., :share]))]
        return torch.cat([*moved, rest[..., share:]], dim=2)

    def cache(
        self, batch: int, width: int, grid: Grid, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> ShiftCache:
        kept = torch.zeros(batch, grid[1] * grid[2], 2 * (width // 4), device=device, dtype=dtype)
        return ShiftCache(kept, grid)

    @staticmethod
    def _fill(cache: ShiftCache, moving: Tensor) -> None:
        """Store the last frame of tokens from `moving`, B n 2s."""
        length, frame = moving.shape[1], cache.kept.shape[1]
        first = max(1, length - frame)
        slots = (torch.arange(first, length, device=moving.device) - 1) % frame
        cache.kept.index_copy_(1, slots, moving[:, first:].to(cache.kept.dtype))

    def step(self, x: Tensor, index: Tensor, cache: ShiftCache) -> Tensor:
        """Shift one position, B 1 D; `index` is its number on the device."""
        index, frame, columns = index.view(1), cache.kept.shape[1], cache.grid[2]
        share = x.shape[2] // 4
        # Position i holds token i − 1. BOS takes the slot of token −1, which is overwritten before it is read.
        cache.kept.index_copy_(1, (index - 1) % frame, x[..., : 2 * share].to(cache.kept.dtype))
        t = cache.kept.index_select(1, index % frame)[..., :share].to(x.dtype)  # token i − Y · X
        y = cache.kept.index_select(1, (index - columns) % frame)[..., share:].to(x.dtype)
        where = grid_coordinates(index, cache.grid)[..., None] > 0
        return self._join(t, y, x[..., 2 * share :], where, share)


def _delay(x: Tensor, positions: int) -> Tensor:
    """Delay B N s by some positions, with zeros first."""
    return F.pad(x, (0, 0, positions, 0))[:, : x.shape[1]]
