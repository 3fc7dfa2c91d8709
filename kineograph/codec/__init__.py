"""Pixels to tokens or latents and back, and their training tasks."""
