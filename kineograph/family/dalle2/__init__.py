"""DALL-E 2: a prior from captions to CLIP image embeddings, and a cascade of diffusion U-Nets from those to images."""

from __future__ import annotations

from kineograph.family.dalle2.config import DecoderConfig, DecoderSample
from kineograph.family.dalle2.network import Condition, DecoderNetwork
from kineograph.family.dalle2.task import Decoder

TASK = Decoder

__all__ = ["Condition", "Decoder", "DecoderConfig", "DecoderNetwork", "DecoderSample"]
