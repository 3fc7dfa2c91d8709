"""Diffusion samplers: functions over `denoise(x, t)`, where t is int64, B, and the result is the objective's prediction.

Every step from timestep t to a cleaner s is linear in x, in the predicted x̂0 (of this step and the one before) and in fresh noise z,

    x_s = keep · x + pull · x̂0 + past · x̂0 before + spread · z,

with coefficients known before the first step, Python floats computed from ᾱ in double precision. So a step launches a
handful of elementwise kernels and never waits for the device; `denoise` may be compiled or a captured graph. With
λ = log(α/σ), h = λ_s − λ_t, and β = 1 − ᾱ_t/ᾱ_s of the step that is taken, which may span several of training:

    ddpm            keep √(1−β) σ_s²/σ_t²            pull α_s β / σ_t²            spread √β̃ = √(β σ_s²/σ_t²), or as learned
    ddim            keep k = √(σ_s² − τ²)/σ_t        pull α_s − k α_t             spread τ = η √β̃
    dpm_solver      keep σ_s/σ_t                     pull α_s (1 − e^−h) D        spread 0
    … its SDE       keep σ_s/σ_t e^−h                pull α_s (1 − e^−2h) D       spread σ_s √(1 − e^−2h)
                    D = x̂0 + (h / 2 h_before) (x̂0 − x̂0 before): second order, multistep (DPM-Solver++ 2M)

Timesteps have trailing spacing: the first is T − 1, and the last step leads to ᾱ = 1, where every solver returns x̂0 itself.
Where x̂0 is clipped, ε is derived again from x_t and the clipped x̂0. Where it is not, `solve` may start below T − 1:
see `find_first_timestep`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from kineograph.core.config import Config
from kineograph.core.errors import InputError
from kineograph.process.diffusion import Diffusion
from kineograph.process.guidance import DiffusionSchedule, make_guided_denoiser, scale_table

Denoise = Callable[[Tensor, Tensor], Tensor]
"""denoise(x, t: B int64) → the prediction, with twice the channels where the variance is learned."""
NoiseFn = Callable[[int], Tensor]
"""noise(n) → the n-th standard normal draw in x's shape, n = 0, 1, 2 …"""
Clip = Callable[[Tensor], Tensor]
"""Clips x̂0 to its range."""


# Timesteps ----------------------------------------------------------------------------------------------------------


def timesteps(total: int, steps: int) -> list[int]:
    """The timesteps of `steps` steps, falling from total − 1, with trailing spacing."""
    if not 1 <= steps <= total:
        raise InputError(f"steps={steps} does not fit a diffusion of {total} timesteps: use 1 … {total}")
    return [round(total - step * total / steps) - 1 for step in range(steps)]


# A ddim step may multiply an error of the predicted ε by this much before `solve` starts at a later timestep.
_MAX_ERROR_GAIN = 10.0
# √ᾱ where it then starts. Scaled_linear ends at 0.068.
_START_ALPHA = 0.05


def find_first_timestep(diffusion: Diffusion, steps: int) -> int:
    """Where sampling without clipping starts: T − 1, or where x̂0 would explode there, the last t with α ≥ 0.05.

    x̂0 = (x_t − σ_t ε) / α_t, so a ddim step multiplies an error of the predicted ε by σ_t α_s / α_t − σ_s. The cosine schedule
    ends at α = 5e-5: the first of 50 steps multiplies by 631. At α = 0.05, x_t is still noise to within 0.05 of the data.
    """
    last = diffusion.steps - 1
    if diffusion.config.objective != "eps":
        return last
    gain = max(
        math.sqrt((1 - kept) * then / kept) - math.sqrt(1 - then)
        for _, kept, then in _step_levels(diffusion, steps, last)
    )
    if gain <= _MAX_ERROR_GAIN:
        return last
    return max((t for t, kept in enumerate(diffusion.alpha_bar) if kept >= _START_ALPHA**2), default=last)


