"""Drawing tokens from logits, with one uniform number a draw.

Gumbel noise for every class costs a random number a class (268 million a step at 16 × 256 × 65,536). The inverse of the cumulative
distribution needs one a draw. The cumulative sum is taken in two levels, over blocks of classes and inside the chosen block: cheaper than
a sum over all classes, and more exact.
"""

from __future__ import annotations

import math
from functools import lru_cache

from torch import Tensor


def draw_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_k: int | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens from softmax(logits / temperature) over the top_k classes (null: over all); 0 takes the likeliest.

    logits are … V, uniforms are … in (0, 1). Gives tokens and their log-probabilities under softmax(logits), untouched by temperature and top-k.
    """
    if temperature == 0:
        top, tokens = logits.float().max(dim=-1)
        return tokens, top - logits.float().logsumexp(dim=-1)
    plain = temperature == 1
    if top_k is not None and top_k < logits.shape[-1]:
        values, classes = top_classes(logits, top_k)
        place, _ = _inverse(values.float() / temperature, uniforms)
        tokens, total = classes.gather(-1, place[..., None])[..., 0], None
    else:
        tokens, total = _inverse(logits if plain else logits.float() / temperature, uniforms)
    if total is None or not plain:
        total = logits.float().logsumexp(dim=-1)
    return tokens, logits.gather(-1, tokens[..., None])[..., 0].float() - total


def top_classes(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits and their classes. The k best classes lie in the k blocks with the largest maxima, so only those are searched."""
    block = _block(logits.shape[-1] // 4)
    blocks = logits.shape[-1] // block if logits.shape[-1] % block == 0 else 0
    if blocks <= 2 * k:
        return logits.topk(k, dim=-1)
    grouped = logits.unflatten(-1, (blocks, block))  # … n b
    best = grouped.amax(dim=-1).topk(k, dim=-1, sorted=False).indices  # … k
    inside = grouped.gather(-2, best[..., None].expand(*best.shape, block))  # … k b
    values, places = inside.flatten(-2).topk(k, dim=-1)
    return values, best.gather(-1, places // block) * block + places % block


@lru_cache(maxsize=64)
def _block(classes: int) -> int:
    """The divisor of the number of classes that is nearest its square root."""
    root = math.isqrt(max(classes, 1))
    return next(size for size in range(root, 0, -1) if classes % size == 0) if classes else 1


def _inverse(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The class at which the cumulative distribution passes the uniform number, and the log of the sum of exponentials."""
    classes = logits.shape[-1]
    size = classes // _block(classes)
    grouped = logits.unflatten(-1, (classes // size, size))  # … n b
    sums = grouped.float().logsumexp(dim=-1)  # … n
    total = sums.logsumexp(dim=-1)
    block, rest = _pass((sums - total[..., None]).exp(), uniforms)
    inside = grouped.gather(-2, block[..., None, None].expand(*block.shape, 1, size))[..., 0, :].float()  # … b
    place, _ = _pass((inside - inside.amax(dim=-1, keepdim=True)).exp(), rest)
    return block * size + place, total


def _pass(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose cumulative weight exceeds the uniform's share, and how far (0 … 1) into that place's weight the share lies."""
    sums = weights.cumsum(dim=-1)  # … n
    share = (
        uniforms * sums[..., -1] * (1 - 2**-23)
    )  # below the last sum even after rounding, so a place of weight 0 is never taken
    place = (sums <= share[..., None]).sum(dim=-1).clamp_(max=weights.shape[-1] - 1)
    after, weight = sums.gather(-1, place[..., None])[..., 0], weights.gather(-1, place[..., None])[..., 0]
    return place, (1 - (after - share) / weight).clamp(0.0, 1 - 2**-24)
