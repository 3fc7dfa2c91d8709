"""Muse: a masked image transformer over the tokens of a VQGAN, with text; its super-resolution stage and its critics."""

from __future__ import annotations

from kineograph.family.muse.config import MuseConfig, MuseSample
from kineograph.family.muse.network import Condition, MuseNetwork
from kineograph.family.muse.task import Muse

TASK = Muse

__all__ = ["Condition", "Muse", "MuseConfig", "MuseNetwork", "MuseSample"]
