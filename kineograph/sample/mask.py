"""Which part of a given picture is drawn anew: a picture of the run's size, light where something new belongs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.noise import numpy_rng
from kineograph.data.transforms import Framing
from kineograph.media.clips import read_frames
from kineograph.sample.prime import Takes, file_digest


@dataclass(frozen=True)
class Mask:
    anew: Tensor  # H W, bool
    told: dict[str, Any]  # what a sidecar says about it


def read_mask(mask: str | Path | Tensor, takes: Takes, size: tuple[int, int]) -> Mask:
    """A file (the light half of its greys is drawn anew) or H W bool."""
    if not takes.task.inpaints:
        raise InputError(
            f"--mask: {takes.name} cannot draw a part of a picture anew; name a run (or with --stage a stage) of dalle2"
        )
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool or tuple(mask.shape) != size:
            raise InputError(f"mask has shape {tuple(mask.shape)} and type {mask.dtype}: give H W = {size} as bool")
        anew, told = mask.cpu(), {}
    else:
        image = next(read_frames(mask)).image.convert("L").convert("RGB")
        grey = Framing(size).place(*image.size, numpy_rng(0)).apply(image)[..., 0]  # framed as the picture is
        anew, told = (
            torch.from_numpy(np.ascontiguousarray(grey)) >= 128,
            {"file": str(mask), "sha256": file_digest(mask)},
        )
    if not anew.any():
        raise InputError(
            f"--mask {mask if not isinstance(mask, Tensor) else ''}: nothing is to be drawn anew; make that part white"
        )
    return Mask(anew, {**told, "share": round(float(anew.float().mean()), 4)})