def check_steps(steps: int, total: int) -> None:
    """Refuse more sampling steps than training timesteps when the config is parsed."""
    if steps > total:
        raise ValueError(f"sample.steps={steps} is above diffusion.steps={total}: lower it, or raise diffusion.steps")


# Clipping ----------------------------------------------------------------------------------------------------------


def static_clip(limit: float = 1.0) -> Clip:
    """Into [−limit, limit]."""
    return lambda x0: x0.clamp(-limit, limit)


def dynamic_clip(share: float = 0.995, limit: float = 1.0) -> Clip:
    """Dynamic thresholding (Imagen): s = the `share` quantile of |x̂0| per sample, at least `limit`; clamp to ±s, then scale s to `limit`.

    Strong guidance saturates less than with static_clip.
    """

    def clip(x0: Tensor) -> Tensor:
        size = x0.flatten(1).abs().quantile(share, dim=1).clamp(min=limit)
        size = size.view(-1, *[1] * (x0.dim() - 1))
        return x0.clamp(-size, size) * (limit / size)

    return clip


# Inpainting ------------------------------------------------------------------------------------------------------


@dataclass
class Inpaint:
    """Known data. Before each step the known part of x_t is replaced by the known data at that noise level."""

    known: Tensor  # B …
    mask: Tensor  # broadcasts to B …, bool, True = known
    resample: int = 1
    """Times that each step is taken, re-noising in between, so that the rest agrees with the known part (RePaint)."""


# Solvers ---------------------------------------------------------------------------------------------------------


@dataclass
class _Step:
    t: int
    keep: float
    pull: float
    spread: float
    past: float = 0.0
    log_bounds: tuple[float, float] | None = None  # log β̃, log β: the spread is learned


def ddpm(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    steps: int,
    *,
    noise: NoiseFn,
    clip: Clip | None = None,
    inpaint: Inpaint | None = None,
    first: int | None = None,
) -> Tensor:
    """Ancestral sampling from noise x (B …) by q(x_s | x_t, x̂0), with the learned variance where there is one.

    `first` is the timestep of the first step; None: T − 1.
    """
    plan = []
    for t, kept, then in _step_levels(diffusion, steps, first):
        beta = 1 - kept / then
        ratio = (1 - then) / (1 - kept)
        step = _Step(t, math.sqrt(1 - beta) * ratio, math.sqrt(then) * beta / (1 - kept), math.sqrt(beta * ratio))
        if diffusion.config.learned_variance and then < 1:
            step.log_bounds = math.log(beta * ratio), math.log(beta)
        plan.append(step)
    return _integrate(diffusion, denoise, x, plan, noise, clip, inpaint)


def ddim(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    steps: int,
    *,
    noise: NoiseFn,
    eta: float = 0.0,
    clip: Clip | None = None,
    inpaint: Inpaint | None = None,
    first: int | None = None,
) -> Tensor:
    """Deterministic at eta = 0, ancestral (with β̃) at eta = 1. Ignores learned variances."""
    if not 0 <= eta <= 1:
        raise InputError(f"eta={eta} does not fit ddim: use 0 (deterministic) … 1 (as ddpm)")
    plan = []
    for t, kept, then in _step_levels(diffusion, steps, first):
        spread = eta * math.sqrt((1 - kept / then) * (1 - then) / (1 - kept))
        keep = math.sqrt(max(0.0, 1 - then - spread**2) / (1 - kept))
        plan.append(_Step(t, keep, math.sqrt(then) - keep * math.sqrt(kept), spread))
    return _integrate(diffusion, denoise, x, plan, noise, clip, inpaint)


