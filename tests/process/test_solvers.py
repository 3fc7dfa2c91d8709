import math
from functools import partial

import pytest
import torch
from diffusers import (
    DDPMScheduler,
)

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.process.diffusion import Diffusion
from kineograph.process.guidance import make_guided_denoiser, scale_table
from kineograph.process.solvers import (
    DiffusionSample,
    Inpaint,
    ddim,
    ddpm,
    dpm_solver,
    dynamic_clip,
    find_first_timestep,
    solve,
    static_clip,
    timesteps,
)
from tests.process.walks import SHAPE, SOLVERS, drawn, draws, every_solver, make, network

# Where it begins and ends ----------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
def test_every_solver_begins_at_the_last_level_and_ends_at_what_it_found(solver, steps, objective):
    diffusion = make(objective=objective, schedule="linear")
    seen = []

    def denoise(x, t):
        assert t.dtype == torch.int64 and t.shape == (2,) and (t == t[0]).all()
        seen.append((int(t[0]), diffusion.to_x0(x, t, network(x, t))))
        return network(x, t)

    found = solver(diffusion, denoise, drawn(*SHAPE), steps, noise=draws)
    assert [t for t, _ in seen] == timesteps(1000, steps)
    assert seen[0][0] == 999 and len(seen) == steps
    torch.testing.assert_close(found, seen[-1][1])


@pytest.mark.parametrize("steps", [0, 1001])
def test_more_steps_than_levels_are_refused(steps):
    with pytest.raises(InputError, match=f"steps={steps} does not fit a diffusion of 1000 timesteps: use 1 … 1000"):
        ddim(make(), network, drawn(*SHAPE), steps, noise=draws)


@every_solver
@pytest.mark.parametrize("objective", ["x0", "v"])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_pure_noise_is_a_good_start(solver, objective, steps):
    """At zero terminal SNR the first x tells nothing of x0, and no coefficient may be infinite."""
    diffusion = make(objective=objective, zero_terminal=True, learned_variance=False)
    x0 = drawn(*SHAPE, seed=5)

    def denoise(x, t):
        alpha, sigma = (table[t].view(-1, 1, 1, 1) for table in (diffusion.alpha, diffusion.sigma))
        return x0 if objective == "x0" else (alpha * x - x0) / sigma

    torch.testing.assert_close(solver(diffusion, denoise, drawn(*SHAPE), steps, noise=draws), x0, atol=2e-6, rtol=0)


def perfect(diffusion: Diffusion, x0: torch.Tensor):
    """A network that knows the data."""

    def denoise(x, t):
        alpha, sigma = (table[t].view(-1, 1, 1, 1) for table in (diffusion.alpha, diffusion.sigma))
        return diffusion.target(x0, (x - alpha * x0) / sigma, t)

    return denoise


@every_solver
@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
def test_who_knows_the_data_finds_it(solver, objective):
    diffusion, x0 = make(objective=objective), drawn(*SHAPE, seed=5)
    found = solver(diffusion, perfect(diffusion, x0), drawn(*SHAPE), 10, noise=draws)
    torch.testing.assert_close(found, x0, atol=1e-5, rtol=0)


@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
@pytest.mark.parametrize("solver", [ddim, dpm_solver])
def test_without_noise_the_way_back_is_the_way_there(solver, objective):
    """The true ε is the same at every level: all x on the way are those that add_noise gives."""
    diffusion, x0, eps = make(objective=objective, schedule="linear"), drawn(*SHAPE, seed=5), drawn(*SHAPE, seed=6)
    known = perfect(diffusion, x0)

    def denoise(x, t):
        torch.testing.assert_close(x, diffusion.add_noise(x0, eps, t), atol=2e-5, rtol=0)
        return known(x, t)

    start = diffusion.add_noise(x0, eps, torch.full((2,), 999))
    torch.testing.assert_close(solver(diffusion, denoise, start, 12, noise=draws), x0, atol=1e-5, rtol=0)


