"""Building blocks of the extractors: inference-only layers that reproduce networks trained in TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.errors import InputError

Activation = Callable[[Tensor], Tensor]
Takes = Literal["images", "clips"]


class FeatureNetwork(nn.Module):
    """Images F 3 H W or clips B T 3 H W in [0, 1] → features N D"""

    takes: Takes | None = None  # None: either
    width: int | None = None  # D; None: not known
    classes: int | None = None  # channels of `logits`; 0: it has none; None: as many as `width`
    chunk = 32  # images or clips at once
    size = 0  # height and width that it resizes to
    resize = "by the network"  # for labels
    modes: tuple[str, ...] = ()  # ways to resize that the network offers; the first is its own
    mode: str | None = None  # the chosen one
    depths: tuple[int, ...] = ()  # widths of the layers whose features it offers

    def set_mode(self, mode: str) -> None:
        assert mode in self.modes
        self.mode, self.resize = mode, f"{RESIZE_LABELS[mode]} to {self.size}"

    def set_depth(self, width: int) -> None:
        assert width in self.depths
        self.width = width

    def logits(self, features: Tensor) -> Tensor:
        return features


class Unit(nn.Module):
    """Convolution, batch norm with stored statistics, activation; 2-D or 3-D by the length of `kernel`

    y = act(scale · (conv(x) − mean) / √(var + ε) + bias)
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    scale: Tensor | None
    eps = 1e-3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
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
        self.register_buffer("weight", torch.empty(out_channels, in_channels // groups, *kernel))
        for name in ("bias", "mean", "var", *(["scale"] if scaled else [])):
            self.register_buffer(name, torch.empty(out_channels))
        if not scaled:
            self.scale = None

    def forward(self, x: Tensor) -> Tensor:
        if self.padding == "same":
            x = pad_same(x, self.kernel, self.stride)
        convolve = F.conv2d if len(self.kernel) == 2 else F.conv3d
        x = convolve(x, self.weight, stride=self.stride, groups=self.groups)
        x = F.batch_norm(x, self.mean, self.var, self.scale, self.bias, eps=self.eps)
        return self.activation(x) if self.activation is not None else x


class Parallel(nn.ModuleList):
    """Applies all branches to the input and concatenates their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


class SamePool3d(nn.Module):
    """3-D max-pool with TensorFlow's SAME padding. It follows a ReLU, so the zeros never win."""

    def __init__(self, kernel: tuple[int, int, int], stride: tuple[int, int, int]) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool3d(pad_same(x, self.kernel, self.stride), self.kernel, self.stride)


def pad_same(x: Tensor, kernel: tuple[int, ...], stride: int | tuple[int, ...]) -> Tensor:
    """Pad so that stride s gives ⌈n/s⌉ outputs; an odd zero goes to the end (TensorFlow's SAME)."""
    strides = (stride,) * len(kernel) if isinstance(stride, int) else stride
    pads: list[int] = []
    for size, width, step in zip(reversed(x.shape[-len(kernel) :]), reversed(kernel), reversed(strides), strict=True):
        total = max((-(-size // step) - 1) * step + width - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads) if any(pads) else x


def resize_as_tensorflow(images: Tensor, height: int, width: int) -> Tensor:
    """Bilinear F C H W → F C height width that samples at j · size / new size, without antialiasing.

    TensorFlow's `resize_bilinear` did so when FID and FVD were defined.
    """
    size = images.shape[-2:]
    if tuple(size) == (height, width):
        return images
    rows, columns = (
        (2 * torch.arange(new, device=images.device) * old / new + 1) / old - 1  # −1 … 1 are the outer edges
        for old, new in zip(size, (height, width), strict=True)
    )
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).to(images.dtype)  # height width (x, y)
    grid = grid.expand(images.shape[0], -1, -1, -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def resize_clean(images: Tensor, height: int, width: int) -> Tensor:
    """Antialiased bicubic F C H W → F C height width, as Pillow resizes floating-point pictures: clean-fid's choice.

    In float64, like Pillow's sums; torch's antialiased bicubic filter has Pillow's coefficient, a = −½.
    """
    if tuple(images.shape[-2:]) == (height, width):
        return images
    resized = F.interpolate(images.double(), (height, width), mode="bicubic", antialias=True)
    return resized.clamp(0, 1).to(images.dtype)


def resize_as_pytorch(images: Tensor, height: int, width: int) -> Tensor:
    """Bilinear F C H W → F C height width at half-pixel centres, (j + ½) · size / new size − ½, without antialiasing."""
    if tuple(images.shape[-2:]) == (height, width):
        return images
    return F.interpolate(images, (height, width), mode="bilinear", align_corners=False)


RESIZES = {"tensorflow": resize_as_tensorflow, "clean": resize_clean, "pytorch": resize_as_pytorch}
RESIZE_LABELS = {
    "tensorflow": "bilinear from the corner",
    "clean": "antialiased bicubic",
    "pytorch": "bilinear at half pixels",
}


def rename_units(
    network: FeatureNetwork, units: Iterable[Mapping[str, str]], tensors: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Tensors of another implementation by our names. `units`: our buffer → their name, for every Unit in order."""
    names = [name for name, part in network.named_modules() if isinstance(part, Unit)]
    units = list(units)
    if len(units) != len(names):
        raise InputError(
            f"{path} has {len(units)} convolutions, and {type(network).__name__} has {len(names)}: it is another network"
        )
    try:
        return {
            f"{name}.{ours}": tensors[theirs].float()
            for name, unit in zip(names, units, strict=True)
            for ours, theirs in unit.items()
        }
    except KeyError as error:
        raise InputError(f"{path} does not hold {type(network).__name__}: {error} is missing") from None
