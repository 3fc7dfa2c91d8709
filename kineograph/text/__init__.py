"""Text encoders: captions → embeddings, by a learned encoder, T5 or CLIP, or precomputed with the data."""

from __future__ import annotations

from kineograph.text.config import TextConfig, build_text

__all__ = ["TextConfig", "build_text"]
