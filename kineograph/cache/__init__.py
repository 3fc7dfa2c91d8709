"""Tokens, latents and embeddings encoded once and kept on disk."""
