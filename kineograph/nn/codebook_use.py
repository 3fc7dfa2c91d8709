"""Statistics of codebook use, and of a token generator's targets."""

from __future__ import annotations

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.health import LOSS_FALLS, Limit
from kineograph.core.task import Mean


def codebook_histogram(ids: Tensor, codes: int) -> Tensor:
    """Count each code: int64 per code. Histograms of batches add up."""
    flat = ids.flatten()
    return torch.zeros(codes, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))


def codebook_usage(histogram: Tensor) -> dict[str, Tensor]:
    """`use`: share of codes that occur. `perplexity`: exp(entropy) of the code distribution."""
    share = histogram.double() / histogram.sum().clamp_min(1)
    return {"use": (histogram > 0).double().mean(), "perplexity": torch.special.entr(share).sum().exp()}


def count_codes(ids: Tensor, codes: int, keep: Tensor | None = None, spare: bool = False) -> Tensor:
    """The histogram of all processes' batches. `keep` is False (or 0) at padding; `spare`: another process counts this batch."""
    if keep is not None:
        ids = ids.masked_fill(keep == 0, codes)  # padding has a bin of its own
    histogram = codebook_histogram(ids, codes + 1)[:codes]
    return distributed.all_reduce_(torch.zeros_like(histogram) if spare else histogram)


def describe_codes(
    ids: Tensor, codes: int, count: Tensor, keep: Tensor | None = None, spare: bool = False
) -> dict[str, Mean]:
    """Codebook use of this batch, over all processes. For a whole set, add up histograms: its use is not the mean of these."""
    usage = codebook_usage(count_codes(ids, codes, keep, spare))
    return {f"codes/{name}": Mean(value * count, count) for name, value in usage.items()}


MIN_TOKENS = 4  # for each code that occurs: fewer say too little about how often it does


def describe_targets(tokens: Tensor, codes: int, keep: Tensor | None = None, spare: bool = False) -> dict[str, Mean]:
    """Statistics of a token generator's targets in validation, means over the batches of all processes.

    `tokens/distinct`: different codes. `tokens/entropy`: of the frequencies of codes, in nats: the cross-entropy of a model that has
    learned nothing else.
    """
    histogram = count_codes(tokens, codes, keep, spare)
    distinct, total = (histogram > 0).sum(), histogram.sum()
    # Miller and Madow: a sample's entropy is too low by (codes − 1) / 2 samples.
    entropy = torch.special.entr(histogram.double() / total).sum() + (distinct - 1) / (2 * total)
    is_enough = (total >= MIN_TOKENS * distinct).double()
    return {"tokens/distinct": Mean(distinct, 1.0), "tokens/entropy": Mean(entropy * is_enough, is_enough)}


def token_limits(smoothing: float) -> tuple[Limit, ...]:
    """Health limits of a token generator. Label `smoothing` raises its cross-entropy."""
    constant = Limit(
        "constant_tokens",
        "tokens/distinct",
        "All tokens are the same code: the codec has collapsed, and there is nothing to learn.",
        "Look at the codec's reconstructions and train it again.",
        at_least=1.5,
        always=True,
    )
    frequencies = Limit(
        "only_frequencies",
        "train/cross_entropy",
        "The generator has learned how often each token occurs, and nothing about captions or neighbours.",
        "Lower train.lr, lengthen train.warmup or train for more steps.",
        at_most=0.98,
        share_of="tokens/entropy",
    )
    return (constant, LOSS_FALLS) if smoothing else (constant, LOSS_FALLS, frequencies)
