"""Gaussian diffusion: the forward process, prediction targets and losses.

    q(x_t | x0):       x_t = α_t x0 + σ_t ε        ε ~ N(0, 1)      ᾱ_t = α_t²,  σ_t² = 1 − ᾱ_t,  SNR_t = ᾱ_t / σ_t²

t runs over 0 … T − 1, from nearly clean to nearly pure noise (entirely, with zero terminal SNR). A network sees x_t and t and predicts one of

    objective    target             implied x0
    eps          ε                  (x_t − σ_t ε) / α_t
    x0           x0                 x0
    v            α_t ε − σ_t x0     α_t x_t − σ_t v

An error δ of v is an error σ_t δ of x0 and α_t δ of ε, so the squared errors are ‖δε‖² = SNR ‖δx0‖² and ‖δv‖² = (SNR + 1) ‖δx0‖², and a
weight stated for one objective is divided by these ratios for another:

    weighting          as stated                 eps                 x0                        v
    min_snr            min(SNR, γ) on x0         min(SNR, γ) / SNR   min(SNR, γ)               min(SNR, γ) / (SNR + 1)
    p2                 1 / (k + SNR)^γ on ε      1 / (k + SNR)^γ     SNR / (k + SNR)^γ         SNR / (SNR + 1) / (k + SNR)^γ

Learned variance. The reverse step from t to t − 1 has a variance between two bounds,

    β_t = 1 − ᾱ_t / ᾱ_{t−1}      and      β̃_t = β_t σ_{t−1}² / σ_t²,

and a network with twice the channels interpolates: log Σ = f log β_t + (1 − f) log β̃_t with f = (second half + 1) / 2, clamped to
[0, 1]. It is trained by the variational bound L = Σ_t L_t, in bits per dimension:

    L_t = KL( N(μ̃(x0), β̃_t) ‖ N(μ̃(x̂0), Σ) )      μ̃(x0) − μ̃(x̂0) = √ᾱ_{t−1} β_t / σ_t² · (x0 − x̂0)
    L_0 = − log p(x0 | x_1), the mass of N(x̂0, Σ) over x0's step of 256 in [−1, 1]

x̂0 is detached there: the bound trains the variance, the squared error trains the mean.
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

_BETA_RANGES = {
    "linear": (1e-4, 0.02),
    "scaled_linear": (8.5e-4, 0.012),
    "quadratic": (1e-4, 0.02),
    "sigmoid": (1e-4, 0.02),
}


class DiffusionConfig(Config):
    steps: int = Field(1000, ge=2, le=100_000)
    """T: timesteps in training. Sampling may use fewer."""
    schedule: Schedule = "cosine"
    """cosine: ᾱ is a squared cosine. Others raise β from beta_start to beta_end: linear, sigmoid, or linear in √β (quadratic, scaled_linear)."""
    beta_start: float | None = Field(None, gt=0, lt=1)
    """First β; null: 1e-4 (8.5e-4 with scaled_linear) × 1000 / steps. Not used by cosine."""
    beta_end: float | None = Field(None, gt=0, lt=1)
    """Last β; null: 0.02 (0.012 with scaled_linear) × 1000 / steps. Not used by cosine."""
    shift: float = Field(1.0, gt=0)
    """Divides the signal-to-noise ratio of every timestep: > 1 is noisier, for large images and video (CogVideoX: 3 or 1)."""
    zero_terminal: bool = False
    """Rescale √ᾱ so that the last timestep is pure noise (zero terminal SNR). Needs objective v or x0."""
    objective: Objective = "eps"
    """What the network predicts: the noise, the clean data, or v = α ε − σ x0."""
    learned_variance: bool = False
    """Double the output channels; the second half predicts the variance of a ddpm step."""
    vb_weight: float = Field(1e-3, ge=0)
    """Weight of the variational bound that trains the variance."""
    weighting: Weighting = "none"
    """Loss weight by timestep. min_snr: min(SNR, min_snr_gamma) on x0. p2: less weight where there is little noise."""
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
                "zero_terminal=true does not fit objective=eps: at the last timestep x_t is the noise itself; "
                "set objective=v or objective=x0"
            )
        if self.zero_terminal and self.weighting != "none":
            raise ValueError(
                f"zero_terminal=true does not fit weighting={self.weighting}: the last timestep, where sampling starts, "
                "would have weight 0; set weighting=none"
            )
        if self.schedule == "cosine" and (self.beta_start is not None or self.beta_end is not None):
            raise ValueError("schedule=cosine does not use beta_start and beta_end: remove them")
        for name in ("min_snr_gamma", "p2_gamma", "p2_k"):
            reader = "p2" if name.startswith("p2") else "min_snr"
            if self.weighting != reader and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"weighting={self.weighting} does not use {name}: remove it, or set weighting={reader}"
                )
        if not self.learned_variance and self.vb_weight != type(self).model_fields["vb_weight"].default:
            raise ValueError("vb_weight has no effect without learned_variance=true: remove it")
        start, end = self.beta_range
        if start > end:
            raise ValueError(f"beta_start={start} is above beta_end={end}: swap them")
        return self

    @property
    def beta_range(self) -> tuple[float, float]:
        """First and last β."""
        if self.schedule == "cosine":
            return 0.0, 0.0
        start, end = (min(end * 1000 / self.steps, 0.999) for end in _BETA_RANGES[self.schedule])
        return self.beta_start or start, self.beta_end or end


# Schedules -------------------------------------------------------------------------------------------------------


def _betas(config: DiffusionConfig) -> np.ndarray:
    steps, (start, end) = config.steps, config.beta_range
    if config.schedule == "cosine":  # ᾱ(u) = cos²(π/2 · (u + s) / (1 + s)), s = 0.008; β at most 0.999
        u = np.arange(steps + 1) / steps
        level = np.cos((u + 0.008) / 1.008 * (math.pi / 2)) ** 2
        return (1 - level[1:] / level[:-1]).clip(max=0.999)
    if config.schedule == "linear":
        return np.linspace(start, end, steps)
    if config.schedule == "sigmoid":
        return start + (end - start) / (1 + np.exp(-np.linspace(-6, 6, steps)))
    return np.linspace(start**0.5, end**0.5, steps) ** 2


def compute_alpha_bars(config: DiffusionConfig) -> list[float]:
    """ᾱ of every t. Computed with numpy: a model built on fake tensors needs real values here."""
    kept = (1 - _betas(config)).cumprod()
    kept = kept / (config.shift + (1 - config.shift) * kept)  # SNR / shift
    if config.zero_terminal:
        root = np.sqrt(kept)
        kept = ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2  # the first stays, the last is 0
    return kept.tolist()


def compute_loss_weights(config: DiffusionConfig, kept: Tensor) -> Tensor:
    """Weight of the squared error at every t (see the table above)."""
    ratio = kept / (1 - kept)  # SNR
    if config.weighting == "none":
        return torch.ones_like(kept)
    on_x0 = ratio.clamp(max=config.min_snr_gamma)
    if config.weighting == "p2":
        on_x0 = ratio / (config.p2_k + ratio) ** config.p2_gamma
    return on_x0 / {"eps": ratio, "x0": torch.ones_like(ratio), "v": ratio + 1}[config.objective]


# Training --------------------------------------------------------------------------------------------------------


class Diffusion(nn.Module):
    """Noise schedule and loss. Its tables are float32 buffers that are not saved in checkpoints.

    Data is B …; with learned variance the output doubles dimension 1, the mean first. Timesteps t are int64, B, in
    0 … T − 1, on the data's device.
    """

    alpha: Tensor  # √ᾱ
    sigma: Tensor  # √(1 − ᾱ)
    weight: Tensor
    posterior_mean_coef: Tensor  # of x0 in the mean of q(x_{t−1} | x_t, x0)
    log_beta: Tensor
    log_posterior: Tensor  # log β̃

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config, self.steps = config, config.steps
        self.alpha_bar = compute_alpha_bars(config)
        """ᾱ in double precision on the host, for the solvers' coefficients."""
        for name, table in self._tables().items():
            self.register_buffer(name, table.float(), persistent=False)

    def _tables(self) -> dict[str, Tensor]:
        kept = torch.tensor(self.alpha_bar, dtype=torch.float64)
        before = torch.cat([torch.ones_like(kept[:1]), kept[:-1]])  # ᾱ_{t−1}
        beta = 1 - kept / before
        posterior = beta * (1 - before) / (1 - kept)  # 0 at t = 0: replaced by the next
        posterior[0] = posterior[1]
        return {
            "alpha": kept.sqrt(),
            "sigma": (1 - kept).sqrt(),
            "weight": compute_loss_weights(self.config, kept),
            "posterior_mean_coef": before.sqrt() * beta / (1 - kept),
            "log_beta": beta.log(),
            "log_posterior": posterior.log(),
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Diffusion:
        """Keep the tables in float32 when the model is cast, for example to bfloat16."""
        super()._apply(fn, *args, **kwargs)
        if self.alpha.dtype != torch.float32:
            for name, table in self._tables().items():
                setattr(self, name, table.float().to(self.alpha.device))
        return self

    def output_channels(self, channels: int) -> int:
        """Output channels of a network for data with `channels`."""
        return channels * (2 if self.config.learned_variance else 1)

    def add_noise(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = α x0 + σ ε, float32."""
        return _gather_table(self.alpha, t, x0) * x0.float() + _gather_table(self.sigma, t, x0) * eps.float()

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """What the network should predict."""
        if self.config.objective == "eps":
            return eps.float()
        if self.config.objective == "x0":
            return x0.float()
        return _gather_table(self.alpha, t, x0) * eps.float() - _gather_table(self.sigma, t, x0) * x0.float()

    def prediction(self, output: Tensor) -> Tensor:
        """The output without its variance half, in float32."""
        return (output.chunk(2, dim=1)[0] if self.config.learned_variance else output).float()

    def to_x0(self, x_t: Tensor, t: Tensor, output: Tensor) -> Tensor:
        predicted, x = self.prediction(output), x_t.float()
        if self.config.objective == "x0":
            return predicted
        alpha, sigma = _gather_table(self.alpha, t, x), _gather_table(self.sigma, t, x)
        return (x - sigma * predicted) / alpha if self.config.objective == "eps" else alpha * x - sigma * predicted

    def loss(self, output: Tensor, x0: Tensor, eps: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Loss per sample, B: the weighted squared error, plus vb_weight · T · L_t with learned variance."""
        loss = self.squared_error(output, x0, eps, t)
        if self.config.learned_variance:
            loss = loss + self.config.vb_weight * self.steps * self.variational_bound(output, x0, x_t, t)
        return loss

    def squared_error(
        self, output: Tensor, x0: Tensor, eps: Tensor, t: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Weighted mean squared error per sample, B. `positions`: a weight for each, broadcastable to x0."""
        error = (self.prediction(output) - self.target(x0, eps, t)) ** 2
        return self.weight[t] * _mean_per_sample(error if positions is None else error * positions)

    def log_variance(self, output: Tensor, t: Tensor) -> Tensor:
        """log Σ of the reverse step from t, from the output's second half."""
        share = self.variance_share(output)
        low, high = _gather_table(self.log_posterior, t, share), _gather_table(self.log_beta, t, share)
        return low + share * (high - low)

    def variance_share(self, output: Tensor) -> Tensor:
        """f, where log Σ lies between log β̃ and log β, from the output's second half.

        Clamped: between neighbouring timesteps the bounds nearly coincide, so an f of 5 costs nothing there, but over the
        stride of a few sampling steps they are far apart, and e^5 times the variance is noise. Nor do errors of x̂0 that call
        for more than β swamp the gradient of the mean.
        """
        return ((output.chunk(2, dim=1)[1].float() + 1) / 2).clamp(0, 1)

    def variational_bound(
        self, output: Tensor, x0: Tensor, x_t: Tensor, t: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """L_t of the variational bound, bits per dimension, B. Its gradient reaches the variance half only."""
        x0, log_variance = x0.float(), self.log_variance(output, t)
        miss = x0 - self.to_x0(x_t, t, output).detach()
        low = _gather_table(self.log_posterior, t, x0)
        mean_gap = _gather_table(self.posterior_mean_coef, t, x0) * miss
        divergence = (log_variance - low + torch.expm1(low - log_variance) + mean_gap**2 * torch.exp(-log_variance)) / 2
        first = _broadcast_rows(t == 0, x0)
        # Zero elsewhere: the likelihood may overflow there, and 0 · ∞ would reach the gradient.
        safe = torch.where(first, miss, 0.0), torch.where(first, log_variance, 0.0)
        nats = torch.where(first, -discretized_log_likelihood(x0, *safe), divergence)
        return _mean_per_sample(nats if positions is None else nats * positions) / math.log(2)


def discretized_log_likelihood(x0: Tensor, miss: Tensor, log_variance: Tensor) -> Tensor:
    """log of the mass of N(x0 − miss, variance) in x0's bin of 256 between −1 and 1; the outer bins reach to ±∞.

    log(Φ(b) − Φ(a)) = log Φ(b) + log(1 − exp(log Φ(a) − log Φ(b))), mirrored to the tail where Φ is small, for precision.
    """
    scale = torch.exp(-0.5 * log_variance)
    lowest, highest = x0 <= -1 + 1 / 255, x0 >= 1 - 1 / 255
    edge = torch.where(lowest, miss, torch.where(highest, -miss, -miss.abs())) + 1 / 255
    upper = torch.special.log_ndtr(edge * scale)
    lower = torch.special.log_ndtr((-miss.abs() - 1 / 255) * scale)
    return torch.where(lowest | highest, upper, upper + torch.log(-torch.expm1(lower - upper)))


def _gather_table(table: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """table[t], B, broadcastable to `like`."""
    return _broadcast_rows(table[t], like)


def _broadcast_rows(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def _mean_per_sample(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)
