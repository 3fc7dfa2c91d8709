"""Fréchet distance, kernel distance and Inception Score of features, through torchmetrics.

Processes are joined here, not by torchmetrics: its own sync gathers the d × d sums of all processes at once and hangs where a process
has no samples. It also draws subsets from torch's global generator in the order of arrival; here rows are sorted and it is seeded.
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
SUBSET_SIZE = 1000  # of KID, as in its paper
SPLITS = 10  # of the Inception Score, as in its paper …
SPLIT_FROM = 5000  # … from so many samples on


class FrechetDistance:
    """‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2 √(Σ₁Σ₂)) from running sums in float64, so memory does not grow with the samples."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        fid = _torchmetrics().fid
        self.metric = fid.FrechetInceptionDistance(_Identity(width), sync_on_compute=False).to(device)

    def update(self, features: Tensor, real: bool) -> None:
        self.metric.update(features, real=real)

    def compute(self) -> tuple[float, int, int]:
        """The distance, and the number of real and of generated samples, over all processes. Collective; call it once."""
        metric = self.metric
        for side in ("real", "fake"):
            for state in ("features_sum", "features_cov_sum", "features_num_samples"):
                distributed.all_reduce_(getattr(metric, f"{side}_{state}"))
        counts = int(metric.real_features_num_samples), int(metric.fake_features_num_samples)
        _check_counts("a covariance", *counts)
        metric.orig_dtype = torch.float64  # else it rounds the distance to the features' precision
        # On the CPU: torch's CUDA builds may lack eigenvalues of asymmetric matrices.
        return max(0.0, float(metric.cpu().compute())), *counts


class FeatureRows:
    """Features kept on the host, for scores that need them all: 8 KiB a sample of width 2048."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width, self.device = width, device
        self.parts: list[Tensor] = []

    def add(self, features: Tensor) -> None:
        self.parts.append(features.float().cpu())

    def gather(self) -> Tensor:
        """The rows of all processes, N width, sorted so that their order depends on the rows alone. Collective."""
        own = torch.cat(self.parts) if self.parts else torch.zeros(0, self.width)
        rows = distributed.all_gather_rows(own.to(self.device)).cpu() if distributed.is_active() else own
        columns = rows[:, : min(8, rows.shape[1])].numpy()
        return rows[torch.from_numpy(np.lexsort(columns.T[::-1]))]


def kernel_distance(real: Tensor, fake: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
    """KID: the unbiased squared MMD under (x·y/d + 1)³, mean over subsets. → values, labels"""
    _check_counts("KID", len(real), len(fake))
    size = min(len(real), len(fake), SUBSET_SIZE)
    subsets = SUBSETS if max(len(real), len(fake)) > size else 1
    kid = _torchmetrics().kid
    with _seeded():
        metric = kid.KernelInceptionDistance(
            _Identity(real.shape[1]), subsets=subsets, subset_size=size, sync_on_compute=False
        )
        metric.update(real.double(), real=True)
        metric.update(fake.double(), real=False)
        mean, deviation = metric.compute()
    values = {"kid": float(mean)} | ({"kid_deviation": float(deviation)} if subsets > 1 else {})
    return values, {"subsets": f"{subsets} × {size}"}


def inception_score(logits: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
    """exp(mean KL(p(y|x) ‖ p(y))), mean over ten splits where there are enough samples. → values, labels"""
    if len(logits) < 2:
        raise MetricSkipped(f"{len(logits)} samples: the Inception Score needs at least 2")
    splits = SPLITS if len(logits) >= SPLIT_FROM else 1
    inception = _torchmetrics().inception
    with _seeded():
        metric = inception.InceptionScore(_Identity(logits.shape[1]), splits=splits, sync_on_compute=False)
        metric.update(logits.double())
        mean, deviation = metric.compute()
    return {"is": float(mean)} | ({"is_deviation": float(deviation)} if splits > 1 else {}), {"splits": splits}


def _check_counts(score: str, real: int, fake: int) -> None:
    if min(real, fake) < 2:
        raise MetricSkipped(f"{real} real and {fake} generated samples: {score} needs at least 2 of each")


class _Identity(nn.Module):
    """Stands in for the network that torchmetrics expects: the features are already computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about memory, and about the deviation of one split, which is not used
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
