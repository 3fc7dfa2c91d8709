"""Normalisation layers, chosen by name."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["rms", "layer"]


class RMSNorm(nn.Module):
    """x / rms(x) · g with g cast to x's dtype: nn.RMSNorm keeps it in float32, which its fused bf16 kernel refuses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-6)


def norm_layer(kind: Norm, width: int) -> nn.Module:
    """`rms`: x / rms(x) · g. `layer`: (x − mean) / std · g. Neither has a bias: the following linear layers can learn it."""
    if kind == "rms":
        return RMSNorm(width)
    return nn.LayerNorm(width, eps=1e-6, bias=False)
