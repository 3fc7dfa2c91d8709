"""PSNR and SSIM between samples and the real items that they were drawn for: from an image embedding, a smaller picture, a sketch."""

from __future__ import annotations

from kineograph.evaluate.metric.reconstruction import SimilarityMetric

METRIC = SimilarityMetric("paired", "generated", frozenset({"real", "generated", "paired"}))
