"""Categorical sampling from logits with one uniform number per token.

The Gumbel trick needs a random number per class (268 million a step at 16 × 256 × 65,536); inverting the cumulative
distribution needs one per token. The cumulative sum has two levels, over blocks of classes and inside the chosen block:
cheaper than a sum over all classes, and more exact.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def draw_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_k: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sample from softmax(logits / temperature) over the top_k classes (None: all); temperature 0 takes the argmax.

    logits are … V, uniforms are … in (0, 1). → tokens, and their log-probabilities under plain softmax(logits).
    """
    if temperature == 0:
        top, tokens = logits.float().max(dim=-1)
        return tokens, top - logits.float().logsumexp(dim=-1)
    plain = temperature == 1
    if top_k is not None and top_k < logits.shape[-1]:
        values, classes = top_k_blockwise(logits, top_k)
        index, _ = _invert_cdf(values.float() / temperature, uniforms)
        tokens, total = classes.gather(-1, index[..., None])[..., 0], None
    else:
        tokens, total = _invert_cdf(logits if plain else logits.float() / temperature, uniforms)
    if total is None or not plain:
        total = logits.float().logsumexp(dim=-1)
    return tokens, logits.gather(-1, tokens[..., None])[..., 0].float() - total


def top_k_blockwise(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits and their classes. They lie in the k blocks with the largest maxima, so only those are searched."""
    block = _block_size(logits.shape[-1] // 4)
    blocks = logits.shape[-1] // block if logits.shape[-1] % block == 0 else 0
    if blocks <= 2 * k:
        return logits.topk(k, dim=-1)
    grouped = logits.unflatten(-1, (blocks, block))  # … n b
    best = grouped.amax(dim=-1).topk(k, dim=-1, sorted=False).indices  # … k
    inside = grouped.gather(-2, best[..., None].expand(*best.shape, block))  # … k b
    values, offsets = inside.flatten(-2).topk(k, dim=-1)
    return values, best.gather(-1, offsets // block) * block + offsets % block


@lru_cache(maxsize=64)
def _block_size(classes: int) -> int:
    """The largest divisor of `classes` that is at most its square root."""
    root = math.isqrt(max(classes, 1))
    return next(size for size in range(root, 0, -1) if classes % size == 0) if classes else 1


def _invert_cdf(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The class where the cumulative distribution passes the uniform number, and the logsumexp of the logits."""
    classes = logits.shape[-1]
    size = classes // _block_size(classes)
    grouped = logits.unflatten(-1, (classes // size, size))  # … n b
    sums = grouped.float().logsumexp(dim=-1)  # … n
    total = sums.logsumexp(dim=-1)
    block, rest = _search_cumsum((sums - total[..., None]).exp(), uniforms)
    inside = grouped.gather(-2, block[..., None, None].expand(*block.shape, 1, size))[..., 0, :].float()  # … b
    index, _ = _search_cumsum((inside - inside.amax(dim=-1, keepdim=True)).exp(), rest)
    return block * size + index, total


def cumulative_sum(values: Tensor) -> Tensor:
    """cumsum over the last axis, also where torch allows only deterministic algorithms and refuses that of a GPU.

    A GPU adds up each of several rows in a fixed order. It divides a single one among blocks of threads, whose order varies.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(dim=-1)
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return torch.stack([values, values]).cumsum(dim=-1)[0]
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


def _search_cumsum(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative weight exceeds uniform · total, and the fraction (0 … 1) inside its weight."""
    sums = cumulative_sum(weights)  # … n
    # Below the last sum even after rounding, so that an index of weight 0 is never taken.
    share = uniforms * sums[..., -1] * (1 - 2**-23)
    index = (sums <= share[..., None]).sum(dim=-1).clamp_(max=weights.shape[-1] - 1)
    after, weight = sums.gather(-1, index[..., None])[..., 0], weights.gather(-1, index[..., None])[..., 0]
    return index, (1 - (after - share) / weight).clamp(0.0, 1 - 2**-24)
