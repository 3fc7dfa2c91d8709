"""The validation loss by quarter of noise levels or of the share of masked tokens: where a model fails, which one mean hides."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from kineograph.core.task import Mean
from kineograph.process.masking import TokenMask

RANGES = 4


def loss_by_timestep(errors: Tensor, t: Tensor, steps: int, present: Tensor | None = None) -> dict[str, Mean]:
    """errors B at timesteps t B → `loss/t0000-0249` …; `present` B is 0 where an error does not count."""
    counted = torch.ones_like(errors) if present is None else present
    edges = [number * steps // RANGES for number in range(RANGES + 1)]
    means = {}
    for low, high in pairwise(edges):
        inside = (t >= low) & (t < high)
        means[f"loss/t{low:04d}-{high - 1:04d}"] = Mean((errors * inside).sum(), (counted * inside).sum())
    return means


def loss_by_mask_share(
    score: Callable[[Tensor], Tensor], masked: TokenMask, real: Tensor | None = None
) -> dict[str, Mean]:
    """`loss/masked000-025` … in percent of a sample's tokens; `score` gives the summed loss under weights of the scored rows.

    `real` (B N, None: all) marks tokens that are not padding.
    """
    samples, tokens = masked.mask.shape
    total = masked.mask.new_full((samples,), tokens, dtype=torch.long) if real is None else real.sum(1)
    share = masked.mask.sum(1) / total  # B, above 0 and at most 1
    quarter = (share * RANGES).ceil().clamp(1, RANGES) - 1
    quarters = quarter.index_select(0, masked.rows // tokens)  # R
    means = {}
    for number in range(RANGES):
        weights = masked.weights * (quarters == number)
        low, high = 100 * number // RANGES, 100 * (number + 1) // RANGES
        means[f"loss/masked{low:03d}-{high:03d}"] = Mean(score(weights), weights.sum())
    return means
