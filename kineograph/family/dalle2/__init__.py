"""DALL-E 2: a cascade of diffusion U-Nets that draw a picture of a CLIP image embedding, and the prior that makes one of a caption."""

from __future__ import annotations

from kineograph.family.dalle2.config import DecoderConfig, DecoderSample
from kineograph.family.dalle2.network import Condition, DecoderNetwork
from kineograph.family.dalle2.task import Decoder

TASK = Decoder

__all__ = ["Condition", "Decoder", "DecoderConfig", "DecoderNetwork", "DecoderSample"]