# Gaussian data: the best denoiser is known, and everything is linear -----------------------------------------------

MEAN, DEVIATION = 0.7, 0.4


def best(diffusion: Diffusion, steps: int):
    """E[x0 | x_t], and with learned variance the true variance of x_s given x_t, of data N(MEAN, DEVIATION²)."""
    times = timesteps(diffusion.steps, steps)
    after = dict(zip(times, [*(diffusion.alpha_bar[t] for t in times[1:]), 1.0], strict=True))

    def denoise(x, t):
        kept, then = diffusion.alpha_bar[int(t[0])], after[int(t[0])]
        total = DEVIATION**2 * kept + 1 - kept
        x0 = MEAN + DEVIATION**2 * math.sqrt(kept) / total * (x - math.sqrt(kept) * MEAN)
        eps = (x - math.sqrt(kept) * x0) / math.sqrt(1 - kept)
        answer = diffusion.target(x0, eps, t)
        if not diffusion.config.learned_variance:
            return answer
        if then == 1:
            return torch.cat([answer, answer], 1)
        beta = 1 - kept / then
        low = beta * (1 - then) / (1 - kept)
        spread = low + (math.sqrt(then) * beta / (1 - kept)) ** 2 * DEVIATION**2 * (1 - kept) / total
        share = math.log(spread / low) / math.log(beta / low)
        return torch.cat([answer, torch.full_like(answer, 2 * share - 1)], 1)

    return denoise


def moments(solver, diffusion: Diffusion, steps: int) -> tuple[float, float]:
    """Mean and deviation of what a solver draws, exactly: rows follow nothing, the start, and each of the fresh draws."""
    rows = steps + 2
    x = torch.zeros(rows, 1)
    x[1] = 1
    found = solver(diffusion, best(diffusion, steps), x, steps, noise=lambda n: torch.eye(rows)[:, n + 2 : n + 3])
    return float(found[0]), float((found[1:] - found[0]).square().sum().sqrt())


@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
@pytest.mark.parametrize(
    ("name", "steps", "within"),
    [
        ("ddpm", 300, 0.02),
        ("ddim", 200, 0.01),
        ("ddim-half", 200, 0.015),
        ("ddim-ancestral", 300, 0.02),
        ("dpm", 40, 0.002),
        ("dpm-sde", 100, 0.01),
    ],
)
def test_every_solver_draws_gaussian_data_as_it_is(name, steps, within, objective):
    mean, deviation = moments(SOLVERS[name], make(objective=objective), steps)
    assert mean == pytest.approx(MEAN, abs=1e-3)
    assert deviation == pytest.approx(DEVIATION, rel=within)


@pytest.mark.parametrize("steps", [2, 10, 100])
@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
def test_learned_variances_make_few_steps_exact(steps, objective):
    """The posterior of Gaussian data is Gaussian over any stride; with its variance learned only the last step, to x̂0, costs spread."""
    mean, deviation = moments(ddpm, make(objective=objective, learned_variance=True), steps)
    fixed = moments(ddpm, make(objective=objective), steps)[1]
    last = timesteps(1000, steps)[-1]
    kept = make().alpha_bar[last]
    expected = DEVIATION**2 * math.sqrt(kept) / math.sqrt(DEVIATION**2 * kept + 1 - kept)
    assert mean == pytest.approx(MEAN, abs=2e-3)
    assert deviation == pytest.approx(expected, rel=2e-3)
    assert abs(fixed - expected) > abs(deviation - expected) * 5


