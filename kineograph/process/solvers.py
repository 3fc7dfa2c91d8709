"""From noise to data: functions over `denoise(x, t)`, where t is int64, B, and the answer has the form of the diffusion's objective.

Every step from a level t to a cleaner one s is linear in what is there (x), what it is taken for (x̂0, and x̂0 of the step before) and fresh noise z,

    x_s = keep · x + pull · x̂0 + past · x̂0 before + spread · z,

with coefficients that are known before the first step. They are Python floats of ᾱ in double precision, so a step launches a handful of
elementwise kernels and never waits for the device; `denoise` may be a compiled network or a recorded graph. With λ = log(α/σ), h = λ_s − λ_t, and
β = 1 − ᾱ_t/ᾱ_s of the step that is really taken, which need not be one of the T of training:

    ddpm            keep √(1−β) σ_s²/σ_t²            pull α_s β / σ_t²            spread √β̃ = √(β σ_s²/σ_t²), or as learned
    ddim            keep k = √(σ_s² − τ²)/σ_t        pull α_s − k α_t             spread τ = η √β̃
    dpm_solver      keep σ_s/σ_t                     pull α_s (1 − e^−h) D        spread 0
    … its SDE       keep σ_s/σ_t e^−h                pull α_s (1 − e^−2h) D       spread σ_s √(1 − e^−2h)
                    D = x̂0 + (h / 2 h_before) (x̂0 − x̂0 before): second order from what is known anyhow (DPM-Solver++ 2M)

Levels are spaced backwards from the end (trailing): the first is T − 1, where x is what training saw there, and the last step leads to ᾱ = 1, where
every solver returns x̂0 itself. Where x̂0 is clipped, ε is that which x_t and the clipped x̂0 imply: x_t stays a mixture of the two.
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
from kineograph.process.guidance import DiffusionSchedule, guided_denoise, scale_table

Denoise = Callable[[Tensor, Tensor], Tensor]
"""denoise(x, t: B int64) → the objective's own form, with twice the channels where the variance is learned."""
Fresh = Callable[[int], Tensor]
"""noise(n) → the n-th draw of standard normal noise in x's shape, n = 0, 1, 2 …"""
Clip = Callable[[Tensor], Tensor]
"""x̂0 → x̂0 in its range."""


# Levels ----------------------------------------------------------------------------------------------------------


def timesteps(total: int, steps: int) -> list[int]:
    """The levels that `steps` steps visit, falling from total − 1, evenly spaced backwards from the end."""
    if not 1 <= steps <= total:
        raise InputError(f"steps={steps} does not fit a diffusion of {total} levels: use 1 … {total}")
    return [round(total - step * total / steps) - 1 for step in range(steps)]


def check_steps(steps: int, total: int) -> None:
    """For configs that hold both: refused when they are read, not when the first sample is drawn."""
    if steps > total:
        raise ValueError(
            f"sample.steps={steps} is more than there are noise levels: lower it, or raise diffusion.steps={total}"
        )


# Ranges ----------------------------------------------------------------------------------------------------------


def static_clip(limit: float = 1.0) -> Clip:
    """Into [−limit, limit]."""
    return lambda x0: x0.clamp(-limit, limit)


def dynamic_clip(share: float = 0.995, limit: float = 1.0) -> Clip:
    """Dynamic thresholding (Imagen): s = the `share` quantile of |x̂0| of each sample, at least `limit`; clamp to ±s, then scale s to `limit`.

    Unlike static_clip it keeps values at the end of the range apart, so strong guidance saturates less.
    """

    def clip(x0: Tensor) -> Tensor:
        size = x0.flatten(1).abs().quantile(share, dim=1).clamp(min=limit)
        size = size.view(-1, *[1] * (x0.dim() - 1))
        return x0.clamp(-size, size) * (limit / size)

    return clip


# Known parts -----------------------------------------------------------------------------------------------------


@dataclass
class Inpaint:
    """Data of which a part is known. Before each step that part is put in at the noise level of x_t, and in the end as it is."""

    known: Tensor  # B …
    mask: Tensor  # broadcasts to B …, bool, True = known
    resample: int = 1
    """How often each step is taken: between two times x_s gets its noise back, so that the rest can agree with the known part (RePaint)."""


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
    noise: Fresh,
    clip: Clip | None = None,
    inpaint: Inpaint | None = None,
    start: int = 0,
) -> Tensor:
    """Ancestral sampling: each step draws from q(x_s | x_t, x̂0), with the learned variance where there is one.

    `x` is noise (B …), or with `start` > 0 data at the level of the step with that number: `begin` makes it.
    """
    plan = []
    for t, kept, then in _pairs(diffusion, steps, start):
        beta = 1 - kept / then
        ratio = (1 - then) / (1 - kept)
        step = _Step(t, math.sqrt(1 - beta) * ratio, math.sqrt(then) * beta / (1 - kept), math.sqrt(beta * ratio))
        if diffusion.config.learned_variance and then < 1:
            step.log_bounds = math.log(beta * ratio), math.log(beta)
        plan.append(step)
    return _walk(diffusion, denoise, x, plan, noise, clip, inpaint)


