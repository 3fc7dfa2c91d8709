"""Muse: a masked transformer over the image tokens of a VQGAN, conditioned on text; super-resolution; token critics."""

from __future__ import annotations

from kineograph.family.muse.config import MuseConfig, MuseSample
from kineograph.family.muse.network import Condition, MuseNetwork
from kineograph.family.muse.task import Muse

TASK = Muse

__all__ = ["Condition", "Muse", "MuseConfig", "MuseNetwork", "MuseSample"]
