"""Masked token modelling (MaskGIT): mask tokens in training, fill them in step by step in sampling."""

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
from kineograph.process.guidance import Schedule, guidance_scale_at, make_guided
from kineograph.process.token_sampling import draw_tokens

CriticNoise = Literal["falling", "constant", "rising"]
Critic = Callable[[Tensor, int], Tensor]  # tokens B N, step → scores B N, high = looks wrong

# Training --------------------------------------------------------------------------------------------------------


class TokenMask(NamedTuple):
    """Which tokens are masked, and the R rows of the flattened batch on which the loss is computed."""

    mask: Tensor  # B N, bool
    rows: Tensor  # R, int64 indices into B · N, without repeats
    weights: Tensor  # R, float: 1 = masked, 0 = padding


def draw_mask_ratios(noise: Noise, bias: float = 1.0) -> Tensor:
    """Draw one mask ratio per sample: γ = cos(r^bias π / 2), r uniform in [0, 1).

    r = frac(u + slot · golden ratio), with u drawn once per step. Each r is uniform, and the samples of a step are
    spread evenly, which lowers the variance of the loss and bounds the number of masked tokens in a batch.
    """
    return torch.cos(noise.spread("mask ratio") ** bias * (math.pi / 2)).float()


@lru_cache
def mean_mask_ratio(bias: float) -> float:
    """Mean of γ by the midpoint rule: 2/π for bias 1."""
    count = 10_000
    return sum(math.cos(((i + 0.5) / count) ** bias * math.pi / 2) for i in range(count)) / count


def max_masked_rows(samples: int, tokens: int, bias: float = 1.0) -> int:
    """Upper bound on the masked tokens of a batch whose samples have consecutive slots.

    The mean is `mean_mask_ratio` of all tokens. γ is monotone, so Koksma's inequality bounds the excess by tokens ×
    discrepancy, and the discrepancy of the golden-ratio sequence grows only with the logarithm of the sample count.
    """
    bound = samples * tokens * mean_mask_ratio(bias) + tokens * (1 + 0.4 * math.log(samples)) + samples
    return min(samples * tokens, math.ceil(bound / 64) * 64)


def mask_tokens(noise: Noise, tokens: int, keep: Tensor | None = None, bias: float = 1.0) -> TokenMask:
    """Mask a random share γ of each sample's tokens, at least one. All shapes are static: nothing waits for the device.

    `keep` (B N, None: all) marks real tokens, at least one per sample. Padding is never masked, and the mask of a
    sample does not depend on how much padding follows. If slots are far apart and more tokens are masked than
    `max_masked_rows` allows, the loss uses a random subset of them.
    """
    real = tokens if keep is None else keep.sum(dim=1)  # B
    counts = (draw_mask_ratios(noise, bias) * real).ceil().clamp_(1, tokens)  # B
    lots = noise.uniform("mask places", tokens)  # B N
    order = (lots if keep is None else torch.where(keep, lots, 2.0)).argsort(dim=1)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(tokens, device=order.device).expand_as(order))
    mask = ranks < counts[:, None]
    # The low bits of a uniform number are independent of its rank: use them as a second random number.
    chance = torch.where(mask, (lots * 64) % 1, 2.0).flatten()
    values, rows = chance.sort()
    limit = max_masked_rows(noise.batch, tokens, bias)
    return TokenMask(mask, rows[:limit], (values[:limit] < 2.0).float())


# Critics ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def resample_masked(
    logits: Callable[[Tensor], Tensor],
    chunks: Iterable[slice],
    rows: Tensor,
    masked: TokenMask,
    tokens: Tensor,
    noise: Noise,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sample the masked tokens from the model. → tokens B N, and which of the R samples are wrong.

    `rows` are the hidden states at the masked positions, R D; `logits` maps a chunk of them to logits.
    """
    uniforms = noise.uniform("redraw", tokens.shape[1]).flatten().index_select(0, masked.rows)
    drawn = torch.cat([draw_tokens(logits(rows[part]), uniforms[part], temperature)[0] for part in chunks])
    targets = tokens.flatten().index_select(0, masked.rows)
    drawn = torch.where(masked.weights > 0, drawn, targets)
    return tokens.flatten().scatter(0, masked.rows, drawn).view_as(tokens), drawn != targets


def sum_critic_loss(scores: Tensor, masked: TokenMask, wrong: Tensor) -> Tensor:
    """Sum of the binary cross-entropy of "this token is wrong" over masked positions; scores are B N 1."""
    logits = scores.flatten().index_select(0, masked.rows).float()
    return (F.binary_cross_entropy_with_logits(logits, wrong.float(), reduction="none") * masked.weights).sum()


@dataclass
class CriticLoss:
    """Sums over the positions that the generator sampled."""

    sum: Tensor
    right: Tensor  # positions that the critic classified right
    wrong: Tensor  # positions that the generator sampled wrong
    count: Tensor

    def loss(self) -> Loss:
        terms = {"accuracy": Mean(self.right, self.count), "wrong": Mean(self.wrong, self.count)}
        return Loss(Mean(self.sum, self.count), terms)


def score_critic(scores: Tensor, masked: TokenMask, wrong: Tensor) -> CriticLoss:
    """Compare a critic's scores, B N 1, with what the generator sampled wrong."""
    with torch.no_grad():
        verdict = (scores.flatten().index_select(0, masked.rows) > 0) == wrong
    return CriticLoss(
        sum_critic_loss(scores, masked, wrong),
        (verdict * masked.weights).sum(),
        (wrong * masked.weights).sum(),
        masked.weights.sum(),
    )


# Sampling --------------------------------------------------------------------------------------------------------