OPTIONS = [
    {"solver": "ddpm"},
    {"solver": "ddim"},
    {"solver": "ddim", "eta": 0.5},
    {"solver": "dpm_solver"},
    {"solver": "dpm_solver_sde"},
]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "scaled_linear", "quadratic", "sigmoid"])
@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
@pytest.mark.parametrize("clip", ["none", "static", "dynamic"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_small_error_of_the_network_leaves_the_spread_as_it_is(options, clip, objective, schedule):
    """With range and without: an error of ε at the last levels of the cosine schedule counts 20,000 fold in x̂0."""
    diffusion, mean, deviation, rows = make(objective=objective, schedule=schedule), 0.1, 0.25, 500

    def denoise(x, t):
        kept = diffusion.alpha_bar[int(t[0])]
        total = deviation**2 * kept + 1 - kept
        x0 = mean + deviation**2 * math.sqrt(kept) / total * (x - math.sqrt(kept) * mean)
        eps = (x - math.sqrt(kept) * x0) / math.sqrt(1 - kept)
        return diffusion.target(x0, eps, t) + 0.03 * drawn(rows, 1, 2, seed=int(t[0]))

    found = solve(
        diffusion,
        denoise,
        drawn(rows, 1, 2),
        DiffusionSample(steps=120 if options["solver"] == "ddpm" else 50, clip=clip, **options),
        noise=lambda n: drawn(rows, 1, 2, seed=5000 + n),
    )
    assert float(found.mean()) == pytest.approx(mean, abs=0.03)
    assert float(found.std()) == pytest.approx(deviation, rel=0.15)


def test_without_a_range_sampling_starts_where_an_error_does_not_explode():
    cosine = make()
    start = find_first_timestep(cosine, 50)
    assert cosine.alpha_bar[start] ** 0.5 >= 0.05 > cosine.alpha_bar[start + 1] ** 0.5
    for other in (make(objective="v"), make(objective="x0"), make(schedule="linear"), make(schedule="scaled_linear")):
        assert find_first_timestep(other, 50) == 999
    seen = []

    def watch(x, t):
        seen.append(int(t[0]))
        return network(x, t)

    for clip in ("none", "static"):
        solve(cosine, watch, drawn(*SHAPE), DiffusionSample(steps=10, clip=clip), noise=draws)
    assert seen[0] == start and seen[10] == 999 and len(seen) == 20
    seen.clear()
    solve(cosine, watch, drawn(*SHAPE), DiffusionSample(steps=1000, clip="none"), noise=draws)
    assert seen == list(range(start, -1, -1))


def test_second_order_is_worth_its_name():
    """ddim's error halves with the step; that of the solver of second order is a fraction of it."""
    diffusion = make(objective="v", zero_terminal=True)
    first, second = (
        [moments(f, diffusion, steps)[1] - DEVIATION for steps in (20, 40, 80)] for f in (ddim, dpm_solver)
    )
    assert first[0] / first[1] == pytest.approx(2, abs=0.1) and first[1] / first[2] == pytest.approx(2, abs=0.1)
    assert all(abs(b) < abs(a) / 8 for a, b in zip(first, second, strict=True))


# Ranges ----------------------------------------------------------------------------------------------------------


def test_dynamic_clipping_is_that_of_diffusers():
    x0 = 3 * drawn(4, 3, 8, 8) * torch.tensor([0.05, 1.0, 2.0, 0.4]).view(-1, 1, 1, 1)
    reference = DDPMScheduler(thresholding=True, dynamic_thresholding_ratio=0.9, sample_max_value=1e9)
    found = dynamic_clip(0.9)(x0)
    torch.testing.assert_close(found, reference._threshold_sample(x0))
    assert torch.equal(found[0], x0[0])  # within range: as it was
    assert float(found.abs().max()) == 1
    torch.testing.assert_close(dynamic_clip(0.9, limit=2.0)(2 * x0), 2 * found)


@every_solver
def test_clipping_acts_at_every_step(solver):
    diffusion = make(objective="eps", schedule="linear")
    calls = []

    def clip(x0):
        calls.append(x0)
        return x0.clamp(-0.5, 0.5)

    found = solver(diffusion, network, drawn(*SHAPE), 6, noise=draws, clip=clip)
    assert len(calls) == 6 and float(found.abs().max()) <= 0.5
    assert float(static_clip(0.5)(drawn(50)).abs().max()) == 0.5


# Around known parts ------------------------------------------------------------------------------------------------


@every_solver
def test_a_walk_may_begin_below_the_last_level(solver):
    diffusion, seen = make(objective="v"), []
    solver(diffusion, lambda x, t: (seen.append(int(t[0])), network(x, t))[1], drawn(*SHAPE), 3, noise=draws, first=299)
    assert seen == [299, 199, 99]


@every_solver
def test_known_parts_stay_and_are_seen_at_the_right_level(solver):
    diffusion = make(objective="v")
    known, mask = 3 * torch.ones(SHAPE), torch.zeros(SHAPE, dtype=torch.bool)
    mask[..., :2] = True
    drawn_so_far, seen = [], []

    def noise(n):
        assert n == len(drawn_so_far)
        drawn_so_far.append(draws(n))
        return draws(n)

    def denoise(x, t):
        # the known part is noised by the draw just made
        seen.append(int(t[0]))
        wanted = diffusion.add_noise(known, drawn_so_far[-1], t)
        torch.testing.assert_close(x[..., :2], wanted[..., :2], atol=1e-5, rtol=1e-5)
        return network(x, t)

    found = solver(diffusion, denoise, drawn(*SHAPE), 5, noise=noise, inpaint=Inpaint(known, mask, resample=3))
    assert torch.equal(found[..., :2], known[..., :2])
    assert seen == [999] * 3 + [799] * 3 + [599] * 3 + [399] * 3 + [199]
    assert (found[..., 2:] != known[..., 2:]).all()


def test_resampling_makes_the_rest_agree_with_what_is_known():
    """Four equal numbers, one of them known: its noise hides it from the others, which have agreed on a sign by the time it shows."""
    diffusion = make(objective="x0", steps=200)
    known = torch.tensor([1.0, -1.0]).repeat(200)[:, None].repeat(1, 4)
    mask = torch.tensor([True, False, False, False])

    def denoise(x, t):  # E[x0 | x_t] of x0 = (s, s, s, s), s = ±1
        kept = torch.tensor(diffusion.alpha_bar)[t]
        push = x.sum(1) * kept.sqrt() / (1 - kept)
        return torch.tanh(push)[:, None].repeat(1, 4)

    def agreement(resample):
        noise = Noise.for_rows(0, 0, 400)
        found = ddpm(
            diffusion,
            denoise,
            noise.normal("x", 4),
            10,
            noise=lambda n: noise.normal(f"step {n}", 4),
            inpaint=Inpaint(known, mask, resample),
        )
        return float((found[:, 1].sign() == known[:, 1]).float().mean())

    once, often = agreement(1), agreement(10)
    assert once < 0.8 and often > 0.9


@pytest.mark.parametrize(("share", "bound"), [(30.0, 1.0), (-30.0, 0.0)])
def test_a_learned_variance_stays_between_its_bounds(share, bound):
    """Neighbouring timesteps leave the share free; over a stride e^30 times the variance would be noise alone."""
    diffusion = make(learned_variance=True)

    def answer(share):
        return lambda x, t: torch.cat([network(x, t), torch.full_like(x, 2 * share - 1)], 1)

    found, wanted = (ddpm(diffusion, answer(f), drawn(*SHAPE), 6, noise=draws) for f in (share, bound))
    assert torch.equal(found, wanted)
    assert not torch.equal(found, ddpm(diffusion, answer(0.5), drawn(*SHAPE), 6, noise=draws))


# No waiting ------------------------------------------------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
def test_sampling_asks_the_device_nothing(solver, objective):
    """Meta tensors have no values: a look at one would raise."""
    diffusion = make(objective=objective, learned_variance=True)
    x = torch.empty(SHAPE, device="meta")
    both = lambda x, t: torch.cat([network(x, t)] * 2, 1)  # noqa: E731
    table = scale_table(3.0, timesteps(1000, 5), "cosine", "meta")
    with torch.device("meta"):
        found = solver(
            diffusion,
            make_guided_denoiser(both, table),
            x,
            5,
            noise=lambda n: torch.empty(SHAPE, device="meta"),
            clip=dynamic_clip(),
            inpaint=Inpaint(x, x > 0, resample=2),
        )
    assert found.shape == SHAPE and found.device.type == "meta"


@every_solver
@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
def test_an_output_that_is_overwritten_by_the_next_is_no_harm(solver, objective):
    """As a recorded graph does."""
    diffusion, place = make(objective=objective), torch.empty(SHAPE)
    found = solver(diffusion, lambda x, t: place.copy_(network(x, t)), drawn(*SHAPE), 8, noise=draws)
    torch.testing.assert_close(found, solver(diffusion, network, drawn(*SHAPE), 8, noise=draws))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (2, 3, 4, 5, 6)])
