"""LPIPS between frames and their reconstructions, mean over frames."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from kineograph.codec import perceptual
from kineograph.core import distributed
from kineograph.core import weight_cache as cache
from kineograph.core.safe_unpickle import sha256_of
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result, WeightsMissing

CHUNK = 32  # frames at once: VGG16's maps are large


class LpipsDistance:
    name: ClassVar[str] = "lpips"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "reconstruction"})

    def __init__(self, network: perceptual.Lpips, label: str, device: torch.device) -> None:
        self.network, self.label = network.to(device), label
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # Σ distance, frames

    @classmethod
    def open(cls, context: EvalContext) -> LpipsDistance:
        value = context.extractors.choice(cls.name, "lpips-vgg16")
        path = Path(value)
        try:
            file = cache.find(value) if cache.is_name(path) else cache.StoredWeights(path, sha256_of(path))
        except cache.WeightsNotFetched as error:
            raise WeightsMissing(str(error)) from None
        except FileNotFoundError:
            raise MetricSkipped(f"--extractor lpips={value} does not exist") from None
        network = perceptual.load_lpips(file.path)
        side = min(context.shape.height, context.shape.width)
        if side < network.smallest:
            raise MetricSkipped(f"images of {side} pixels are too small for LPIPS: it needs {network.smallest} or more")
        return cls(network, f"{value if cache.is_name(path) else path.name} {file.short}", context.device)

    def update(self, batch: EvalBatch) -> None:
        real, fake = batch.frames("real"), batch.frames("reconstruction")
        with torch.no_grad(), torch.autocast(real.device.type, enabled=False):
            for x, y in zip(real.float().split(CHUNK), fake.float().split(CHUNK), strict=True):
                distance = self.network(x * 2 - 1, y * 2 - 1)
                self.sums += torch.stack([distance.double().sum(), distance.new_tensor(len(x)).double()])

    def compute(self) -> Result:
        total, count = distributed.all_reduce_(self.sums.clone()).tolist()
        return Result({"lpips": total / count}, {"extractor": self.label, "count": int(count)})


METRIC = LpipsDistance
