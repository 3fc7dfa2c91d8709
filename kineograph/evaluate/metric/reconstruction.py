"""PSNR and SSIM between frames and their reconstructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result
from kineograph.evaluate.similarity import WINDOW, psnr, ssim


@dataclass(frozen=True)
class SimilarityMetric:
    """PSNR and SSIM of reconstructions, or of samples against the real items that they were drawn for."""

    name: str
    fake: Literal["generated", "reconstruction"]
    needs: frozenset[Kind]

    def open(self, context: EvalContext) -> Similarity:
        return Similarity(self.name, self.fake, self.needs, context.device)


@dataclass
class Similarity:
    name: str
    fake: Literal["generated", "reconstruction"]
    needs: frozenset[Kind]
    device: torch.device
    rows: list[Tensor] = field(default_factory=list)  # F 2: PSNR and SSIM of each frame

    def update(self, batch: EvalBatch) -> None:
        real, fake = batch.frame_pairs(self.fake)
        similarity = (
            ssim(real, fake) if min(real.shape[-2:]) >= WINDOW else torch.full_like(real[:, 0, 0, 0], torch.nan)
        )
        self.rows.append(torch.stack([psnr(real, fake).double(), similarity.double()], 1).cpu())

    def compute(self) -> Result:
        own = torch.cat(self.rows) if self.rows else torch.zeros(0, 2, dtype=torch.float64)
        rows = distributed.all_gather_rows(own.to(self.device)).cpu()  # a decile needs all rows
        values = {"psnr": float(rows[:, 0].mean()), "psnr_worst_decile": float(rows[:, 0].quantile(0.1))}
        if not rows[:, 1].isnan().any():  # else a picture is smaller than SSIM's window
            values["ssim"] = float(rows[:, 1].mean())
        return Result(values, {"frames": len(rows), "unit": "dB"})


METRIC = SimilarityMetric("reconstruction", "reconstruction", frozenset({"real", "reconstruction"}))
