"""Normalisation layers, chosen by name."""

from __future__ import annotations

from typing import Literal

from torch import nn

Norm = Literal["rms", "layer"]


def norm_layer(kind: Norm, width: int) -> nn.Module:
    """`rms`: x / rms(x) · g. `layer`: (x − mean) / std · g. Neither has a shift: the linear layers after them can learn it."""
    if kind == "rms":
        return nn.RMSNorm(width, eps=1e-6)
    return nn.LayerNorm(width, eps=1e-6, bias=False)
