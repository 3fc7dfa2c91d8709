"""Masked token modelling: how tokens are hidden in training, and found again step by step in sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kineograph.core.config import Config
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Mean
from kineograph.process.guidance import Schedule, guided, scale_at
from kineograph.process.sampling import draw_tokens

Critic = Callable[[Tensor, int], Tensor]  # tokens B N, step → how wrong each looks, B N

# Training --------------------------------------------------------------------------------------------------------


class Masked(NamedTuple):
    """Which tokens are hidden, and where the R rows that are scored lie in the flattened batch."""

    mask: Tensor  # B N, bool
    rows: Tensor  # R, int64 into B · N, each place at most once
    weights: Tensor  # R, float: 1 = hidden and scored, 0 = padding


def mask_ratios(noise: Noise, bias: float = 1.0) -> Tensor:
    """γ = cos(r^bias π / 2), one a sample, r uniform in [0, 1).

    r = frac(u + slot · golden ratio) with u drawn for the step: uniform for each sample, and spread evenly over the samples of a step, so that
    the loss is less noisy and the number of hidden tokens in a batch is nearly known beforehand.
    """
    return torch.cos(noise.spread("mask ratio") ** bias * (math.pi / 2)).float()


@lru_cache
def mean_ratio(bias: float) -> float:
    """The mean of γ: 2/π for a bias of 1 (midpoint rule)."""
    count = 10_000
    return sum(math.cos(((i + 0.5) / count) ** bias * math.pi / 2) for i in range(count)) / count


def capacity(samples: int, tokens: int, bias: float = 1.0) -> int:
    """Rows that hold all hidden tokens of a batch of samples in neighbouring slots.

    Their mean number is `mean_ratio` of all. γ falls from 1 to 0, so Koksma's inequality bounds the excess by tokens × discrepancy, and the
    golden ratio's discrepancy grows with the logarithm of the number of samples only.
    """
    bound = samples * tokens * mean_ratio(bias) + tokens * (1 + 0.4 * math.log(samples)) + samples
    return min(samples * tokens, math.ceil(bound / 64) * 64)


def hide(noise: Noise, tokens: int, keep: Tensor | None = None, bias: float = 1.0) -> Masked:
    """Hide a share γ of each sample's tokens, at least one, at random places. All shapes are known without asking the device.

    `keep` (B N, None: all) marks the tokens that may be hidden, at least one a sample: γ is a share of those, padding is never hidden, and
    what is hidden of a sample does not depend on how much padding follows. Were more hidden than `capacity` allows (slots that are far from
    neighbours), a random choice of them is scored.
    """
    real = tokens if keep is None else keep.sum(dim=1)  # B
    counts = (mask_ratios(noise, bias) * real).ceil().clamp_(1, tokens)  # B
    lots = noise.uniform("mask places", tokens)  # B N
    order = (lots if keep is None else torch.where(keep, lots, 2.0)).argsort(dim=1)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(tokens, device=order.device).expand_as(order))
    mask = ranks < counts[:, None]
    # The lower bits of a lot say nothing about its rank: they serve as a second one.
    chance = torch.where(mask, (lots * 64) % 1, 2.0).flatten()
    values, rows = chance.sort()
    limit = capacity(noise.batch, tokens, bias)
    return Masked(mask, rows[:limit], (values[:limit] < 2.0).float())


@dataclass
class Scored:
    """Sums over the scored tokens of a batch."""

    cross_entropy: Tensor
    correct: Tensor
    count: Tensor
    critic: Tensor | None = None  # of a critic that shares the network

    def loss(self, critic_weight: float) -> Loss:
        terms = {
            "cross_entropy": Mean(self.cross_entropy.detach(), self.count),
            "accuracy": Mean(self.correct, self.count),
        }
        total = self.cross_entropy
        if self.critic is not None:
            total = total + critic_weight * self.critic
            terms["critic"] = Mean(self.critic.detach(), self.count)
        return Loss(Mean(total, self.count), terms)


# Critics ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def redraw(
    logits: Callable[[Tensor], Tensor],
    chunks: Iterable[slice],
    rows: Tensor,
    masked: Masked,
    tokens: Tensor,
    noise: Noise,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Tokens with the model's own draws at the scored places, B N, and which of the R draws are wrong.

    `rows` are the hidden states there, R D; `logits` takes a chunk of them to logits.
    """
    uniforms = noise.uniform("redraw", tokens.shape[1]).flatten().index_select(0, masked.rows)
    drawn = torch.cat([draw_tokens(logits(rows[part]), uniforms[part], temperature)[0] for part in chunks])
    targets = tokens.flatten().index_select(0, masked.rows)
    drawn = torch.where(masked.weights > 0, drawn, targets)
    return tokens.flatten().scatter(0, masked.rows, drawn).view_as(tokens), drawn != targets


def critic_loss(scores: Tensor, masked: Masked, wrong: Tensor) -> Tensor:
    """Sum of the binary cross-entropy of "this token is wrong" (scores B N 1), over the scored places alone."""
    found = scores.flatten().index_select(0, masked.rows).float()
    return (F.binary_cross_entropy_with_logits(found, wrong.float(), reduction="none") * masked.weights).sum()


@dataclass
class Judged:
    """Sums over the places whose token was drawn by the generator."""

    sum: Tensor
    right: Tensor  # places where the critic's verdict holds
    wrong: Tensor  # places where the generator erred
    count: Tensor

    def loss(self) -> Loss:
        terms = {"accuracy": Mean(self.right, self.count), "wrong": Mean(self.wrong, self.count)}
        return Loss(Mean(self.sum, self.count), terms)


