"""CogVideoX: a diffusion transformer over the latents of a causal 3-D VAE, from scratch or from released weights."""

from __future__ import annotations
