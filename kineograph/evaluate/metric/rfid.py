"""rFID: the FID between pictures and what a codec gives back of them."""

from __future__ import annotations

from kineograph.evaluate.metric.fid import PictureDistance

METRIC = PictureDistance("rfid", "reconstruction")
