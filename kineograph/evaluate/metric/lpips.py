"""LPIPS between pictures and what a codec gives back of them: the mean over frames that are no padding."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from kineograph.codec import perceptual
from kineograph.core import distributed
from kineograph.core import weights as cache
from kineograph.core.safe_unpickle import sha256_of
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result, WeightsMissing

CHUNK = 32  # frames at once: the maps of VGG16 are large


class LpipsDistance:
    name: ClassVar[str] = "lpips"
    needs: ClassVar[frozenset[Kind]] = frozenset({"real", "reconstruction"})

    def __init__(self, network: perceptual.Lpips, label: str, subject: EvalContext) -> None:
        self.network, self.label = network.to(subject.device), label
        self.sums = torch.zeros(2, dtype=torch.float64, device=subject.device)  # of distances, of frames

    @classmethod
    def open(cls, subject: EvalContext) -> LpipsDistance:
        value = subject.extractors.choice(cls.name, "lpips-vgg16")
        path = Path(value)
        try:
            found = cache.find(value) if cache.is_name(path) else cache.Found(path, sha256_of(path))
        except cache.NotThere as error:
            raise WeightsMissing(str(error)) from None
        except FileNotFoundError:
            raise MetricSkipped(f"--extractor lpips={value} is not there") from None
        network = perceptual.load_lpips(found.path)
        side = min(subject.shape.height, subject.shape.width)
        if side < network.smallest:
            raise MetricSkipped(f"pictures of {side} pixels are too small for it: {network.smallest} are the least")
        return cls(network, f"{value if cache.is_name(path) else path.name} {found.short}", subject)

    def update(self, evidence: EvalBatch) -> None:
        real, made = evidence.pictures("real"), evidence.pictures("reconstruction")
        with torch.no_grad(), torch.autocast(real.device.type, enabled=False):
            for x, y in zip(real.float().split(CHUNK), made.float().split(CHUNK), strict=True):
                distance = self.network(x * 2 - 1, y * 2 - 1)
                self.sums += torch.stack([distance.double().sum(), distance.new_tensor(len(x)).double()])

    def compute(self) -> Result:
        total, count = distributed.all_reduce_(self.sums.clone()).tolist()
        return Result({"lpips": total / count}, {"extractor": self.label, "count": int(count)})


METRIC = LpipsDistance
