"""Solvers, step by step, against diffusers' schedulers."""

import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
)

from kineograph.process.diffusion import Diffusion
from kineograph.process.solvers import (
    ddim,
    ddpm,
    dpm_solver,
    static_clip,
    timesteps,
)
from tests.process.walks import NAMES, SHAPE, drawn, draws, make, network

# Against diffusers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7, 20, 50, 1000])
def test_levels_are_those_of_trailing_spacing(steps):
    reference = DDIMScheduler(timestep_spacing="trailing")
    reference.set_timesteps(steps)
    assert timesteps(1000, steps) == reference.timesteps.tolist()


@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
@pytest.mark.parametrize("eta", [0.0, 0.6])
def test_ddim_is_that_of_diffusers(objective, eta):
    diffusion = make(schedule="linear", objective=objective)
    reference = DDIMScheduler(
        prediction_type=NAMES[objective], timestep_spacing="trailing", clip_sample=False, beta_schedule="linear"
    )
    reference.set_timesteps(20)
    x = drawn(*SHAPE)
    for n, t in enumerate(reference.timesteps):
        x = reference.step(network(x, t.expand(2)), t, x, eta=eta, variance_noise=draws(n) if eta else None).prev_sample
    found = ddim(diffusion, network, drawn(*SHAPE), 20, noise=draws, eta=eta)
    torch.testing.assert_close(found, x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("steps", [25, 200])
def test_ddpm_is_that_of_diffusers(objective, learned, steps):
    diffusion = make(
        schedule="linear", steps=200, beta_start=1e-4, beta_end=0.1, objective=objective, learned_variance=learned
    )
    reference = DDPMScheduler(
        200,
        beta_end=0.1,
        prediction_type=NAMES[objective],
        timestep_spacing="trailing",
        variance_type="learned_range" if learned else "fixed_small",
        clip_sample=True,
    )
    reference.set_timesteps(steps)
    both = (lambda x, t: torch.cat([network(x, t), network(x, t + 50)], 1)) if learned else network
    x, generator = drawn(*SHAPE), torch.Generator().manual_seed(7)
    for t in reference.timesteps:
        step = reference.step(both(x, t.expand(2)), t, x, generator=generator)
        x = step.prev_sample
    generator = torch.Generator().manual_seed(7)
    found = ddpm(
        diffusion,
        both,
        drawn(*SHAPE),
        steps,
        noise=lambda n: torch.randn(SHAPE, generator=generator),
        clip=static_clip(),
    )
    # theirs adds noise after the last step too where its level is not 0: ours ends at x̂0
    torch.testing.assert_close(found, step.pred_original_sample, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("objective", ["eps", "x0", "v"])
@pytest.mark.parametrize("sde", [False, True])
def test_dpm_solver_is_that_of_diffusers(objective, sde):
    diffusion = make(schedule="linear", objective=objective)
    reference = DPMSolverMultistepScheduler(
        prediction_type=NAMES[objective],
        timestep_spacing="trailing",
        algorithm_type="sde-dpmsolver++" if sde else "dpmsolver++",
    )
    reference.set_timesteps(20)
    x = drawn(*SHAPE)
    for n, t in enumerate(reference.timesteps):
        x = reference.step(network(x, t.expand(2)), t, x, variance_noise=draws(n)).prev_sample
    found = dpm_solver(diffusion, network, drawn(*SHAPE), 20, noise=draws, sde=sde)
    torch.testing.assert_close(found, x, atol=2e-4, rtol=2e-4)


def cogvideox() -> tuple[Diffusion, dict]:
    ours = make(schedule="scaled_linear", shift=3.0, zero_terminal=True, objective="v")
    theirs = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    return ours, theirs | {"snr_shift_scale": 3.0, "clip_sample": False}


def test_ddim_is_that_of_cogvideox():
    diffusion, keys = cogvideox()
    reference = CogVideoXDDIMScheduler(**keys)
    reference.set_timesteps(50)
    x = drawn(*SHAPE)
    for t in reference.timesteps:
        x = reference.step(network(x, t.expand(2)), int(t), x).prev_sample
    found = ddim(diffusion, network, drawn(*SHAPE), 50, noise=draws)
    torch.testing.assert_close(found, x.float(), atol=1e-4, rtol=1e-4)


def test_dpm_solver_is_that_of_cogvideox():
    diffusion, keys = cogvideox()
    reference = CogVideoXDPMScheduler(**keys)
    reference.set_timesteps(50)
    x, before, generator = drawn(*SHAPE), None, torch.Generator().manual_seed(7)
    times = [int(t) for t in reference.timesteps]
    for t, back in zip(times, [None, *times[:-1]], strict=True):
        output = network(x, torch.tensor([t, t]))
        x, before = reference.step(output, before, t, back, x, generator=generator)
        x = x.float()
    generator = torch.Generator().manual_seed(7)

    def noise(n):
        if n:  # a step of second order draws a first-order result too, and drops it
            torch.randn(SHAPE, generator=generator)
        return torch.randn(SHAPE, generator=generator)

    found = dpm_solver(diffusion, network, drawn(*SHAPE), 50, noise=noise, sde=True)
    torch.testing.assert_close(found, x, atol=1e-4, rtol=1e-4)
