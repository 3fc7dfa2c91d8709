"""NUWA: an autoregressive transformer over the tokens of clips, with 3D nearby attention, conditioned on text and sketches."""

from __future__ import annotations

from kineograph.family.nuwa.config import NuwaConfig, NuwaSample
from kineograph.family.nuwa.network import Condition, NuwaNetwork
from kineograph.family.nuwa.task import Nuwa

TASK = Nuwa

__all__ = ["Condition", "Nuwa", "NuwaConfig", "NuwaNetwork", "NuwaSample"]
