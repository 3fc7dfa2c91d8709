"""Blank clips: what stands in for data that are not there yet, where only their shape matters."""

from __future__ import annotations

import numpy as np
import torch

from kineograph.core.batch import Sample, Shape

_COUNT = 1024


class Blank:
    """Black clips with a caption."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return _COUNT

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        shape = self.shape
        pixels = torch.zeros(shape.frames, shape.channels, shape.height, shape.width, dtype=torch.uint8)
        return Sample(pixels=pixels, fps=shape.fps, caption=self.caption(index))

    def caption(self, index: int) -> str:
        return "a clip"

    def identity(self, index: int) -> str:
        return f"blank-{index}"
