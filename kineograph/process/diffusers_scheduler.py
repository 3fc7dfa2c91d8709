"""Translation between diffusers' scheduler configs and our diffusion and sampling keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kineograph.core.config import parse
from kineograph.core.errors import InputError
from kineograph.process.diffusion import DiffusionConfig

# A scheduler's config may leave out its class's defaults.
_DEFAULTS: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "trained_betas": None,
    "clip_sample": True,
    "set_alpha_to_one": True,
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "rescale_betas_zero_snr": False,
    "snr_shift_scale": 3.0,
}
_SOLVERS = {"CogVideoXDDIMScheduler": "ddim", "CogVideoXDPMScheduler": "dpm_solver_sde"}
_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "squaredcos_cap_v2": "cosine"}
_OBJECTIVES = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}


def read_scheduler(config: dict[str, Any], kind: str, where: Path) -> tuple[DiffusionConfig, str]:
    """Read a scheduler's config. → the diffusion config and the solver's name (`ddim`, `dpm_solver_sde`)."""
    if kind not in _SOLVERS:
        raise InputError(f"{where}: {kind} is not supported; use {' or '.join(_SOLVERS)}")
    full = _DEFAULTS | config
    if full["trained_betas"] is not None:
        raise InputError(f"{where}: trained_betas is not supported; use a beta_schedule")
    tree = {
        "steps": full["num_train_timesteps"],
        "schedule": _translate(_SCHEDULES, full, "beta_schedule", where),
        "shift": full["snr_shift_scale"],
        "zero_terminal": full["rescale_betas_zero_snr"],
        "objective": _translate(_OBJECTIVES, full, "prediction_type", where),
    }
    if tree["schedule"] != "cosine":
        tree |= {"beta_start": full["beta_start"], "beta_end": full["beta_end"]}
    return parse(DiffusionConfig, tree, str(where)), _SOLVERS[kind]


def compare_diffusion(theirs: DiffusionConfig, ours: DiffusionConfig) -> dict[str, tuple[Any, Any]]:
    """Keys of `diffusion` in which the noise schedule or the objective differ, with both values."""
    keys: dict[str, tuple[Any, Any]] = {
        name: (getattr(theirs, name), getattr(ours, name))
        for name in ("steps", "schedule", "shift", "zero_terminal", "objective")
    }
    keys |= {name: (theirs.beta_range[i], ours.beta_range[i]) for i, name in enumerate(("beta_start", "beta_end"))}
    return {name: pair for name, pair in keys.items() if not _values_match(*pair)}


def _values_match(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=1e-9) if isinstance(a, float) else a == b


def unsupported_scheduler_options(config: dict[str, Any], where: Path) -> list[str]:
    """Warnings for sampling options that Kineograph does not have. Released CogVideoX folders use none of them."""
    full = _DEFAULTS | config
    lines = []
    if full["timestep_spacing"] != "trailing":
        lines.append(f"{where}: timestep_spacing={full['timestep_spacing']}, but Kineograph uses trailing")
    if full["clip_sample"]:
        lines.append(f"{where}: clip_sample=true, but Kineograph does not clip latents")
    if not full["set_alpha_to_one"]:
        lines.append(f"{where}: set_alpha_to_one=false, but Kineograph ends at clean data")
    return lines


def write_scheduler(diffusion: DiffusionConfig, solver: str = "ddim") -> dict[str, Any]:
    """Write a diffusion as the config of diffusers' CogVideoX scheduler."""
    schedules = {ours: theirs for theirs, ours in _SCHEDULES.items()}
    if diffusion.schedule not in schedules:
        raise InputError(
            f"diffusion.schedule={diffusion.schedule} has no name in diffusers' CogVideoX schedulers: {', '.join(schedules)} have"
        )
    if diffusion.learned_variance:
        raise InputError(
            "diffusion.learned_variance=true cannot be exported: diffusers' CogVideoX schedulers have no learned variance"
        )
    start, end = (
        diffusion.beta_range if diffusion.schedule != "cosine" else (_DEFAULTS["beta_start"], _DEFAULTS["beta_end"])
    )
    return {
        "_class_name": next((kind for kind, name in _SOLVERS.items() if name == solver), "CogVideoXDDIMScheduler"),
        **_DEFAULTS,
        "num_train_timesteps": diffusion.steps,
        "beta_start": start,
        "beta_end": end,
        "beta_schedule": schedules[diffusion.schedule],
        "clip_sample": False,
        "prediction_type": {ours: theirs for theirs, ours in _OBJECTIVES.items()}[diffusion.objective],
        "timestep_spacing": "trailing",
        "rescale_betas_zero_snr": diffusion.zero_terminal,
        "snr_shift_scale": diffusion.shift,
    }


def _translate(names: dict[str, str], config: dict[str, Any], key: str, where: Path) -> str:
    if config[key] not in names:
        raise InputError(f"{where}: {key}={config[key]!r} is not supported; use one of {', '.join(names)}")
    return names[config[key]]
