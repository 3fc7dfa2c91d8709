"""rFID: the FID between images and their reconstructions."""

from __future__ import annotations

from kineograph.evaluate.metric.fid import FidMetric

METRIC = FidMetric("rfid", "reconstruction")
