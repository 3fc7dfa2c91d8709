"""Position embeddings of a token grid t × h × w: added sines and cosines, or rotary tables. Any grid size works."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kineograph.family.cogvideox.transformer_config import TransformerShape

Grid = tuple[int, int, int]  # tokens: t, h, w
BASE = 10_000.0


class PositionTables(NamedTuple):
    """Tables for one grid after the text tokens; None where the model does not use them."""

    cos: Tensor | None = None  # (L + t h w) d, float32; 1 for text
    sin: Tensor | None = None  # the same, 0 for text; signs alternate, so that rotating is x cos + swapped x sin
    time: Tensor | None = None  # t D/4, added to tokens
    height: Tensor | None = None  # h 3D/8
    width: Tensor | None = None  # w 3D/8


def build_positions(
    shape: TransformerShape, grid: Grid, base: tuple[int, int], text: int, device: torch.device
) -> PositionTables:
    """Build the tables of a grid. `base`: latents' height and width that rotary grids are fitted into."""
    if shape.positions == "sincos":
        width = shape.width
        return PositionTables(
            time=sincos_table(torch.arange(grid[0]) / shape.time_scale, width // 4).to(device),
            height=sincos_table(torch.arange(grid[1]) / shape.space_scale, width // 8 * 3).to(device),
            width=sincos_table(torch.arange(grid[2]) / shape.space_scale, width // 8 * 3).to(device),
        )
    d = shape.head_width
    steps = [torch.arange(size, dtype=torch.float64) for size in grid]
    if shape.grid == "resize":
        steps[1:] = fit_grid(grid[1:], (base[0] // shape.patch, base[1] // shape.patch))  # type: ignore[arg-type]
    axes = [rotary_angles(at, count) for at, count in zip(steps, (d // 4, d // 8 * 3, d // 8 * 3), strict=True)]
    t, h, w = (
        axis.view(*(-1 if i == number else 1 for i in range(3)), axis.shape[1]).expand(*grid, -1)
        for number, axis in enumerate(axes)
    )
    video = torch.cat([t, h, w], dim=-1).flatten(0, 2)  # t h w d/2
    angle = torch.cat([video.new_zeros(text, d // 2), video]).repeat_interleave(2, dim=1)
    sign = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(d // 2)
    return PositionTables(angle.cos().float().to(device), (angle.sin() * sign).float().to(device))


def rotary_angles(at: Tensor, channels: int) -> Tensor:
    """θ = position · base^(−2i / channels), n → n × channels / 2."""
    return at.double()[:, None] * BASE ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)


def sincos_table(at: Tensor, channels: int) -> Tensor:
    """Sines of all angles, then cosines, n → n × channels."""
    angles = rotary_angles(at, channels)
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def fit_grid(grid: tuple[int, int], base: tuple[int, int]) -> list[Tensor]:
    """Row and column coordinates of a grid resized, keeping its aspect ratio, to fit into `base`, centred."""
    (h, w), (most_h, most_w) = grid, base
    if h / w > most_h / most_w:
        extents = (most_h, round(most_h / h * w))
    else:
        extents = (round(most_w / w * h), most_w)
    coordinates = []
    for size, most, extent in zip(grid, base, extents, strict=True):
        first = round((most - extent) / 2.0)
        # Divides the end of the crop, not its extent, as the released weights were trained.
        coordinates.append(torch.linspace(first, (first + extent) * (size - 1) / size, size, dtype=torch.float64))
    return coordinates
