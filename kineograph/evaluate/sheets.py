"""Pictures of an evaluation: samples under their captions with what the metrics remarked, and reconstructions under their inputs."""

from __future__ import annotations

import math
from pathlib import Path

from einops import repeat
from torch import Tensor

from kineograph.evaluate.evidence import Evidence
from kineograph.media.clips import write_clip
from kineograph.media.grids import grid, side_by_side

SAMPLES = 36  # on a sheet
RECONSTRUCTIONS = 8
WIDE = 160  # pixels of a picture on the sheet, at least


class Pictures:
    """Keeps the first rows of the evidence."""

    def __init__(self) -> None:
        self.samples: list[Tensor] = []
        self.captions: list[str] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def add(self, evidence: Evidence, remarks: list[list[str]]) -> None:
        if evidence.generated is not None:
            for row in range(min(SAMPLES - len(self.samples), len(evidence.generated))):
                self.samples.append(evidence.generated[row].cpu())
                words = [said[row] for said in remarks] + ([evidence.captions[row]] if evidence.captions else [])
                self.captions.append(" · ".join(words))
        if evidence.reconstruction is not None and evidence.real is not None:
            for row in range(min(RECONSTRUCTIONS - len(self.inputs), len(evidence.real))):
                self.inputs.append(evidence.real[row].cpu())
                self.outputs.append(evidence.reconstruction[row].cpu())

    def write(self, folder: Path, name: str, fps: float) -> list[Path]:
        written = []
        if self.samples:
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"{name}.png")
            grid([_enlarged(clip) for clip in self.samples], captions=self.captions).save(written[-1])
        if self.inputs:
            sheet = side_by_side([("input", self.inputs), ("reconstruction", self.outputs)])  # T 3 H W
            path = folder / f"{name}-reconstructions.{'png' if sheet.shape[0] == 1 else 'gif'}"
            written.append(write_clip(path, sheet, fps))
        return written


def _enlarged(clip: Tensor) -> Tensor:
    """A small picture needs room for its caption below; a clip's frames stand side by side and have it."""
    factor = max(1, math.ceil(WIDE / clip.shape[-1]) if clip.shape[0] == 1 else 1)
    return repeat(clip, "t c h w -> t c (h i) (w j)", i=factor, j=factor)
