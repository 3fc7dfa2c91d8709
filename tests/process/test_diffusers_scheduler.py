"""Schedulers: our tables from a folder's config are diffusers' own, and a config that we write gives diffusers our tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from kineograph.core.errors import InputError
from kineograph.process.diffusers_scheduler import read_scheduler, unsupported_scheduler_options, write_scheduler
from kineograph.process.diffusion import DiffusionConfig, compute_alpha_bars

RELEASED = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}  # fmt: skip
WHERE = Path("scheduler_config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"snr_shift_scale": 1.0},
        {"snr_shift_scale": 3.0},
        {"num_train_timesteps": 100, "beta_schedule": "linear", "beta_start": 1e-3, "beta_end": 0.03},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"prediction_type": "epsilon", "rescale_betas_zero_snr": False},
    ],
)
@pytest.mark.parametrize("kind", [CogVideoXDDIMScheduler, CogVideoXDPMScheduler])
def test_tables_agree_both_ways(kind: Any, changes: dict[str, Any]) -> None:
    theirs = kind(**(RELEASED | changes))
    ours, solver = read_scheduler(dict(theirs.config), kind.__name__, WHERE)
    # float32 tables of theirs where the schedule is linear
    torch.testing.assert_close(
        torch.as_tensor(compute_alpha_bars(ours), dtype=torch.float64),
        theirs.alphas_cumprod.double(),
        rtol=1e-4,
        atol=1e-6,
    )
    written = write_scheduler(ours, solver)
    assert written["_class_name"] == kind.__name__
    again = kind.from_config(written)
    torch.testing.assert_close(again.alphas_cumprod, theirs.alphas_cumprod)
    same = ("prediction_type", "timestep_spacing", "clip_sample", "set_alpha_to_one")
    assert [again.config[key] for key in same] == [theirs.config[key] for key in same]


def test_what_a_config_leaves_out_is_the_class_default() -> None:
    ours, _ = read_scheduler({"prediction_type": "v_prediction"}, "CogVideoXDDIMScheduler", WHERE)
    torch.testing.assert_close(
        torch.as_tensor(compute_alpha_bars(ours), dtype=torch.float64),
        CogVideoXDDIMScheduler().alphas_cumprod.double(),
        rtol=1e-5,
        atol=1e-7,
    )


def test_strangers_are_refused_by_file_and_key() -> None:
    with pytest.raises(InputError, match="EulerDiscreteScheduler"):
        read_scheduler({}, "EulerDiscreteScheduler", WHERE)
    with pytest.raises(InputError, match=r"scheduler_config.json: beta_schedule='odd'"):
        read_scheduler({"beta_schedule": "odd"}, "CogVideoXDDIMScheduler", WHERE)
    with pytest.raises(InputError, match="trained_betas"):
        read_scheduler({"trained_betas": [0.1, 0.2]}, "CogVideoXDDIMScheduler", WHERE)
    with pytest.raises(InputError, match="sigmoid"):
        write_scheduler(DiffusionConfig(schedule="sigmoid"))
    with pytest.raises(InputError, match="learned_variance"):
        write_scheduler(DiffusionConfig(schedule="linear", learned_variance=True))


def test_other_ways_to_draw_are_told() -> None:
    assert unsupported_scheduler_options(RELEASED, WHERE) == []
    told = " ".join(unsupported_scheduler_options({"set_alpha_to_one": False}, WHERE))
    assert "timestep_spacing=leading" in told and "clip_sample" in told and "set_alpha_to_one" in told