@every_solver
def test_data_may_have_any_shape(solver, shape):
    rows = drawn(*shape) if len(shape) > 1 else drawn(5, 1)
    found = solver(make(objective="v"), lambda x, t: x.tanh(), rows, 4, noise=lambda n: drawn(*rows.shape, seed=n))
    flat = solver(
        make(objective="v"),
        lambda x, t: x.tanh(),
        rows.flatten(1),
        4,
        noise=lambda n: drawn(*rows.shape, seed=n).flatten(1),
    )
    torch.testing.assert_close(found.flatten(1), flat)


# By config -------------------------------------------------------------------------------------------------------


def conditional(x, t):
    """The first half of the rows gets one answer, the second (guided away from) another."""
    rows = len(x) // 2
    return network(x, t) + 0.3 * torch.cat([torch.ones_like(x[:rows]), -torch.ones_like(x[:rows])])


@pytest.mark.parametrize(
    ("options", "solver"),
    [
        ({"solver": "ddpm"}, ddpm),
        ({"solver": "ddim"}, ddim),
        ({"solver": "ddim", "eta": 0.5}, partial(ddim, eta=0.5)),
        ({"solver": "dpm_solver"}, dpm_solver),
        ({"solver": "dpm_solver_sde"}, partial(dpm_solver, sde=True)),
    ],
)
@pytest.mark.parametrize(
    ("clip", "function"),
    [("none", None), ("static", static_clip()), ("dynamic", dynamic_clip(0.8))],
)
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_options_name_solver_clip_and_guidance(options, solver, clip, function, schedule):
    diffusion = make(objective="v", steps=100)
    keys = {"clip_quantile": 0.8} if clip == "dynamic" else {}
    chosen = DiffusionSample(steps=6, guidance=2.5, guidance_schedule=schedule, clip=clip, **keys, **options)
    found = solve(diffusion, conditional, drawn(*SHAPE), chosen, noise=draws, guide=True)
    table = scale_table(2.5, timesteps(100, 6), schedule)
    wanted = solver(diffusion, make_guided_denoiser(conditional, table), drawn(*SHAPE), 6, noise=draws, clip=function)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    own = solve(diffusion, network, drawn(*SHAPE), chosen, noise=draws, clip=lambda x0: torch.zeros_like(x0))
    assert not own.any()


def test_options_that_do_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"solver=ddpm does not use eta=0.5"):
        parse(DiffusionSample, {"eta": 0.5, "solver": "ddpm"})
    with pytest.raises(ConfigError, match="does not use clip_quantile"):
        parse(DiffusionSample, {"clip_quantile": 0.9})


def test_guidance_that_does_nothing_costs_nothing():
    assert not DiffusionSample(guidance=1).uses_guidance and DiffusionSample(guidance=0).uses_guidance
    assert DiffusionSample(guidance=1, guidance_schedule="cosine").uses_guidance
    assert not DiffusionSample(guidance=0, guidance_schedule="cosine").uses_guidance
