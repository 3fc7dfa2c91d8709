"""Fréchet distance, kernel distance and Inception Score of features; the latter two through torchmetrics.

Processes are joined here, not by torchmetrics: its own sync gathers the d × d sums of all processes at once and hangs where a process
has no samples. It also draws subsets from torch's global generator in the order of arrival; here rows are sorted and it is seeded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of a set's features, in float64 on the host."""

    mean: Tensor  # D
    covariance: Tensor  # D D
    count: int | None = None  # samples; None: not known


class Moments:
    """Running sums of features in float64, so memory does not grow with the samples.

    `population`: divide the covariance by the number of samples n, not by n − 1.
    """

    def __init__(self, width: int, device: torch.device, population: bool = False) -> None:
        self.width, self.population = width, population
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.total = torch.zeros(width, dtype=torch.float64, device=device)
        self.products = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(self, features: Tensor) -> None:
        features = features.to(self.total)
        self.count += len(features)
        self.total += features.sum(0)
        self.products += features.T @ features

    def compute(self) -> Gaussian:
        """Over all processes. Collective."""
        count, total, products = (
            distributed.all_reduce_(part.clone()).cpu() for part in (self.count, self.total, self.products)
        )
        number = int(count)
        mean = total / max(number, 1)
        divisor = number if self.population else number - 1
        covariance = (products - number * torch.outer(mean, mean)) / max(divisor, 1)
        return Gaussian(mean, covariance, number)


def frechet_distance(real: Gaussian, fake: Gaussian) -> float:
    """‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2 √(Σ₁Σ₂)), where tr √(Σ₁Σ₂) is that of the symmetric √Σ₁ Σ₂ √Σ₁."""
    _check_counts("a covariance", real.count, fake.count)
    values, vectors = torch.linalg.eigh(real.covariance)
    root = vectors * values.clamp_min(0).sqrt()  # root · rootᵀ = Σ₁
    inner = torch.linalg.eigvalsh(root.T @ fake.covariance @ root).clamp_min(0)
    distance = (real.mean - fake.mean).square().sum() + real.covariance.trace() + fake.covariance.trace()
    return max(0.0, float(distance - 2 * inner.sqrt().sum()))


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


def kernel_distance(
    real: Tensor, fake: Tensor, subsets: int = SUBSETS, size: int | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """KID: the unbiased squared MMD under (x·y/d + 1)³, mean over subsets of `size`; None: 1000 or all. → values, labels"""
    _check_counts("KID", len(real), len(fake))
    smaller = min(len(real), len(fake))
    if size is not None and size > smaller:
        raise MetricSkipped(
            f"kid_subset_size={size} is more than the {smaller} samples: use {smaller} or less, or more samples"
        )
    size = size or min(smaller, SUBSET_SIZE)
    subsets = subsets if max(len(real), len(fake)) > size else 1
    kid = _import_torchmetrics().kid
    with _fix_seed():
        metric = kid.KernelInceptionDistance(
            _Identity(real.shape[1]), subsets=subsets, subset_size=size, sync_on_compute=False
        )
        metric.update(real.double(), real=True)
        metric.update(fake.double(), real=False)
        mean, deviation = metric.compute()
    values = {"kid": float(mean)} | ({"kid_deviation": float(deviation)} if subsets > 1 else {})
    return values, {"subsets": f"{subsets} × {size}"}


def inception_score(logits: Tensor, splits: int | None = None) -> tuple[dict[str, float], dict[str, Any]]:
    """exp(mean KL(p(y|x) ‖ p(y))), mean over `splits`; None: ten where there are enough samples. → values, labels"""
    if len(logits) < 2 * (splits or 1):
        raise MetricSkipped(
            f"{len(logits)} samples: the Inception Score needs at least 2"
            + (f" in each of {splits} splits" if splits else "")
        )
    splits = splits or (SPLITS if len(logits) >= SPLIT_FROM else 1)
    inception = _import_torchmetrics().inception
    with _fix_seed():
        metric = inception.InceptionScore(_Identity(logits.shape[1]), splits=splits, sync_on_compute=False)
        metric.update(logits.double())
        mean, deviation = metric.compute()
    deviation = (
        deviation * ((splits - 1) / splits) ** 0.5
    )  # over the splits, as in the score's paper; torchmetrics has n − 1
    return {"is": float(mean)} | ({"is_deviation": float(deviation)} if splits > 1 else {}), {"splits": splits}


def _check_counts(score: str, real: int | None, fake: int | None) -> None:
    """None: a saved Gaussian that does not say."""
    if min(2 if real is None else real, 2 if fake is None else fake) < 2:
        raise MetricSkipped(f"{real} real and {fake} generated samples: {score} needs at least 2 of each")


class _Identity(nn.Module):
    """Stands in for the network that torchmetrics expects: the features are already computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features


@contextmanager
def _fix_seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about memory, and about the deviation of one split, which is not used
        torch.manual_seed(key_of(0, "subsets of features") >> 1)
        yield


def _import_torchmetrics() -> Any:
    try:
        import torchmetrics.image.inception
        import torchmetrics.image.kid
    except ImportError:
        raise WeightsMissing("torchmetrics is not installed: pip install 'kineograph[metrics]'") from None
    return torchmetrics.image
