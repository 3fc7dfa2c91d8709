"""Pictures of an evaluation: samples under their captions with what the metrics remarked, and reconstructions under their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from einops import repeat
from torch import Tensor

from kineograph.core import distributed
from kineograph.evaluate.metric_api import EvalBatch
from kineograph.media.clips import write_clip
from kineograph.media.grids import make_animated_comparison, make_grid

SAMPLES = 36  # on a sheet
RECONSTRUCTIONS = 8
WIDE = 160  # pixels of a picture on the sheet, at least


@dataclass(frozen=True)
class _Shown:
    """One place on a sheet."""

    batch: int  # that it came with
    rows: list[Tensor]  # T C H W: a sample; or an input and its reconstruction
    caption: str = ""


class Pictures:
    """Keeps the first rows of the evidence."""

    def __init__(self) -> None:
        self.samples: list[_Shown] = []
        self.reconstructions: list[_Shown] = []

    def add(self, evidence: EvalBatch, remarks: list[list[str]], batch: int = 0) -> None:
        """Batches come in order; of each, every process may have a part."""
        if evidence.generated is not None:
            for row in range(min(SAMPLES - len(self.samples), len(evidence.generated))):
                words = [said[row] for said in remarks] + ([evidence.captions[row]] if evidence.captions else [])
                self.samples.append(_Shown(batch, [evidence.generated[row].cpu()], " · ".join(words)))
        if evidence.reconstruction is not None and evidence.real is not None:
            for row in range(min(RECONSTRUCTIONS - len(self.reconstructions), len(evidence.real))):
                both = [evidence.real[row].cpu(), evidence.reconstruction[row].cpu()]
                self.reconstructions.append(_Shown(batch, both))

    def joined(self) -> Pictures:
        """Those that one process would have kept, on the first one; nothing elsewhere. To be called by all."""
        whole = Pictures()
        whole.samples = _joined(self.samples, SAMPLES)
        whole.reconstructions = _joined(self.reconstructions, RECONSTRUCTIONS)
        return whole

    def write(self, folder: Path, name: str, fps: float) -> list[Path]:
        written = []
        if self.samples:
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"{name}.png")
            captions = [shown.caption for shown in self.samples]
            make_grid([_enlarged(shown.rows[0]) for shown in self.samples], captions=captions).save(written[-1])
        if self.reconstructions:
            inputs, outputs = ([shown.rows[side] for shown in self.reconstructions] for side in (0, 1))
            sheet = make_animated_comparison([("input", inputs), ("reconstruction", outputs)])  # T 3 H W
            path = folder / f"{name}-reconstructions.{'png' if sheet.shape[0] == 1 else 'gif'}"
            written.append(write_clip(path, sheet, fps))
        return written


def _joined(mine: list[_Shown], most: int) -> list[_Shown]:
    """The first `most` by batch, process and row."""
    if not distributed.is_active():
        return mine
    mine = mine if distributed.is_data_leader() else []
    everyone = distributed.all_gather_object([[shown.batch, shown.caption] for shown in mine])
    order = sorted((batch, rank, row) for rank, told in enumerate(everyone) for row, (batch, _) in enumerate(told))[
        :most
    ]
    sent = [mine[row] for _, rank, row in order if rank == distributed.rank()]
    rows = distributed.gather_tensors([tensor for shown in sent for tensor in shown.rows])
    if not distributed.is_first():
        return []
    coming = [iter(tensors) for tensors in rows]
    sides = len(rows[0]) // len(sent) if sent else 0  # the first process has a part of the first batch
    return [
        _Shown(batch, [next(coming[rank]) for _ in range(sides)], everyone[rank][row][1]) for batch, rank, row in order
    ]


def _enlarged(clip: Tensor) -> Tensor:
    """A small picture needs room for its caption below; a clip's frames stand side by side and have it."""
    factor = max(1, math.ceil(WIDE / clip.shape[-1]) if clip.shape[0] == 1 else 1)
    return repeat(clip, "t c h w -> t c (h i) (w j)", i=factor, j=factor)