def ddim(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    steps: int,
    *,
    noise: Fresh,
    eta: float = 0.0,
    clip: Clip | None = None,
    inpaint: Inpaint | None = None,
    start: int = 0,
) -> Tensor:
    """Deterministic at eta = 0, ancestral (with β̃) at eta = 1. Learned variances are not used."""
    if not 0 <= eta <= 1:
        raise InputError(f"eta={eta} does not fit ddim: use 0 (no noise) … 1 (as much as ddpm)")
    plan = []
    for t, kept, then in _pairs(diffusion, steps, start):
        spread = eta * math.sqrt((1 - kept / then) * (1 - then) / (1 - kept))
        keep = math.sqrt(max(0.0, 1 - then - spread**2) / (1 - kept))
        plan.append(_Step(t, keep, math.sqrt(then) - keep * math.sqrt(kept), spread))
    return _walk(diffusion, denoise, x, plan, noise, clip, inpaint)


def dpm_solver(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    steps: int,
    *,
    noise: Fresh,
    sde: bool = False,
    clip: Clip | None = None,
    inpaint: Inpaint | None = None,
    start: int = 0,
) -> Tensor:
    """DPM-Solver++ 2M, or with `sde` its stochastic form. First order where there is no step before, and in the last step, which is x̂0."""
    plan = []
    last: float | None = None  # h of the step before
    for t, kept, then in _pairs(diffusion, steps, start):
        decay = math.sqrt((1 - then) / (1 - kept) * kept / then)  # e^−h: 0 to x̂0, and from pure noise
        size = -math.log(decay) if decay else math.inf
        if sde:
            keep, pull = math.sqrt((1 - then) / (1 - kept)) * decay, math.sqrt(then) * (1 - decay**2)
            spread = math.sqrt((1 - then) * (1 - decay**2))
        else:
            keep, pull, spread = math.sqrt((1 - then) / (1 - kept)), math.sqrt(then) * (1 - decay), 0.0
        # h / 2 h_before; nothing to learn from a step that came from pure noise, whose h is infinite
        lean = size / (2 * last) if last is not None and decay else 0.0
        plan.append(_Step(t, keep, pull * (1 + lean), spread, past=-pull * lean))
        last = size
    return _walk(diffusion, denoise, x, plan, noise, clip, inpaint)


def begin(diffusion: Diffusion, x0: Tensor, eps: Tensor, steps: int, start: int) -> Tensor:
    """Data with the noise of step `start` of `steps`: what a solver goes on from, to vary given data instead of making new."""
    kept = _pairs(diffusion, steps, start)[0][1]
    return math.sqrt(kept) * x0.float() + math.sqrt(1 - kept) * eps.float()


def _pairs(diffusion: Diffusion, steps: int, start: int) -> list[tuple[int, float, float]]:
    """t, ᾱ_t, ᾱ_s of every step from `start` on; ᾱ = 1 after the last."""
    times = timesteps(diffusion.steps, steps)
    if not 0 <= start < steps:
        raise InputError(f"start={start} does not fit steps={steps}: use 0 … {steps - 1}")
    times = times[start:]
    kept = [diffusion.alpha_bar[t] for t in times]
    return list(zip(times, kept, [*kept[1:], 1.0], strict=True))


@torch.no_grad()
def _walk(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    plan: list[_Step],
    noise: Fresh,
    clip: Clip | None,
    inpaint: Inpaint | None,
) -> Tensor:
    draws = (noise(number).float() for number in count())
    x = x.float()
    now: Tensor | None = None  # x̂0 of the level before, then of this one
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
            x = _advance(step, x, now, before, output, draws)
            if left:  # noise that the step took out goes back in: q(x_t | x_s)
                assert following is not None
                share = kept / diffusion.alpha_bar[following.t]
                x = math.sqrt(share) * x + math.sqrt(1 - share) * next(draws)
    return x if inpaint is None else torch.where(inpaint.mask, inpaint.known.float(), x)