def dpm_solver(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    steps: int,
    *,
    noise: NoiseFn,
    sde: bool = False,
    clip: Clip | None = None,
    inpaint: Inpaint | None = None,
    first: int | None = None,
) -> Tensor:
    """DPM-Solver++ 2M, or with `sde` its stochastic form. The first and the last step are first order."""
    plan = []
    last: float | None = None  # h of the step before
    for t, kept, then in _step_levels(diffusion, steps, first):
        decay = math.sqrt((1 - then) / (1 - kept) * kept / then)  # e^−h: 0 to x̂0, and from pure noise
        size = -math.log(decay) if decay else math.inf
        if sde:
            keep, pull = math.sqrt((1 - then) / (1 - kept)) * decay, math.sqrt(then) * (1 - decay**2)
            spread = math.sqrt((1 - then) * (1 - decay**2))
        else:
            keep, pull, spread = math.sqrt((1 - then) / (1 - kept)), math.sqrt(then) * (1 - decay), 0.0
        # h / 2 h_before; first order after a step from pure noise, whose h is infinite
        lean = size / (2 * last) if last is not None and decay else 0.0
        plan.append(_Step(t, keep, pull * (1 + lean), spread, past=-pull * lean))
        last = size
    return _integrate(diffusion, denoise, x, plan, noise, clip, inpaint)


def _step_levels(diffusion: Diffusion, steps: int, first: int | None) -> list[tuple[int, float, float]]:
    """t, ᾱ_t, ᾱ_s of every step from timestep `first` on; ᾱ = 1 after the last."""
    times = timesteps(diffusion.steps if first is None else first + 1, steps)
    kept = [diffusion.alpha_bar[t] for t in times]
    return list(zip(times, kept, [*kept[1:], 1.0], strict=True))


@torch.no_grad()
def _integrate(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    plan: list[_Step],
    noise: NoiseFn,
    clip: Clip | None,
    inpaint: Inpaint | None,
) -> Tensor:
    draws = (noise(number).float() for number in count())
    x = x.float()
    now: Tensor | None = None  # x̂0 of the previous step, then of this one
    for step, following in zip(plan, [*plan[1:], None], strict=True):
        t = torch.full((x.shape[0],), step.t, dtype=torch.int64, device=x.device)
        before, kept = now, diffusion.alpha_bar[step.t]
        rounds = 1 if inpaint is None or following is None else inpaint.resample
        for left in reversed(range(rounds)):
            if inpaint is not None:
                known = math.sqrt(kept) * inpaint.known.float() + math.sqrt(1 - kept) * next(draws)
                x = torch.where(inpaint.mask, known, x)
            output = denoise(x, t)
            now = _to_x0(diffusion, x, kept, output)
            if clip is not None:
                now = clip(now)
            x = _advance(diffusion, step, x, now, before, output, draws)
            if left:  # re-noise: q(x_t | x_s)
                assert following is not None
                share = kept / diffusion.alpha_bar[following.t]
                x = math.sqrt(share) * x + math.sqrt(1 - share) * next(draws)
    return x if inpaint is None else torch.where(inpaint.mask, inpaint.known.float(), x)


def _to_x0(diffusion: Diffusion, x: Tensor, kept: float, output: Tensor) -> Tensor:
    """`Diffusion.to_x0` with host floats, in fresh memory: a captured graph overwrites its output in the next step."""
    alpha, sigma, predicted = math.sqrt(kept), math.sqrt(1 - kept), diffusion.prediction(output)
    if diffusion.config.objective == "x0":
        return predicted.clone()
    if diffusion.config.objective == "v":
        return alpha * x - sigma * predicted
    return (x - sigma * predicted) * (1 / alpha)


def _advance(
    diffusion: Diffusion,
    step: _Step,
    x: Tensor,
    now: Tensor,
    before: Tensor | None,
    output: Tensor,
    draws: Iterator[Tensor],
) -> Tensor:
    """x_s. Terms with coefficient 0 are skipped, and no noise is drawn for them."""
    # D = x̂0 in the first step
    result = now * (step.pull if before is not None else step.pull + step.past)
    if step.keep:
        result = result.add(x, alpha=step.keep)
    if step.past and before is not None:
        result = result.add(before, alpha=step.past)
    if step.log_bounds is not None:
        low, high = step.log_bounds
        share = diffusion.variance_share(output)
        return result + torch.exp((low + share * (high - low)) / 2) * next(draws)
    return result.add(next(draws), alpha=step.spread) if step.spread else result


