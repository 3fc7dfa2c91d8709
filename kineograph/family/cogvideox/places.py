"""Where the tokens of a clip are: sines and cosines that are added, or angles that queries and keys turn by.

Nothing depends on a trained size: each grid t × h × w gets its own positions. A small table an axis is kept; the network spreads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kineograph.family.cogvideox.shapes import TransformerShape

Grid = tuple[int, int, int]  # tokens: t, h, w
BASE = 10_000.0


class Places(NamedTuple):
    """Of one grid, behind so many text tokens; what the shape does not use is None."""

    cos: Tensor | None = None  # (L + t h w) d, float32; 1 for text, which does not turn
    sin: Tensor | None = None  # the same, 0 for text; its sign alternates, so that turning is x cos + swapped x sin
    time: Tensor | None = None  # t D/4, to be added
    height: Tensor | None = None  # h 3D/8
    width: Tensor | None = None  # w 3D/8


def places(shape: TransformerShape, grid: Grid, base: tuple[int, int], text: int, device: torch.device) -> Places:
    """`base` is the latents' height and width that rotary grids are fitted into."""
    if shape.positions == "sincos":
        width = shape.width
        return Places(
            time=waves(torch.arange(grid[0]) / shape.time_scale, width // 4).to(device),
            height=waves(torch.arange(grid[1]) / shape.space_scale, width // 8 * 3).to(device),
            width=waves(torch.arange(grid[2]) / shape.space_scale, width // 8 * 3).to(device),
        )
    d = shape.head_width
    steps = [torch.arange(size, dtype=torch.float64) for size in grid]
    if shape.grid == "resize":
        steps[1:] = fitted(grid[1:], (base[0] // shape.patch, base[1] // shape.patch))  # type: ignore[arg-type]
    axes = [angles(at, count) for at, count in zip(steps, (d // 4, d // 8 * 3, d // 8 * 3), strict=True)]
    t, h, w = (
        axis.view(*(-1 if place == number else 1 for place in range(3)), axis.shape[1]).expand(*grid, -1)
        for number, axis in enumerate(axes)
    )
    video = torch.cat([t, h, w], dim=-1).flatten(0, 2)  # t h w d/2
    angle = torch.cat([video.new_zeros(text, d // 2), video]).repeat_interleave(2, dim=1)
    sign = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(d // 2)
    return Places(angle.cos().float().to(device), (angle.sin() * sign).float().to(device))


def angles(at: Tensor, channels: int) -> Tensor:
    """θ = position · base^(−2i / channels), n → n × channels / 2."""
    return at.double()[:, None] * BASE ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)


def waves(at: Tensor, channels: int) -> Tensor:
    """The sines of all angles, then their cosines, n → n × channels."""
    found = angles(at, channels)
    return torch.cat([found.sin(), found.cos()], dim=1).float()


def fitted(grid: tuple[int, int], base: tuple[int, int]) -> list[Tensor]:
    """Coordinates of a grid's rows and columns when it is enlarged or shrunk, sides in proportion, to just fit into `base`, centred.

    Rows lie at top + i · extent / h, as if the picture of h rows had been resized to `extent` rows of the base.
    """
    (h, w), (most_h, most_w) = grid, base
    if h / w > most_h / most_w:
        extents = (most_h, round(most_h / h * w))
    else:
        extents = (round(most_w / w * h), most_w)
    found = []
    for size, most, extent in zip(grid, base, extents, strict=True):
        first = round((most - extent) / 2.0)
        # the end of the crop, not its extent, is divided: what released weights were trained with
        found.append(torch.linspace(first, (first + extent) * (size - 1) / size, size, dtype=torch.float64))
    return found
