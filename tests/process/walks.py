"""Diffusions, draws and a stand-in for a network, for tests of solvers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kineograph.process.diffusion import Diffusion, DiffusionConfig
from kineograph.process.solvers import (
    ddim,
    ddpm,
    dpm_solver,
)

SOLVERS = {
    "ddpm": ddpm,
    "ddim": ddim,
    "ddim-half": partial(ddim, eta=0.5),
    "ddim-ancestral": partial(ddim, eta=1.0),
    "dpm": dpm_solver,
    "dpm-sde": partial(dpm_solver, sde=True),
}
NAMES = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
SHAPE = (2, 3, 4, 4)

every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())


def make(**keys) -> Diffusion:
    return Diffusion(DiffusionConfig(**keys))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draws(n: int) -> torch.Tensor:
    return drawn(*SHAPE, seed=100 + n)


def network(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Some smooth function of x and t, no two places of it alike."""
    places = torch.linspace(0.5, 1.5, x[0].numel()).view(x[0].shape)
    return 0.7 * torch.tanh(places * x + 0.002 * t.view(-1, *[1] * (x.dim() - 1))) + 0.1 * x.flip(1)