def _to_x0(diffusion: Diffusion, x: Tensor, kept: float, output: Tensor) -> Tensor:
    """`Diffusion.to_x0` with numbers of the host, in memory of its own: a recorded graph writes its next output where this one lies."""
    alpha, sigma, found = math.sqrt(kept), math.sqrt(1 - kept), diffusion.answer(output)
    if diffusion.config.objective == "x0":
        return found.clone()
    if diffusion.config.objective == "v":
        return alpha * x - sigma * found
    return (x - sigma * found) * (1 / alpha)


def _advance(
    step: _Step, x: Tensor, now: Tensor, before: Tensor | None, output: Tensor, draws: Iterator[Tensor]
) -> Tensor:
    """x_s. Terms that are 0 cost nothing, and no noise is drawn for them."""
    result = now * (
        step.pull if before is not None else step.pull + step.past
    )  # D = x̂0 where nothing is known from before
    if step.keep:
        result = result.add(x, alpha=step.keep)
    if step.past and before is not None:
        result = result.add(before, alpha=step.past)
    if step.log_bounds is not None:
        low, high = step.log_bounds
        share = (output.chunk(2, dim=1)[1].float() + 1) / 2
        return result + torch.exp((low + share * (high - low)) / 2) * next(draws)
    return result.add(next(draws), alpha=step.spread) if step.spread else result


# By config -------------------------------------------------------------------------------------------------------


class DiffusionSample(Config):
    steps: int = Field(50, ge=1)
    """Forward passes from noise to data."""
    solver: Literal["ddpm", "ddim", "dpm_solver", "dpm_solver_sde"] = "ddim"
    """ddpm: ancestral, uses learned variances, wants many steps. ddim: noise by eta. dpm_solver: DPM-Solver++ 2M, for few steps; _sde: with fresh noise."""
    eta: float = Field(0.0, ge=0, le=1)
    """Noise that ddim adds back: 0 none, 1 as much as ddpm."""
    guidance: float = Field(3.0, ge=0)
    """Classifier-free guidance; 1 is none, and costs half as much."""
    guidance_schedule: DiffusionSchedule = "constant"
    """linear: from 1 at the first step to `guidance` at the last. cosine: CogVideoX's, from 1 to 1 + `guidance`, late. oscillating: its legacy form."""
    clip: Literal["none", "static", "dynamic"] = "static"
    """Of the predicted data, at every step. static: to [−1, 1]. dynamic: by its own quantile, against saturation under strong guidance."""
    clip_quantile: float = Field(0.995, gt=0, le=1)
    """Of clip=dynamic: this share of the values is in range."""

    @model_validator(mode="after")
    def _fits(self) -> DiffusionSample:
        if self.eta and self.solver != "ddim":
            raise ValueError(f"eta={self.eta} is read by solver=ddim only, not by solver={self.solver}: leave it out")
        if self.clip != "dynamic" and self.clip_quantile != type(self).model_fields["clip_quantile"].default:
            raise ValueError(f"clip_quantile is read by clip=dynamic only, not by clip={self.clip}: leave it out")
        return self

    @property
    def guides(self) -> bool:
        """Whether guidance does anything, so that two rows a sample must run."""
        return self.guidance != self.unguided

    @property
    def unguided(self) -> float:
        """The guidance that is none."""
        return 0.0 if self.guidance_schedule in ("cosine", "oscillating") else 1.0


def solve(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    options: DiffusionSample,
    *,
    noise: Fresh,
    guide: bool = False,
    clip: Clip | None = None,
    inpaint: Inpaint | None = None,
    start: int = 0,
) -> Tensor:
    """Sample as `options` say. With `guide`, `denoise` is bound to 2B conditions, the wanted before the others, and x has B rows.

    A `clip` of the caller's (embeddings have a norm, not a range) takes the place of that in the options.
    """
    if guide:
        times = timesteps(diffusion.steps, options.steps)
        denoise = guided_denoise(denoise, scale_table(options.guidance, times, options.guidance_schedule, x.device))
    if clip is None and options.clip != "none":
        clip = static_clip() if options.clip == "static" else dynamic_clip(options.clip_quantile)
    if options.solver == "ddpm":
        return ddpm(diffusion, denoise, x, options.steps, noise=noise, clip=clip, inpaint=inpaint, start=start)
    if options.solver == "ddim":
        eta = options.eta
        return ddim(diffusion, denoise, x, options.steps, noise=noise, eta=eta, clip=clip, inpaint=inpaint, start=start)
    sde = options.solver == "dpm_solver_sde"
    return dpm_solver(
        diffusion, denoise, x, options.steps, noise=noise, sde=sde, clip=clip, inpaint=inpaint, start=start
    )
