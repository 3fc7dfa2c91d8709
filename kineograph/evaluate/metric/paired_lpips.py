"""LPIPS between samples and the real items that they were drawn for."""

from __future__ import annotations

from kineograph.evaluate.metric.lpips import LpipsMetric

METRIC = LpipsMetric("paired_lpips", "generated", frozenset({"real", "generated", "paired"}))
