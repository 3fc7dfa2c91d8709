"""Gaussian diffusion: how noise goes into data, what a network is asked for, and how wrong its answer is.

    q(x_t | x0):       x_t = α_t x0 + σ_t ε        ε ~ N(0, 1)      ᾱ_t = α_t²,  σ_t² = 1 − ᾱ_t,  SNR_t = ᾱ_t / σ_t²

t runs over 0 … T − 1, from nearly clean to nearly (with zero terminal SNR: entirely) noise. A network sees x_t and t and answers with one of

    objective    target             the x0 that an answer implies
    eps          ε                  (x_t − σ_t ε) / α_t
    x0           x0                 x0
    v            α_t ε − σ_t x0     α_t x_t − σ_t v

An error δ of v is an error σ_t δ of x0 and α_t δ of ε, so the squared errors are ‖δε‖² = SNR ‖δx0‖² and ‖δv‖² = (SNR + 1) ‖δx0‖², and a
weight that a paper states for one objective is divided by these ratios for another:

    weighting          as stated                 eps                 x0                        v
    min_snr            min(SNR, γ) on x0         min(SNR, γ) / SNR   min(SNR, γ)               min(SNR, γ) / (SNR + 1)
    p2                 1 / (k + SNR)^γ on ε      1 / (k + SNR)^γ     SNR / (k + SNR)^γ         SNR / (SNR + 1) / (k + SNR)^γ

Learned variance. The step back from t to t − 1 has a variance between two bounds,

    β_t = 1 − ᾱ_t / ᾱ_{t−1}      and      β̃_t = β_t σ_{t−1}² / σ_t²,

and a network with twice the channels says where: log Σ = f log β_t + (1 − f) log β̃_t with f = (second half + 1) / 2. Only the variational
bound can teach it, L = Σ_t L_t, in bits a dimension:

    L_t = KL( N(μ̃(x0), β̃_t) ‖ N(μ̃(x̂0), Σ) )      μ̃(x0) − μ̃(x̂0) = √ᾱ_{t−1} β_t / σ_t² · (x0 − x̂0)
    L_0 = − log p(x0 | x_1), the mass of N(x̂0, Σ) over x0's step of 256 in [−1, 1]

Here x̂0 is what the objective's answer implies, and carries no gradient: the bound teaches the variance, the squared error the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from kineograph.core.config import Config

Schedule = Literal["cosine", "linear", "scaled_linear", "quadratic", "sigmoid"]
Objective = Literal["eps", "x0", "v"]
Weighting = Literal["none", "min_snr", "p2"]

_ENDS = {"linear": (1e-4, 0.02), "scaled_linear": (8.5e-4, 0.012), "quadratic": (1e-4, 0.02), "sigmoid": (1e-4, 0.02)}


class DiffusionConfig(Config):
    steps: int = Field(1000, ge=2)
    """T: noise levels in training. Sampling takes as many steps as it is asked for."""
    schedule: Schedule = "cosine"
    """How noise grows. cosine: ᾱ is a squared cosine. Else β rises from beta_start to beta_end: linear, quadratic and scaled_linear (linear √β), or sigmoid."""
    beta_start: float | None = Field(None, gt=0, lt=1)
    """First β; null: 1e-4 (8.5e-4 with scaled_linear) × 1000 / steps. Not read by cosine."""
    beta_end: float | None = Field(None, gt=0, lt=1)
    """Last β; null: 0.02 (0.012 with scaled_linear) × 1000 / steps. Not read by cosine."""
    shift: float = Field(1.0, gt=0)
    """Divides the signal-to-noise ratio of every level: > 1 is noisier, for large pictures and video (CogVideoX: 3 or 1)."""
    zero_terminal: bool = False
    """Rescale √ᾱ so that the last level is pure noise, as sampling begins. Needs objective v or x0."""
    objective: Objective = "eps"
    """What the network answers with: the noise, the clean data, or v = α ε − σ x0."""
    learned_variance: bool = False
    """The network has twice the channels, and the second half says how much noise a ddpm step adds back."""
    vb_weight: float = Field(1e-3, ge=0)
    """Weight of the variational bound (all T terms, of which each sample estimates one) that teaches the variance."""
    weighting: Weighting = "none"
    """Of the squared error by noise level. min_snr: no level counts more than min_snr_gamma in x0. p2: levels of little noise count less."""
    min_snr_gamma: float = Field(5.0, gt=0)
    """γ of weighting=min_snr."""
    p2_gamma: float = Field(1.0, ge=0)
    """γ of weighting=p2."""
    p2_k: float = Field(1.0, gt=0)
    """k of weighting=p2."""

    @model_validator(mode="after")
    def _fits(self) -> DiffusionConfig:
        if self.zero_terminal and self.objective == "eps":
            raise ValueError(
                "zero_terminal=true does not fit objective=eps: where the signal is zero the noise is all there is, and says nothing about "
                "the data. Use objective v or x0"
            )
        if self.zero_terminal and self.weighting != "none":
            raise ValueError(
                f"zero_terminal=true does not fit weighting={self.weighting}: its weight at the last level, where sampling begins, would be 0. "
                "Use weighting=none"
            )
        if self.schedule == "cosine" and (self.beta_start is not None or self.beta_end is not None):
            raise ValueError("beta_start and beta_end are not read by schedule=cosine: leave them out")
        for name in ("min_snr_gamma", "p2_gamma", "p2_k"):
            reader = "p2" if name.startswith("p2") else "min_snr"
            if self.weighting != reader and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is read by weighting={reader} only, not by weighting={self.weighting}: leave it out"
                )
        if not self.learned_variance and self.vb_weight != type(self).model_fields["vb_weight"].default:
            raise ValueError("vb_weight is read with learned_variance=true only: leave it out")
        start, end = self.ends
        if start > end:
            raise ValueError(f"beta_start={start} is above beta_end={end}: noise must grow")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """The first and the last β."""
        if self.schedule == "cosine":
            return 0.0, 0.0
        start, end = (min(end * 1000 / self.steps, 0.999) for end in _ENDS[self.schedule])
        return self.beta_start or start, self.beta_end or end


# Schedules -------------------------------------------------------------------------------------------------------


def _betas(config: DiffusionConfig) -> np.ndarray:
    steps, (start, end) = config.steps, config.ends
    if config.schedule == "cosine":  # ᾱ(u) = cos²(π/2 · (u + s) / (1 + s)), s = 0.008; β at most 0.999
        u = np.arange(steps + 1) / steps
        level = np.cos((u + 0.008) / 1.008 * (math.pi / 2)) ** 2
        return (1 - level[1:] / level[:-1]).clip(max=0.999)
    if config.schedule == "linear":
        return np.linspace(start, end, steps)
    if config.schedule == "sigmoid":
        return start + (end - start) / (1 + np.exp(-np.linspace(-6, 6, steps)))
    return np.linspace(start**0.5, end**0.5, steps) ** 2


def levels(config: DiffusionConfig) -> list[float]:
    """ᾱ of every t. Not by torch: a model that is built of tensors without numbers needs these numbers too."""
    kept = (1 - _betas(config)).cumprod()
    kept = kept / (config.shift + (1 - config.shift) * kept)  # SNR / shift
    if config.zero_terminal:
        root = np.sqrt(kept)
        kept = ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2  # the first stays, the last is 0
    return kept.tolist()


def weights(config: DiffusionConfig, kept: Tensor) -> Tensor:
    """What the squared error of the objective's own answer counts at every t (see the table above)."""
    ratio = kept / (1 - kept)  # SNR
    if config.weighting == "none":
        return torch.ones_like(kept)
    on_x0 = ratio.clamp(max=config.min_snr_gamma)
    if config.weighting == "p2":
        on_x0 = ratio / (config.p2_k + ratio) ** config.p2_gamma
    return on_x0 / {"eps": ratio, "x0": torch.ones_like(ratio), "v": ratio + 1}[config.objective]


