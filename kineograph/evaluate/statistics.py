"""From features to scores: Fréchet distance, kernel distance, Inception Score, through torchmetrics.

torchmetrics does the arithmetic; what several processes saw is joined here, before it. Its own joining gathers the d × d sums of
every process at once, and hangs where a process has seen nothing. It also draws subsets from torch's global generator in
the order in which samples came: here rows are put in an order of their own, and the generator is seeded for the call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kineograph.core import distributed
from kineograph.core.noise import key_of
from kineograph.evaluate.metric_api import MetricSkipped, WeightsMissing

SUBSETS = 100
SUBSET_SIZE = 1000  # of the kernel distance, as in its paper
SPLITS = 10  # of the Inception Score, as in its paper …
SPLIT_FROM = 5000  # … where there are samples enough for ten means


class FrechetDistance:
    """‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2 √(Σ₁Σ₂)), from running sums in float64: memory does not grow with the samples."""

    def __init__(self, width: int, device: torch.device) -> None:
        image = _torchmetrics()
        self.width = width
        self.metric = image.fid.FrechetInceptionDistance(_Given(width), sync_on_compute=False).to(device)

    def update(self, features: Tensor, real: bool) -> None:
        self.metric.update(features, real=real)

    def joined(self) -> tuple[float, int, int]:
        """The distance, and how many real and made ones it is of, over all processes. To be called once, by all of them."""
        metric = self.metric
        for side in ("real", "fake"):
            for state in ("features_sum", "features_cov_sum", "features_num_samples"):
                distributed.all_reduce_(getattr(metric, f"{side}_{state}"))
        counts = int(metric.real_features_num_samples), int(metric.fake_features_num_samples)
        if min(counts) < 2:
            raise MetricSkipped(
                f"there are {counts[0]} real and {counts[1]} made ones: a covariance takes at least 2 of each"
            )
        metric.orig_dtype = torch.float64  # it would round the distance to the features' own precision
        # The eigenvalues of a matrix without symmetry: a matter of seconds on a CPU, and not in every CUDA build of torch.
        return max(0.0, float(metric.cpu().compute())), *counts


class FeatureRows:
    """Features kept on the host, for scores that need them all: 8 KiB a sample of width 2048."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[Tensor] = []

    def add(self, features: Tensor) -> None:
        self.parts.append(features.float().cpu())

    def joined(self, width: int) -> Tensor:
        """Those of all processes, in an order that depends on nothing but the rows themselves."""
        mine = torch.cat(self.parts) if self.parts else torch.zeros(0, width)
        rows = distributed.all_gather_rows(mine.to(self.device)).cpu() if distributed.is_active() else mine
        columns = rows[:, : min(8, rows.shape[1])].numpy()
        return rows[torch.from_numpy(np.lexsort(columns.T[::-1]))]


def kernel_distance(real: Tensor, made: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
    """KID: the unbiased squared MMD under (x·y/d + 1)³, mean over subsets; of fewer than a subset's worth, over all at once."""
    image = _torchmetrics()
    size = min(len(real), len(made), SUBSET_SIZE)
    if size < 2:
        raise MetricSkipped(f"there are {len(real)} real and {len(made)} made ones: KID takes at least 2 of each")
    subsets = SUBSETS if max(len(real), len(made)) > size else 1
    with _seeded():
        metric = image.kid.KernelInceptionDistance(
            _Given(real.shape[1]), subsets=subsets, subset_size=size, sync_on_compute=False
        )
        metric.update(real.double(), real=True)
        metric.update(made.double(), real=False)
        mean, deviation = metric.compute()
    values = {"kid": float(mean)} | ({"kid_deviation": float(deviation)} if subsets > 1 else {})
    return values, {"subsets": f"{subsets} × {size}"}


def inception_score(logits: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
    """exp(mean KL(p(y|x) ‖ p(y))) of made pictures: mean over ten splits, or over none where there are few."""
    image = _torchmetrics()
    if len(logits) < 2:
        raise MetricSkipped(f"there are {len(logits)} pictures: the Inception Score takes at least 2")
    splits = SPLITS if len(logits) >= SPLIT_FROM else 1
    with _seeded():
        metric = image.inception.InceptionScore(_Given(logits.shape[1]), splits=splits, sync_on_compute=False)
        metric.update(logits.double())
        mean, deviation = metric.compute()
    return {"is": float(mean)} | ({"is_deviation": float(deviation)} if splits > 1 else {}), {"splits": splits}


class _Given(nn.Module):
    """torchmetrics asks for a network; the features are there already."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of memory, at each construction; of the deviation of a single split, which is not told
        torch.manual_seed(key_of(0, "subsets of features") >> 1)
        yield


def _torchmetrics() -> Any:
    try:
        import torchmetrics.image.fid
        import torchmetrics.image.inception
        import torchmetrics.image.kid
    except ImportError:
        raise WeightsMissing("torchmetrics is not installed: pip install 'kineograph[metrics]'") from None
    return torchmetrics.image
