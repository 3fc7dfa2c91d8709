"""Codebook usage statistics."""

from __future__ import annotations

import torch
from torch import Tensor


def codebook_histogram(ids: Tensor, codes: int) -> Tensor:
    """Count each code: int64 per code. Histograms of batches add up."""
    flat = ids.flatten()
    return torch.zeros(codes, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))


def codebook_usage(histogram: Tensor) -> dict[str, Tensor]:
    """`use`: share of codes that occur. `perplexity`: exp(entropy) of the code distribution."""
    share = histogram.double() / histogram.sum().clamp_min(1)
    return {"use": (histogram > 0).double().mean(), "perplexity": torch.special.entr(share).sum().exp()}
