"""EfficientNet-Lite0, trained on ImageNet: logits for an Inception Score without Inception.

Its scores cannot be compared with published ones; its name is in every label.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.evaluate.extractor.layers import FeatureNetwork, Unit, rename_units

SIZE = 224

# of each stage: blocks, kernel, stride, expansion, channels
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class EfficientNetLite0(FeatureNetwork):
    """Images F 3 H W in [0, 1] → F 1280; logits 1000"""

    takes = "images"
    width = 1280
    classes = 1000
    chunk = 128
    resize = f"antialiased bicubic to {SIZE}"

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_unit(3, 32, 3, 2)]
        channels = 32
        for count, kernel, stride, expansion, width in _STAGES:
            for number in range(count):
                layers.append(_Block(channels, width, kernel, stride if number == 0 else 1, expansion))
                channels = width
        layers.append(_unit(channels, self.width, 1))
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(self.width, self.classes)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[-2:]) != (SIZE, SIZE):
            images = F.interpolate(images, (SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 1)
        return self.layers((images * 255 - 127) / 128).mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        return self.fc(features)


class _Block(nn.Module):
    """Inverted residual: expand, depthwise convolution, project; a skip connection where the shape stays."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = in_channels * expansion
        self.layers = nn.Sequential(
            *([_unit(in_channels, wide, 1)] if expansion > 1 else []),
            _unit(wide, wide, kernel, stride, groups=wide),
            Unit(wide, out_channels, (1, 1), scaled=True, activation=None),
        )
        self.has_skip = in_channels == out_channels and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.has_skip else self.layers(x)


def _unit(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> Unit:
    return Unit(in_channels, out_channels, (kernel, kernel), stride, groups=groups, scaled=True, activation=F.relu6)


# Weights of other implementations ------------------------------------------------------------------------------------


def build(weights: dict[str, Tensor]) -> EfficientNetLite0:
    return EfficientNetLite0()


def from_torch(path: Path) -> dict[str, Tensor]:
    """Convert efficientnet-lite0-57934424.pth: _conv_stem, _blocks.N._expand_conv …, each with its norm."""
    tensors = torch.load(path, weights_only=True, map_location="cpu")
    if "_fc.weight" not in tensors or "_fc.bias" not in tensors:
        raise InputError(f"{path} does not hold EfficientNet-Lite0: _fc is missing")
    norm_names = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    units = [
        {"weight": f"{conv}.weight", **{ours: f"{norm}.{theirs}" for ours, theirs in norm_names.items()}}
        for conv, norm in _torch_names()
    ]
    with torch.device("meta"):
        network = EfficientNetLite0()
    head = {"fc.weight": tensors["_fc.weight"].float(), "fc.bias": tensors["_fc.bias"].float()}
    return rename_units(network, units, tensors, path) | head


def _torch_names() -> list[tuple[str, str]]:
    """Convolution and norm of every unit."""
    names = [("_conv_stem", "_bn0")]
    block = 0
    for count, _, _, expansion, _ in _STAGES:
        for _ in range(count):
            prefix = f"_blocks.{block}."
            names += [(f"{prefix}_expand_conv", f"{prefix}_bn0")] if expansion > 1 else []
            names += [(f"{prefix}_depthwise_conv", f"{prefix}_bn1"), (f"{prefix}_project_conv", f"{prefix}_bn2")]
            block += 1
    return [*names, ("_conv_head", "_bn1")]