# Config -------------------------------------------------------------------------------------------------------


class DiffusionSample(Config):
    steps: int = Field(50, ge=1, le=100_000)
    """Sampling steps."""
    solver: Literal["ddpm", "ddim", "dpm_solver", "dpm_solver_sde"] = "ddim"
    """ddpm: ancestral, uses learned variances, needs many steps. ddim: noise by eta. dpm_solver: DPM-Solver++ 2M, for few steps; _sde: its stochastic form."""
    eta: float = Field(0.0, ge=0, le=1)
    """Noise of ddim: 0 is deterministic, 1 adds as much as ddpm."""
    guidance: float = Field(3.0, ge=0)
    """Classifier-free guidance scale; 1 turns it off and halves the cost."""
    guidance_schedule: DiffusionSchedule = "constant"
    """linear: from 1 at the first step to `guidance` at the last. cosine: CogVideoX's, late from 1 to 1 + `guidance`. oscillating: its legacy form."""
    clip: Literal["none", "static", "dynamic"] = "static"
    """Clip x̂0 at every step. static: to [−1, 1]. dynamic: by its own quantile, against saturation under strong guidance."""
    clip_quantile: float = Field(0.995, gt=0, le=1)
    """Quantile of clip=dynamic."""

    @model_validator(mode="after")
    def _fits(self) -> DiffusionSample:
        if self.eta and self.solver != "ddim":
            raise ValueError(f"solver={self.solver} does not use eta={self.eta}: remove it, or set solver=ddim")
        if self.clip != "dynamic" and self.clip_quantile != type(self).model_fields["clip_quantile"].default:
            raise ValueError(f"clip={self.clip} does not use clip_quantile: remove it, or set clip=dynamic")
        return self

    @property
    def uses_guidance(self) -> bool:
        """Whether guidance has an effect, so that each sample needs two rows."""
        return self.guidance != self.neutral_guidance

    @property
    def neutral_guidance(self) -> float:
        """The scale that turns guidance off."""
        return 0.0 if self.guidance_schedule in ("cosine", "oscillating") else 1.0


def solve(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    options: DiffusionSample,
    *,
    noise: NoiseFn,
    guide: bool = False,
    clip: Clip | None = None,
    inpaint: Inpaint | None = None,
    first: int | None = None,
) -> Tensor:
    """Sample with the solver that `options` name. With `guide`, `denoise` is bound to 2B conditions and x has B rows.

    `clip` overrides the one in the options, for data without a fixed range such as embeddings. `first` is the first
    timestep; None: T − 1, or without clipping that of `find_first_timestep`.
    """
    if clip is None and options.clip != "none":
        clip = static_clip() if options.clip == "static" else dynamic_clip(options.clip_quantile)
    if first is None:
        first = diffusion.steps - 1 if clip is not None else find_first_timestep(diffusion, options.steps)
    steps = options.steps if first == diffusion.steps - 1 else min(options.steps, first + 1)
    if guide:
        times = timesteps(first + 1, steps)
        denoise = make_guided_denoiser(
            denoise, scale_table(options.guidance, times, options.guidance_schedule, x.device)
        )
    if options.solver == "ddpm":
        return ddpm(diffusion, denoise, x, steps, noise=noise, clip=clip, inpaint=inpaint, first=first)
    if options.solver == "ddim":
        eta = options.eta
        return ddim(diffusion, denoise, x, steps, noise=noise, eta=eta, clip=clip, inpaint=inpaint, first=first)
    sde = options.solver == "dpm_solver_sde"
    return dpm_solver(diffusion, denoise, x, steps, noise=noise, sde=sde, clip=clip, inpaint=inpaint, first=first)
