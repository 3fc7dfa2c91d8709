"""What the extractors are built of: layers that reproduce networks trained in TensorFlow, for looking only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


class Unit(nn.Module):
    """Convolution, normalisation by stored statistics, activation: pictures (kernel of two numbers) or clips (of three)

    y = act(scale · (conv(x) − mean) / √(var + ε) + bias)
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    scale: Tensor | None

    def __init__(
        self,
        inside: int,
        outside: int,
        kernel: tuple[int, ...],
        stride: int = 1,
        padding: Literal["same", "valid"] = "same",
        *,
        groups: int = 1,
        scaled: bool = False,
        activation: Activation | None = F.relu,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding, self.groups = kernel, stride, padding, groups
        self.activation = activation
        self.register_buffer("weight", torch.empty(outside, inside // groups, *kernel))
        for name in ("bias", "mean", "var", *(["scale"] if scaled else [])):
            self.register_buffer(name, torch.empty(outside))
        if not scaled:
            self.scale = None

    def forward(self, x: Tensor) -> Tensor:
        if self.padding == "same":
            x = same(x, self.kernel, self.stride)
        convolve = F.conv2d if len(self.kernel) == 2 else F.conv3d
        x = convolve(x, self.weight, stride=self.stride, groups=self.groups)
        x = F.batch_norm(x, self.mean, self.var, self.scale, self.bias, eps=1e-3)
        return self.activation(x) if self.activation is not None else x


class Parallel(nn.ModuleList):
    """All branches see the input; what they make of it is joined along the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


class SamePool3d(nn.Module):
    """Max-pool of clips with TensorFlow's padding. It follows a ReLU, so that padding by 0 never wins."""

    def __init__(self, kernel: tuple[int, int, int], stride: tuple[int, int, int]) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool3d(same(x, self.kernel, self.stride), self.kernel, self.stride)


def same(x: Tensor, kernel: tuple[int, ...], stride: int | tuple[int, ...]) -> Tensor:
    """Pad so that a stride s leaves ⌈n/s⌉ places; of an odd number of zeros the greater half comes after (TensorFlow's SAME)."""
    strides = (stride,) * len(kernel) if isinstance(stride, int) else stride
    pads: list[int] = []
    for size, width, step in zip(reversed(x.shape[-len(kernel) :]), reversed(kernel), reversed(strides), strict=True):
        total = max((-(-size // step) - 1) * step + width - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads) if any(pads) else x


def resize_as_tensorflow(pictures: Tensor, height: int, width: int) -> Tensor:
    """F C H W → F C height width. Place j of the result is read at j · size / new size, between its two neighbours, without
    antialiasing: what TensorFlow's `resize_bilinear` did when FID and FVD were defined."""
    have = pictures.shape[-2:]
    if tuple(have) == (height, width):
        return pictures
    rows, columns = (
        (2 * torch.arange(new, device=pictures.device) * old / new + 1) / old - 1  # −1 … 1 are the outer edges
        for old, new in zip(have, (height, width), strict=True)
    )
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).to(pictures.dtype)  # height width (x, y)
    grid = grid.expand(pictures.shape[0], -1, -1, -1)
    return F.grid_sample(pictures, grid, mode="bilinear", padding_mode="border", align_corners=False)
