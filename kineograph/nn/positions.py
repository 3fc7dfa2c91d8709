"""Position embeddings on a grid of any number of axes: rotary, learned, or sines and cosines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn


def grid_positions(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Coordinates of a grid in raster order, N × axes."""
    axes = torch.meshgrid(*(torch.arange(size, device=device) for size in shape), indexing="ij")
    return torch.stack(axes, dim=-1).reshape(-1, len(shape))


def split_channels(total: int, axes: int) -> list[int]:
    """Divide `total` channels among the axes; the first ones take the remainder."""
    return [total // axes + (axis < total % axes) for axis in range(axes)]


def rotary_angles(positions: Tensor, pairs: int, base: float) -> Tensor:
    """θ = position · base^(−i / n) for pair i of an axis's n pairs; N × axes → N × pairs."""
    parts = []
    for axis, count in enumerate(split_channels(pairs, positions.shape[1])):
        frequency = base ** (-torch.arange(count, device=positions.device, dtype=torch.float32) / max(count, 1))
        parts.append(positions[:, axis, None].float() * frequency)
    return torch.cat(parts, dim=1)


class Rotation:
    """Rotary position embedding: each pair of channels (2i, 2i + 1) is rotated by its angle; axes share the pairs.

    A plain class: torch 2.11 cannot compile the construction of a frozen dataclass.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin  # N d/2 each

    @staticmethod
    def at_positions(positions: Tensor, head_width: int, base: float = 10_000.0) -> Rotation:
        """Rotation at any positions, N × axes, for networks that take clips of many sizes."""
        angle = rotary_angles(positions, head_width // 2, base)
        return Rotation(angle.cos(), angle.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate B h N d in float32."""
        pairs = rearrange(x.float(), "b h n (d two) -> b h n d two", two=2)
        even, odd = pairs.unbind(-1)  # B h N d/2
        rotated = torch.stack([even * self.cos - odd * self.sin, odd * self.cos + even * self.sin], dim=-1)
        return rearrange(rotated, "b h n d two -> b h n (d two)").to(x.dtype)


class Rotary(nn.Module):
    """The rotation of a fixed grid."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Sequence[int], head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        rotation = Rotation.at_positions(grid_positions(shape), head_width, base)
        self.register_buffer("cos", rotation.cos, persistent=False)
        self.register_buffer("sin", rotation.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return Rotation(self.cos, self.sin)(x)


class LearnedPositions(nn.Module):
    """Axial position embedding: one learned table per axis, summed."""

    def __init__(self, shape: Sequence[int], width: int) -> None:
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(size, width)) for size in shape)
        self.reset()

    def reset(self) -> None:
        for table in self.tables:
            nn.init.normal_(table, std=table.shape[1] ** -0.5)

    def forward(self) -> Tensor:
        """N D"""
        total = self.tables[0]
        for table in list(self.tables)[1:]:
            total = total[..., None, :] + table  # … axis D
        return total.reshape(-1, total.shape[-1])


def sincos_embedding(positions: Tensor, width: int, base: float = 10_000.0) -> Tensor:
    """Sines and cosines at any positions, N × axes → N D, scaled like a freshly initialised learned table."""
    angle = rotary_angles(positions, width // 2, base)
    return nn.functional.pad(torch.cat([angle.sin(), angle.cos()], dim=1) * width**-0.5, (0, width % 2))


class SincosPositions(nn.Module):
    """Fixed sine and cosine embedding of a grid; axes share the channels."""

    table: Tensor

    def __init__(self, shape: Sequence[int], width: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.register_buffer("table", sincos_embedding(grid_positions(shape), width, base), persistent=False)

    def forward(self) -> Tensor:
        """N D"""
        return self.table
