"""Phenaki: a masked transformer over the tokens of clips, conditioned on text; critics; clips longer than trained."""

from __future__ import annotations

from kineograph.family.phenaki.config import PhenakiConfig, PhenakiSample
from kineograph.family.phenaki.network import Clips, PhenakiNetwork
from kineograph.family.phenaki.task import Phenaki

TASK = Phenaki

__all__ = ["Clips", "Phenaki", "PhenakiConfig", "PhenakiNetwork", "PhenakiSample"]