def judge(scores: Tensor, masked: Masked, wrong: Tensor) -> Judged:
    """A critic's scores, B N 1, held against what was drawn wrong."""
    with torch.no_grad():
        verdict = (scores.flatten().index_select(0, masked.rows) > 0) == wrong
    return Judged(
        critic_loss(scores, masked, wrong),
        (verdict * masked.weights).sum(),
        (wrong * masked.weights).sum(),
        masked.weights.sum(),
    )


# Sampling --------------------------------------------------------------------------------------------------------


class MaskedSample(Config):
    steps: int = Field(18, ge=1)
    """Forward passes from all tokens hidden to none."""
    guidance: float = Field(3.0, ge=0)
    """Classifier-free guidance; 1 is none, and costs half as much."""
    pace: float = Field(1.0, gt=0)
    """Tokens hidden before step s of S: a share cos(π/2 · (s/S)^pace). Above 1, the first steps find fewer tokens, the last ones more."""
    guidance_schedule: Schedule = "constant"
    """linear: from 1 at the first step to `guidance` at the last."""
    temperature: float = Field(1.0, ge=0)
    """Of drawing tokens; 0 always takes the likeliest."""
    top_k: int | None = Field(None, ge=1)
    """Draw among so many likeliest tokens; null: among all."""
    noise: float = Field(4.5, ge=0)
    """Gumbel noise on the confidence that decides which tokens stay, falling to 0 by the last step; without a critic."""
    critic_noise: float = Field(1.0, ge=0)
    """The same on a critic's scores (uniform noise)."""
    critic_noise_schedule: Literal["falling", "constant"] = "falling"
    """falling: to 0 by the last step. constant: as strong at every step."""

    def check_without_critic(self) -> None:
        """For configs of stages that have none."""
        for name in ("critic_noise", "critic_noise_schedule"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"sample.{name}={value} is read with a critic's scores only, and this stage has no trained critic: "
                    "leave it out (sample.noise is what counts), or train one (critic=self)"
                )


def hidden_counts(tokens: int, steps: int, pace: float = 1.0) -> list[int]:
    """Tokens still hidden before each step, and 0 after the last: N cos(π/2 · (step / steps)^pace), and each step finds one at least."""
    counts = [tokens]
    for step in range(1, steps):
        share = math.cos(math.pi / 2 * (step / steps) ** pace)
        counts.append(max(1, min(counts[-1] - 1, math.floor(tokens * share))))
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
    pace: float = 1.0,
    given: Tensor | None = None,
    critic: Critic | None = None,
    critic_noise: float = 1.0,
    critic_noise_falls: bool = True,
) -> Tensor:
    """Fill in hidden tokens over `steps`, each time keeping those that the model is surest of and hiding the rest again.

    `denoise(tokens B N, places B m, step)` gives logits B m V at the hidden places only. `given` (N, bool, on the host) marks places whose
    `tokens` are fixed. Without a critic, a token once kept stays; with one, `critic(tokens B N, step)` gives B N scores, high = looks wrong,
    and any token that was not given may be hidden again. Noise on the ranking falls to 0 by the last step (a critic's need not). How many are hidden at each
    step is known on the host, so the device is never asked, and each draw belongs to (sample, step, place): chunks of a batch draw alike.
    """
    samples, length = tokens.shape
    free = torch.arange(length) if given is None else (~given.cpu()).nonzero()[:, 0]
    if not len(free):
        return tokens
    places = free.to(tokens.device).expand(samples, -1)  # B m
    every = places
    tokens = tokens.scatter(1, places, mask_id)
    counts = hidden_counts(places.shape[1], steps, pace)
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
            strength = critic_noise * (annealed if critic_noise_falls else 1.0)
            doubt = doubt + strength * (ranking[:, step].gather(1, places) - 0.5)
        places = places.gather(1, doubt.topk(counts[step + 1], dim=1).indices)
        tokens = tokens.scatter(1, places, mask_id)
    return tokens


def find_guided(
    hidden: Callable[[Tensor, int], Tensor],
    logits: Callable[[Tensor], Tensor],
    tokens: Tensor,
    options: MaskedSample,
    *,
    guide: bool,
    mask_id: int,
    noise: Noise,
    given: Tensor | None = None,
    critic: Critic | None = None,
) -> Tensor:
    """`find_tokens` with a network in two parts: `hidden(tokens, step)` gives hidden states B N D (to `guide`: of 2B conditions, see `guided`),
    of which `logits`, which is linear, reads the hidden places only. Guiding hidden states is then guiding logits, at half the price."""
    if guide:
        hidden = guided(hidden, lambda step: scale_at(options.guidance, step, options.steps, options.guidance_schedule))

    def denoise(tokens: Tensor, places: Tensor, step: int) -> Tensor:
        found = hidden(tokens, step)  # B N D
        return logits(found.gather(1, places[..., None].expand(-1, -1, found.shape[2])))  # B m V

    return find_tokens(
        denoise,
        tokens,
        mask_id=mask_id,
        steps=options.steps,
        noise=noise,
        temperature=options.temperature,
        top_k=options.top_k,
        confidence_noise=options.noise,
        pace=options.pace,
        given=given,
        critic=critic,
        critic_noise=options.critic_noise,
        critic_noise_falls=options.critic_noise_schedule == "falling",
    )
