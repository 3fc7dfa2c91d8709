"""Masked token modelling: how tokens are hidden in training, and found again step by step in sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kineograph.core.noise import Noise, key_of
from kineograph.process.sampling import draw_tokens

_TURN = (math.sqrt(5) - 1) / 2  # multiples of the golden ratio's fraction lie evenly in [0, 1), however many are taken


# Training --------------------------------------------------------------------------------------------------------


class Masked(NamedTuple):
    """Which tokens are hidden, and where the R rows that are scored lie in the flattened batch."""

    mask: Tensor  # B N, bool
    rows: Tensor  # R, int64 into B · N, each place at most once
    weights: Tensor  # R, float: 1 = hidden and scored, 0 = padding


def mask_ratios(noise: Noise) -> Tensor:
    """γ = cos(r π / 2), one a sample, r uniform in [0, 1).

    r = frac(u + slot · golden ratio) with u drawn for the step: uniform for each sample, and spread evenly over the samples of a step, so that
    the loss is less noisy and the number of hidden tokens in a batch is nearly known beforehand.
    """
    start = key_of(noise.seed, noise.step, "mask ratio") * 2.0**-64
    r = (noise.slots.double() * _TURN + start) % 1.0
    return torch.cos(r * (math.pi / 2)).float()


def capacity(samples: int, tokens: int) -> int:
    """Rows that hold all hidden tokens of a batch of samples in neighbouring slots.

    Their mean number is 2/π of all. Koksma's inequality bounds the excess by tokens × discrepancy, and the golden ratio's discrepancy grows
    with the logarithm of the number of samples only.
    """
    bound = samples * tokens * 2 / math.pi + tokens * (1 + 0.4 * math.log(samples)) + samples
    return min(samples * tokens, math.ceil(bound / 64) * 64)


def hide(noise: Noise, tokens: int) -> Masked:
    """Hide a share γ of each sample's tokens, at least one, at random places. All shapes are known without asking the device.

    Were more hidden than `capacity` allows (slots that are far from neighbours), a random choice of them is scored.
    """
    counts = (mask_ratios(noise) * tokens).ceil().clamp_(1, tokens)  # B
    order = noise.uniform("mask places", tokens).argsort(dim=1)  # B N
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(tokens, device=order.device).expand_as(order))
    mask = ranks < counts[:, None]
    chance = torch.where(mask, noise.uniform("mask scored", tokens), 2.0).flatten()
    values, rows = chance.sort()
    limit = capacity(noise.batch, tokens)
    return Masked(mask, rows[:limit], (values[:limit] < 2.0).float())


# Sampling --------------------------------------------------------------------------------------------------------


def hidden_counts(tokens: int, steps: int) -> list[int]:
    """Tokens still hidden before each step, and 0 after the last: N cos(π/2 · step / steps)."""
    counts = [max(1, math.floor(tokens * math.cos(math.pi / 2 * step / steps))) for step in range(steps)]
    return [*counts, 0]


def find_tokens(
    denoise: Callable[[Tensor, Tensor, int], Tensor],
    tokens: Tensor,
    *,
    mask_id: int,
    steps: int,
    noise: Noise,
    temperature: float = 1.0,
    top_k: int | None = None,
    confidence_noise: float = 4.5,
    given: Tensor | None = None,
    critic: Callable[[Tensor, int], Tensor] | None = None,
    critic_noise: float = 1.0,
) -> Tensor:
    """Fill in hidden tokens over `steps`, each time keeping those that the model is surest of and hiding the rest again.

    `denoise(tokens B N, places B m, step)` gives logits B m V at the hidden places only. `given` (N, bool, on the host) marks places whose
    `tokens` are fixed. Without a critic, a token once kept stays; with one, `critic(tokens B N, step)` gives B N scores, high = looks wrong,
    and any token that was not given may be hidden again. Noise on the ranking falls to 0 by the last step. How many tokens are hidden at each
    step is known on the host, so the device is never asked, and each draw belongs to (sample, step, place): chunks of a batch draw alike.
    """
    samples, length = tokens.shape
    free = torch.arange(length) if given is None else (~given.cpu()).nonzero()[:, 0]
    if not len(free):
        return tokens
    places = free.to(tokens.device).expand(samples, -1)  # B m
    every = places
    tokens = tokens.scatter(1, places, mask_id)
    counts = hidden_counts(places.shape[1], steps)
    uniforms = noise.uniform("tokens", steps, length)  # B S N
    ranking = noise.uniform("ranking", steps, length)
    for step in range(steps):
        logits = denoise(tokens, places, step)  # B m V
        drawn, confidence = draw_tokens(logits, uniforms[:, step].gather(1, places), temperature, top_k)
        tokens = tokens.scatter(1, places, drawn)
        if step + 1 == steps:
            break
        annealed = 1 - (step + 1) / steps
        if critic is None:
            gumbel = -torch.log(-torch.log(ranking[:, step].gather(1, places)))
            doubt = -(confidence + confidence_noise * annealed * gumbel)
        else:
            places = every
            doubt = critic(tokens, step).float().gather(1, places)
            doubt = doubt + critic_noise * annealed * (ranking[:, step].gather(1, places) - 0.5)
        places = places.gather(1, doubt.topk(counts[step + 1], dim=1).indices)
        tokens = tokens.scatter(1, places, mask_id)
    return tokens
