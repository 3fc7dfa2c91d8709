"""How much of a picture a codec keeps: PSNR = −10 log₁₀ MSE, a picture at a time, over frames that are no padding."""

from __future__ import annotations

from typing import ClassVar

import torch
from einops import reduce
from torch import Tensor

from kineograph.core import distributed
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result

SMALLEST = 1e-10  # MSE of a perfect copy: 100 dB


class Reconstruction:
    name: ClassVar[str] = "reconstruction"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "reconstruction"})

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.psnr: list[Tensor] = []

    @classmethod
    def open(cls, subject: EvalContext) -> Reconstruction:
        return cls(subject.device)

    def update(self, evidence: EvalBatch) -> None:
        assert evidence.real is not None
        assert evidence.reconstruction is not None
        error = reduce((evidence.real.float() - evidence.reconstruction.float()).square(), "b t c h w -> b t", "mean")
        psnr = -10 * torch.log10(error.clamp_min(SMALLEST))  # B T
        keep = evidence.frame_mask if evidence.frame_mask is not None else torch.ones_like(psnr, dtype=torch.bool)
        self.psnr.append(psnr[keep].double().cpu())

    def compute(self) -> Result:
        mine = torch.cat(self.psnr) if self.psnr else torch.zeros(0, dtype=torch.float64)
        every = distributed.all_gather_rows(mine.to(self.device)).cpu()  # a decile cannot be joined from deciles
        values = {"psnr": float(every.mean()), "psnr_worst_decile": float(every.quantile(0.1))}
        return Result(values, {"frames": len(every), "unit": "dB"})


METRIC = Reconstruction
