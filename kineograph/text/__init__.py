"""Captions → embeddings: learned beside the model, by T5 or CLIP, or given with the data."""

from __future__ import annotations

from kineograph.text.config import TextConfig, build_text

__all__ = ["TextConfig", "build_text"]
