"""PSNR = −10 log₁₀ MSE between frames and their reconstructions."""

from __future__ import annotations

from typing import ClassVar

import torch
from einops import reduce
from torch import Tensor

from kineograph.core import distributed
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result

MIN_MSE = 1e-10  # a perfect copy has 100 dB


class Reconstruction:
    name: ClassVar[str] = "reconstruction"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "reconstruction"})

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.psnr: list[Tensor] = []

    @classmethod
    def open(cls, context: EvalContext) -> Reconstruction:
        return cls(context.device)

    def update(self, batch: EvalBatch) -> None:
        difference = batch.clips("real").float() - batch.clips("reconstruction").float()
        error = reduce(difference.square(), "b t c h w -> b t", "mean")
        psnr = -10 * torch.log10(error.clamp_min(MIN_MSE))  # B T
        self.psnr.append(psnr[batch.mask("real")].double().cpu())

    def compute(self) -> Result:
        own = torch.cat(self.psnr) if self.psnr else torch.zeros(0, dtype=torch.float64)
        psnr = distributed.all_gather_rows(own.to(self.device)).cpu()  # a decile needs all rows
        values = {"psnr": float(psnr.mean()), "psnr_worst_decile": float(psnr.quantile(0.1))}
        return Result(values, {"frames": len(psnr), "unit": "dB"})


METRIC = Reconstruction
