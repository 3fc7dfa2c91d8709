"""Kineograph trains, samples and judges text-to-image and text-to-video models."""

__version__ = "0.1.0"
