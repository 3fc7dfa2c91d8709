"""Captions to embeddings: learned, T5, CLIP, cached."""
