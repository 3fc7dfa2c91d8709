"""Captions → embeddings: learned beside the model, by T5 or CLIP, or given with the data."""

from __future__ import annotations

from kineograph.text.config import Text, TextConfig, build_text

__all__ = ["Text", "TextConfig", "build_text"]