# Training --------------------------------------------------------------------------------------------------------


class Diffusion(nn.Module):
    """The noise levels and the loss. Tables move with the module that holds it, stay float32, and are in no checkpoint.

    Data is B …; with learned variance a network answers with twice the size of dimension 1, the mean's half first. Times t are int64, B, in
    0 … T − 1, on the data's device; nothing here waits for it.
    """

    alpha: Tensor  # √ᾱ
    sigma: Tensor  # √(1 − ᾱ)
    weight: Tensor
    pull: Tensor  # of x0 in the mean of q(x_{t−1} | x_t, x0)
    log_beta: Tensor
    log_posterior: Tensor  # log β̃

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config, self.steps = config, config.steps
        self.alpha_bar = levels(config)
        """ᾱ in full precision on the host: solvers take their coefficients from it."""
        for name, table in self._tables().items():
            self.register_buffer(name, table.float(), persistent=False)

    def _tables(self) -> dict[str, Tensor]:
        kept = torch.tensor(self.alpha_bar, dtype=torch.float64)
        before = torch.cat([torch.ones_like(kept[:1]), kept[:-1]])  # ᾱ_{t−1}
        beta = 1 - kept / before
        posterior = beta * (1 - before) / (1 - kept)  # 0 at t = 0, where the decoder's likelihood takes the next
        posterior[0] = posterior[1]
        return {
            "alpha": kept.sqrt(),
            "sigma": (1 - kept).sqrt(),
            "weight": weights(self.config, kept),
            "pull": before.sqrt() * beta / (1 - kept),
            "log_beta": beta.log(),
            "log_posterior": posterior.log(),
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Diffusion:
        """`.to(bfloat16)` of a model that holds this must not round the tables: they go to its device only."""
        super()._apply(fn, *args, **kwargs)
        if self.alpha.dtype != torch.float32:
            for name, table in self._tables().items():
                setattr(self, name, table.float().to(self.alpha.device))
        return self

    def output_channels(self, channels: int) -> int:
        """Of a network whose data has so many."""
        return channels * (2 if self.config.learned_variance else 1)

    # Noise in, and what was asked for -----------------------------------------------------------------------------

    def add_noise(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = α x0 + σ ε, float32."""
        return _at(self.alpha, t, x0) * x0.float() + _at(self.sigma, t, x0) * eps.float()

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """What the network should answer."""
        if self.config.objective == "eps":
            return eps.float()
        if self.config.objective == "x0":
            return x0.float()
        return _at(self.alpha, t, x0) * eps.float() - _at(self.sigma, t, x0) * x0.float()

    def answer(self, output: Tensor) -> Tensor:
        """The output without its variance half, float32."""
        return (output.chunk(2, dim=1)[0] if self.config.learned_variance else output).float()

    def to_x0(self, x_t: Tensor, t: Tensor, output: Tensor) -> Tensor:
        found, x = self.answer(output), x_t.float()
        if self.config.objective == "x0":
            return found
        alpha, sigma = _at(self.alpha, t, x), _at(self.sigma, t, x)
        return (x - sigma * found) / alpha if self.config.objective == "eps" else alpha * x - sigma * found

    # How wrong it is ----------------------------------------------------------------------------------------------

    def loss(self, output: Tensor, x0: Tensor, eps: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """One number a sample, B: the weighted squared error, and where the variance is learned vb_weight · T · L_t."""
        loss = self.error(output, x0, eps, t)
        if self.config.learned_variance:
            loss = loss + self.config.vb_weight * self.steps * self.bound(output, x0, x_t, t)
        return loss

    def error(self, output: Tensor, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """The weighted mean squared error of each sample, B."""
        return self.weight[t] * _mean((self.answer(output) - self.target(x0, eps, t)) ** 2)

    def log_variance(self, output: Tensor, t: Tensor) -> Tensor:
        """log Σ of the step back from t, by the output's second half."""
        share = (output.chunk(2, dim=1)[1].float() + 1) / 2
        low, high = _at(self.log_posterior, t, share), _at(self.log_beta, t, share)
        return low + share * (high - low)

    def bound(self, output: Tensor, x0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """L_t of the variational bound, bits a dimension, B. Its gradient reaches the variance half alone."""
        x0, log_variance = x0.float(), self.log_variance(output, t)
        miss = x0 - self.to_x0(x_t, t, output).detach()
        low = _at(self.log_posterior, t, x0)
        apart = _at(self.pull, t, x0) * miss  # of the means
        divergence = (log_variance - low + torch.expm1(low - log_variance) + apart**2 * torch.exp(-log_variance)) / 2
        first = _rows(t == 0, x0)
        # elsewhere the likelihood may overflow, and 0 · ∞ would reach the gradient
        calm = torch.where(first, miss, 0.0), torch.where(first, log_variance, 0.0)
        nats = torch.where(first, -log_mass(x0, *calm), divergence)
        return _mean(nats) / math.log(2)


def log_mass(x0: Tensor, miss: Tensor, log_variance: Tensor) -> Tensor:
    """log of the normal mass, mean x0 − miss, over x0's bin of 256 between −1 and 1; the outer bins reach to ±∞.

    log(Φ(b) − Φ(a)) = log Φ(b) + log(1 − exp(log Φ(a) − log Φ(b))), mirrored to the tail where Φ is small and keeps its digits.
    """
    scale = torch.exp(-0.5 * log_variance)
    lowest, highest = x0 <= -1 + 1 / 255, x0 >= 1 - 1 / 255
    edge = torch.where(lowest, miss, torch.where(highest, -miss, -miss.abs())) + 1 / 255
    upper = torch.special.log_ndtr(edge * scale)
    lower = torch.special.log_ndtr((-miss.abs() - 1 / 255) * scale)
    return torch.where(lowest | highest, upper, upper + torch.log(-torch.expm1(lower - upper)))


def _at(table: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """Entries of a table, B, with as many dimensions as `like`."""
    return _rows(table[t], like)


def _rows(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)