class MaskedSample(Config):
    steps: int = Field(18, ge=1, le=100_000)
    """Forward passes from a fully masked clip to none masked."""
    guidance: float = Field(3.0, ge=0)
    """Classifier-free guidance scale; 1 turns it off and halves the cost."""
    pace: float = Field(1.0, gt=0)
    """Share of masked tokens before step s of S: cos(π/2 · (s/S)^pace). Above 1, early steps fill in fewer tokens."""
    guidance_schedule: Schedule = "constant"
    """linear: rises from 1 at the first step to `guidance` at the last."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of tokens; 0 takes the most likely one."""
    top_k: int | None = Field(None, ge=1)
    """Sample among the k most likely tokens; null: among all."""
    noise: float = Field(4.5, ge=0)
    """Gumbel noise on the confidence by which tokens are kept, annealed to 0 by the last step. Not used with a critic."""
    critic_noise: float = Field(1.0, ge=0)
    """Uniform noise on the critic's scores, the counterpart of `noise`."""
    critic_noise_schedule: CriticNoise = "falling"
    """falling: annealed to 0 by the last step. constant: the same at every step. rising: from little at the first step to all at the last."""
    critic: bool = True
    """Let the critic, if there is one, select the tokens to mask again; false: the generator's confidence does."""

    def check_without_critic(self) -> None:
        """Refuse critic options in the config of a stage without a critic."""
        for name in ("critic_noise", "critic_noise_schedule", "critic"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                shown = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(
                    f"sample.{name}={shown} has no effect without a critic: remove it (sample.noise applies instead), "
                    "or train a critic with critic=self"
                )


def masked_counts(tokens: int, steps: int, pace: float = 1.0) -> list[int]:
    """Masked tokens before each step, then 0: N cos(π/2 · (step / steps)^pace), falling by at least one per step."""
    counts = [tokens]
    for step in range(1, steps):
        share = math.cos(math.pi / 2 * (step / steps) ** pace)
        counts.append(max(1, min(counts[-1] - 1, math.floor(tokens * share))))
    return [*counts, 0]


def sample_tokens(
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
    fixed: Tensor | None = None,
    critic: Critic | None = None,
    critic_noise: float = 1.0,
    critic_noise_schedule: CriticNoise = "falling",
) -> Tensor:
    """Fill in masked tokens over `steps`: each step keeps the most confident ones and masks the rest again.

    `denoise(tokens B N, positions B m, step)` returns logits B m V at the masked positions. `fixed` (N, bool, on the
    host) marks positions whose `tokens` stay. Without a critic a kept token stays; with `critic(tokens B N, step)` →
    scores B N, any token that is not fixed may be masked again. Mask counts are known on the host, so nothing waits
    for the device. Random numbers are keyed by (sample, step, position): results do not depend on batching.
    """
    samples, length = tokens.shape
    free_positions = torch.arange(length) if fixed is None else (~fixed.cpu()).nonzero()[:, 0]
    if not len(free_positions):
        return tokens
    positions = free_positions.to(tokens.device).expand(samples, -1)  # B m
    all_positions = positions
    tokens = tokens.scatter(1, positions, mask_id)
    counts = masked_counts(positions.shape[1], steps, pace)
    uniforms = noise.uniform("tokens", steps, length)  # B S N
    ranking = noise.uniform("ranking", steps, length)
    for step in range(steps):
        logits = denoise(tokens, positions, step)  # B m V
        drawn, confidence = draw_tokens(logits, uniforms[:, step].gather(1, positions), temperature, top_k)
        tokens = tokens.scatter(1, positions, drawn)
        if step + 1 == steps:
            break
        annealed = 1 - (step + 1) / steps
        if critic is None:
            gumbel = -torch.log(-torch.log(ranking[:, step].gather(1, positions)))
            uncertainty = -(confidence + confidence_noise * annealed * gumbel)
        else:
            positions = all_positions
            uncertainty = critic(tokens, step).float().gather(1, positions)
            strength = (
                critic_noise * {"falling": annealed, "constant": 1.0, "rising": 1 - annealed}[critic_noise_schedule]
            )
            uncertainty = uncertainty + strength * (ranking[:, step].gather(1, positions) - 0.5)
        positions = positions.gather(1, uncertainty.topk(counts[step + 1], dim=1).indices)
        tokens = tokens.scatter(1, positions, mask_id)
    return tokens


def sample_tokens_guided(
    hidden: Callable[[Tensor, int], Tensor],
    logits: Callable[[Tensor], Tensor],
    tokens: Tensor,
    options: MaskedSample,
    *,
    guide: bool,
    mask_id: int,
    noise: Noise,
    fixed: Tensor | None = None,
    critic: Critic | None = None,
) -> Tensor:
    """`sample_tokens` for a network in two parts: hidden states, then a linear head applied at masked positions only.

    `hidden(tokens, step)` returns B N D; with `guide`, it is bound to 2B conditions (see `make_guided`). `logits` is
    linear, so guiding hidden states equals guiding logits and costs half as much.
    """
    if guide:
        hidden = make_guided(
            hidden, lambda step: guidance_scale_at(options.guidance, step, options.steps, options.guidance_schedule)
        )

    def denoise(tokens: Tensor, positions: Tensor, step: int) -> Tensor:
        states = hidden(tokens, step)  # B N D
        return logits(states.gather(1, positions[..., None].expand(-1, -1, states.shape[2])))  # B m V

    return sample_tokens(
        denoise,
        tokens,
        mask_id=mask_id,
        steps=options.steps,
        noise=noise,
        temperature=options.temperature,
        top_k=options.top_k,
        confidence_noise=options.noise,
        pace=options.pace,
        fixed=fixed,
        critic=critic,
        critic_noise=options.critic_noise,
        critic_noise_schedule=options.critic_noise_schedule,
    )
