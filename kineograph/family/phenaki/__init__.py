"""Phenaki: a masked transformer over the tokens of clips, with text; its critics; clips that go on past the trained length."""

from __future__ import annotations

from kineograph.family.phenaki.config import PhenakiConfig, PhenakiSample
from kineograph.family.phenaki.network import Clips, PhenakiNetwork
from kineograph.family.phenaki.task import Phenaki

TASK = Phenaki

__all__ = ["Clips", "Phenaki", "PhenakiConfig", "PhenakiNetwork", "PhenakiSample"]
