"""CogVideoX: a diffusion transformer over the latents of a causal 3-D VAE, from scratch or from released weights."""

from __future__ import annotations

from kineograph.family.cogvideox.config import CogVideoXConfig, CogVideoXSample
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.task import CogVideoX

TASK = CogVideoX

__all__ = ["CogVideoX", "CogVideoXConfig", "CogVideoXSample", "Transformer"]
