"""LPIPS between frames and their reconstructions, mean over frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kineograph.codec import perceptual
from kineograph.core import distributed
from kineograph.core import weight_cache as cache
from kineograph.core.safe_unpickle import sha256_of
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result, WeightsMissing

CHUNK = 32  # frames at once: VGG16's maps are large


@dataclass(frozen=True)
class LpipsMetric:
    """LPIPS of reconstructions, or of samples against the real items that they were drawn for."""

    name: str
    fake: Literal["generated", "reconstruction"]
    needs: frozenset[Kind]

    def open(self, context: EvalContext) -> LpipsDistance:
        value = context.extractors.choice(self.name, context.extractors.choice("lpips", "lpips-vgg16"))
        path = Path(value)
        try:
            file = cache.find(value) if cache.is_name(path) else cache.StoredWeights(path, sha256_of(path))
        except cache.WeightsNotFetched as error:
            raise WeightsMissing(str(error)) from None
        except FileNotFoundError:
            raise MetricSkipped(f"--extractor {self.name}={value} does not exist") from None
        network = perceptual.load_lpips(file.path)
        side = min(context.shape.height, context.shape.width)
        if side < network.smallest:
            raise MetricSkipped(f"images of {side} pixels are too small for LPIPS: it needs {network.smallest} or more")
        label = f"{value if cache.is_name(path) else path.name} {file.short}"
        return LpipsDistance(self, network, label, context.device)


class LpipsDistance:
    def __init__(self, metric: LpipsMetric, network: perceptual.Lpips, label: str, device: torch.device) -> None:
        self.name, self.fake, self.needs = metric.name, metric.fake, metric.needs
        self.network, self.label = network.to(device), label
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # Σ distance, frames

    def update(self, batch: EvalBatch) -> None:
        real, fake = batch.frame_pairs(self.fake)
        with torch.no_grad(), torch.autocast(real.device.type, enabled=False):
            for x, y in zip(real.float().split(CHUNK), fake.float().split(CHUNK), strict=True):
                distance = self.network(x * 2 - 1, y * 2 - 1)
                self.sums += torch.stack([distance.double().sum(), distance.new_tensor(len(x)).double()])

    def compute(self) -> Result:
        total, count = distributed.all_reduce_(self.sums.clone()).tolist()
        return Result({self.name: total / count}, {"extractor": self.label, "count": int(count)})


METRIC = LpipsMetric("lpips", "reconstruction", frozenset({"real", "reconstruction"}))
