"""EfficientNet-Lite0, trained on ImageNet: logits for an Inception Score without Inception. Small, and never to be compared
with published scores; its name stands beside every number."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.evaluate.extractor.layers import Unit

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


class EfficientNetLite0(nn.Module):
    """Pictures F 3 H W in [0, 1] → F 1280; logits 1000"""

    takes = "pictures"
    width = 1280
    classes = 1000
    chunk = 128

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

    def forward(self, pictures: Tensor) -> Tensor:
        if tuple(pictures.shape[-2:]) != (SIZE, SIZE):
            pictures = F.interpolate(pictures, (SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 1)
        return self.layers((pictures * 255 - 127) / 128).mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        return self.fc(features)


class _Block(nn.Module):
    """Widen, filter each channel by itself, narrow; the input is added where the shape stays."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inside * expansion
        self.layers = nn.Sequential(
            *([_unit(inside, wide, 1)] if expansion > 1 else []),
            _unit(wide, wide, kernel, stride, groups=wide),
            Unit(wide, outside, (1, 1), scaled=True, activation=None),
        )
        self.stays = inside == outside and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.stays else self.layers(x)


def _unit(inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> Unit:
    return Unit(inside, outside, (kernel, kernel), stride, groups=groups, scaled=True, activation=F.relu6)


# Weights of other origin ---------------------------------------------------------------------------------------------


def build(weights: dict[str, Tensor]) -> EfficientNetLite0:
    return EfficientNetLite0()


def from_torch(path: Path) -> dict[str, Tensor]:
    """efficientnet-lite0-57934424.pth: convolutions (_conv_stem, _blocks.N._expand_conv …), each with its norm beside it."""
    found = torch.load(path, weights_only=True, map_location="cpu")
    with torch.device("meta"):
        network = EfficientNetLite0()
    units = [name for name, part in network.named_modules() if isinstance(part, Unit)]
    weights: dict[str, Tensor] = {}
    try:
        for ours, (convolution, norm) in zip(units, _their_names(), strict=True):
            weights[f"{ours}.weight"] = found[f"{convolution}.weight"].float()
            for kind, theirs in (
                ("scale", "weight"),
                ("bias", "bias"),
                ("mean", "running_mean"),
                ("var", "running_var"),
            ):
                weights[f"{ours}.{kind}"] = found[f"{norm}.{theirs}"].float()
        return weights | {"fc.weight": found["_fc.weight"].float(), "fc.bias": found["_fc.bias"].float()}
    except KeyError as error:
        raise InputError(f"{path} does not hold EfficientNet-Lite0: {error} is missing") from None


def _their_names() -> list[tuple[str, str]]:
    names = [("_conv_stem", "_bn0")]
    block = 0
    for count, _, _, expansion, _ in _STAGES:
        for _ in range(count):
            at = f"_blocks.{block}."
            names += [(f"{at}_expand_conv", f"{at}_bn0")] if expansion > 1 else []
            names += [(f"{at}_depthwise_conv", f"{at}_bn1"), (f"{at}_project_conv", f"{at}_bn2")]
            block += 1
    return [*names, ("_conv_head", "_bn1")]
