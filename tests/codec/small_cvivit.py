"""Small C-ViViTs, and clips for them."""

from __future__ import annotations

import pytest
import torch

from kineograph.codec.cvivit import CViViT, CViViTConfig
from kineograph.core.batch import Batch, Sample, Shape
from kineograph.core.config import parse
from kineograph.core.task import BuildContext

SMALL = {
    "width": 16, "heads": 2, "spatial_depth": 1, "temporal_depth": 1, "patch": 4, "perceptual": {"weight": 0},
    "quantizer": {"kind": "fsq", "levels": [8, 8, 8]},
}  # fmt: skip
GAME = {"adversarial": {"width": 8, "levels": 2}}
QUANTIZERS = (
    {"kind": "vq", "codes": 32, "dim": 4},
    {"kind": "lfq", "codes": 256},
    {"kind": "fsq", "levels": [5, 5, 4]},
)
each_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q["kind"])
sizes = pytest.mark.parametrize(
    ("channels", "frames", "height", "width"), [(1, 1, 16, 16), (3, 5, 8, 24), (4, 3, 16, 8), (2, 7, 8, 8)]
)


def build(size=(16, 16), channels: int = 3, frames: int = 5, notes: list | None = None, **keys) -> CViViT:
    config = parse(CViViTConfig, {**SMALL, **keys})
    shape = Shape(frames, *size, channels, 8.0)
    return CViViT.build(config, BuildContext(shape, note=(notes if notes is not None else []).append))


def batch_for(task: CViViT, lengths: tuple[int, ...] | None = None) -> Batch:
    shape = task.shape
    samples = [
        Sample(pixels=torch.randint(0, 256, (length, shape.channels, shape.height, shape.width), dtype=torch.uint8))
        for length in lengths or (shape.frames, shape.frames)
    ]
    return Batch.collate(samples, range(len(samples)))


def repainted(batch: Batch) -> Batch:
    """The same clips with noise where the padding is."""
    pixels = torch.where(
        batch.frame_mask[:, :, None, None, None], batch.pixels, torch.randint_like(batch.pixels, 0, 256)
    )
    assert not torch.equal(pixels, batch.pixels)
    return Batch(slots=batch.slots, pixels=pixels, frame_mask=batch.frame_mask)


def cut(batch: Batch, row: int, frames: int) -> Batch:
    """One clip of a batch, alone."""
    return Batch(slots=batch.slots[row : row + 1], pixels=batch.pixels[row : row + 1, :frames])
