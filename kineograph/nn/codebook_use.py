"""How much of a codebook is in use."""

from __future__ import annotations

import torch
from torch import Tensor


def codebook_histogram(ids: Tensor, codes: int) -> Tensor:
    """How often each code occurs: int64, one a code. Histograms of batches add up to that of a whole set."""
    flat = ids.flatten()
    return torch.zeros(codes, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))


def usage(histogram: Tensor) -> dict[str, Tensor]:
    """`use`: the share of codes that occur. `perplexity`: exp(entropy), the number of equally used codes that this is worth."""
    share = histogram.double() / histogram.sum().clamp_min(1)
    return {"use": (histogram > 0).double().mean(), "perplexity": torch.special.entr(share).sum().exp()}
