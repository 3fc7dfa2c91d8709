"""Image sheets of an evaluation: samples with captions and the metrics' remarks, reconstructions under their inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from einops import repeat
from torch import Tensor

from kineograph.core import distributed
from kineograph.evaluate.metric_api import EvalBatch
from kineograph.media.clips import write_clip
from kineograph.media.frames import save_picture
from kineograph.media.grids import add_footer, make_animated_comparison, make_grid

SAMPLES = 36  # on a sheet
RECONSTRUCTIONS = 8
MIN_WIDTH = 160  # pixels of a sample on the sheet, so that its caption fits below


@dataclass(frozen=True)
class _Entry:
    batch: int  # number of its batch
    clips: list[Tensor]  # T C H W: a sample, or an input and its reconstruction
    caption: str = ""


class SampleSheets:
    """Keeps the first rows of an evaluation."""

    def __init__(self) -> None:
        self.samples: list[_Entry] = []
        self.reconstructions: list[_Entry] = []

    def add(self, batch: EvalBatch, remarks: list[list[str]], number: int = 0) -> None:
        """Add rows of batch `number`; of each batch, every process may have a part."""
        if batch.generated is not None:
            for row in range(min(SAMPLES - len(self.samples), len(batch.generated))):
                words = [rows[row] for rows in remarks] + ([batch.captions[row]] if batch.captions else [])
                self.samples.append(_Entry(number, [batch.generated[row].cpu()], " · ".join(words)))
        if batch.reconstruction is not None and batch.real is not None:
            for row in range(min(RECONSTRUCTIONS - len(self.reconstructions), len(batch.real))):
                pair = [batch.real[row].cpu(), batch.reconstruction[row].cpu()]
                self.reconstructions.append(_Entry(number, pair))

    def gather(self) -> SampleSheets:
        """The rows that one process would have kept, on the first process; empty elsewhere. Collective."""
        whole = SampleSheets()
        whole.samples = _gather(self.samples, SAMPLES)
        whole.reconstructions = _gather(self.reconstructions, RECONSTRUCTIONS)
        return whole

    def write(self, folder: Path, name: str, fps: float, figures: Sequence[str] = ()) -> list[Path]:
        """Write the sheets; `figures` are lines about the samples, below their sheet."""
        written = []
        if self.samples:
            written.append(folder / f"{name}.png")
            clips = [enlarge_for_caption(entry.clips[0]) for entry in self.samples]
            sheet = make_grid(clips, captions=[entry.caption for entry in self.samples])
            save_picture(add_footer(sheet, figures), written[-1])
        if self.reconstructions:
            inputs, outputs = ([entry.clips[side] for entry in self.reconstructions] for side in (0, 1))
            rows = make_animated_comparison([("input", inputs), ("reconstruction", outputs)])  # T 3 H W
            path = folder / f"{name}-reconstructions.{'png' if rows.shape[0] == 1 else 'gif'}"
            written.append(write_clip(path, rows, fps))
        return written


def _gather(entries: list[_Entry], limit: int) -> list[_Entry]:
    """The first `limit` entries by batch, process and row."""
    if not distributed.is_active():
        return entries
    entries = entries if distributed.is_data_leader() else []
    headers = distributed.all_gather_object([[entry.batch, entry.caption] for entry in entries])
    order = sorted((batch, rank, row) for rank, rows in enumerate(headers) for row, (batch, _) in enumerate(rows))
    order = order[:limit]
    sent = [entries[row] for _, rank, row in order if rank == distributed.rank()]
    tensors = distributed.gather_tensors([clip for entry in sent for clip in entry.clips])
    if not distributed.is_first():
        return []
    received = [iter(part) for part in tensors]
    clips = len(tensors[0]) // len(sent) if sent else 0  # the first process has a part of the first batch
    return [
        _Entry(batch, [next(received[rank]) for _ in range(clips)], headers[rank][row][1]) for batch, rank, row in order
    ]


def enlarge_for_caption(clip: Tensor) -> Tensor:
    """Make a single image wide enough for its caption; the frames of a clip are side by side."""
    factor = max(1, math.ceil(MIN_WIDTH / clip.shape[-1]) if clip.shape[0] == 1 else 1)
    return repeat(clip, "t c h w -> t c (h i) (w j)", i=factor, j=factor)
