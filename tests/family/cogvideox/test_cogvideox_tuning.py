"""What trains: adapters or parts; the rest frozen, unsaved, and told apart by a digest. And starting from a folder of diffusers' form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.task import load_weights, player_parameters, task_state_dict
from kineograph.family.cogvideox import CogVideoX, CogVideoXConfig, diffusers_weights, tuning
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.transformer_config import RELEASED
from kineograph.train.config import EmaConfig, TrainConfig
from kineograph.train.stepper import Stepper
from tests.train.gathered import gather_state

from .conftest import Make, clips

NOISE = Noise.for_rows(1, 5, 4)
LORA = {"tune": "lora", "lora": {"rank": 2, "alpha": 4}, "init": "base"}


def stepped(task: CogVideoX, steps: int = 2, **keys: Any) -> Stepper:
    config = TrainConfig(lr=1e-2, batch_size=4, warmup=0, steps=steps, **keys)
    stepper = Stepper(task, config)
    for step in range(steps):
        stepper.step(step, [clips()])
    return stepper


@pytest.fixture
def folder(make: Make, tmp_path: Path) -> Path:
    """Released weights, but for the VAE: of a tiny stage with random weights."""
    place = tmp_path / "released" / "transformer"
    place.mkdir(parents=True)
    state = {name: value.contiguous() for name, value in diffusers_weights.diffusers_state(make()).items()}
    save_file(state, place / "diffusion_pytorch_model.safetensors")
    return place.parent


def test_adapters_start_silent_and_alone_train(make: Make) -> None:
    plain, adapted = make(lively=False), make(lively=False, **LORA)
    names = set(player_parameters(adapted, "model"))
    own = {name for name in names if name.startswith("network.")}
    assert len(own) == 2 * 4 * 2 and all(".lora_" in name for name in own)
    assert any(name.startswith("texts.") for name in names)  # a learned encoder goes on learning
    diffusers_weights.load_network(adapted.network, diffusers_weights.network_state(plain.network))
    load = {name: value for name, value in task_state_dict(plain).items() if name.startswith("texts.")}
    load_weights(adapted, {**task_state_dict(adapted), **load})
    assert torch.allclose(plain(clips(), NOISE).error, adapted(clips(), NOISE).error)


PARTS = {"tune": ["blocks.*.attention.*", "patch_out.*"], "init": "base"}


@pytest.mark.parametrize("keys", [LORA, PARTS])
@pytest.mark.parametrize("own", [False, True], ids=["folder", "alone"])
def test_what_is_frozen_stays_and_is_saved_where_no_folder_has_it(
    make: Make, folder: Path, keys: dict[str, Any], own: bool
) -> None:
    task = make(**keys, weights=None if own else str(folder))
    before = {name: p.detach().clone() for name, p in task.network.named_parameters()}
    trained = {
        name.removeprefix("network.") for name in player_parameters(task, "model") if name.startswith("network.")
    }
    stepper = stepped(task, ema=EmaConfig(decay=0.5))
    changed = {name for name, p in task.network.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trained and trained < before.keys()
    for kind in ("model", "ema"):
        saved = gather_state(stepper)[kind]
        wanted = before.keys() if own else trained
        assert {name.removeprefix("network.") for name in saved if name.startswith("network.")} == wanted
    moments = {key.partition(".")[2] for key in gather_state(stepper)["optimizer"] if "network." in key}
    assert {name.removeprefix("network.") for name in moments} == trained
    task.train()
    assert task.network.norm_final.training == own  # what a folder has is deaf to .train()


def test_averages_of_adapters_are_what_is_judged(make: Make) -> None:
    stepper = stepped(make(**LORA), ema=EmaConfig(decay=0.9))
    with stepper.eval_mode() as task:
        averaged = task.validate(clips(), NOISE)["loss"].value()
    with stepper.eval_mode(ema=False) as task:
        online = task.validate(clips(), NOISE)["loss"].value()
    assert not torch.equal(averaged, online)


def test_bf16_weights_keep_adapters_in_float32(make: Make) -> None:
    task = make(weights_in="bf16", **LORA)
    kinds = {p.dtype: name for name, p in task.network.named_parameters() if p.requires_grad}
    assert list(kinds) == [torch.float32]
    stepper = stepped(task)
    assert all(p.dtype == torch.bfloat16 for name, p in task.network.named_parameters() if ".lora_" not in name)
    assert stepper.skipped == 0


def test_targets_and_patterns_that_fit_nothing_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets='query' matches no layer; .*to_q"):
        make(**(LORA | {"lora": {"targets": ["query"]}}))
    with pytest.raises(ConfigError, match=r"tune='attn\.\*' matches no parameter"):
        make(tune=["attn.*"], init="base")


@pytest.mark.parametrize("tune", ["lora", ["patch_out.*"]])
def test_what_does_not_train_must_come_from_somewhere(make: Make, tune: Any) -> None:
    with pytest.raises(ConfigError, match=r"and there are none: .*weights=DIR.*init=runs/x/stage"):
        make(tune=tune)


def test_diffusers_name_of_the_output_layer_is_understood(make: Make) -> None:
    task = make(**(LORA | {"lora": {"rank": 2, "targets": ["to_out.0", "up"]}}))
    adapted = {name.partition(".lora_")[0] for name in player_parameters(task, "model") if ".lora_" in name}
    assert adapted == {f"network.blocks.{n}.{part}" for n in range(2) for part in ("attention.to_out", "mlp.up")}


# A folder of released weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tune", ["full", "lora", ("patch_out.*",)])
def test_starts_from_released_weights(make: Make, folder: Path, tune: Any) -> None:
    """`codec` names a stage here: the folder of this test has no VAE."""
    source = make()
    task = make(lively=False, weights=str(folder), tune=tune)
    found = diffusers_weights.diffusers_state(task)
    assert all(torch.equal(found[name], value) for name, value in diffusers_weights.diffusers_state(source).items())
    assert all(not p.is_meta for p in task.parameters())
    assert json.loads(task.assets()[tuning.ASSET])["folder"] == str(folder)


def test_a_saved_stage_comes_back_over_its_base(make: Make, folder: Path) -> None:
    keys = {**LORA, "weights": str(folder), "lively": False}
    task = make(**keys)
    stepped(task, ema=EmaConfig(decay=0))
    saved = {name: value.clone() for name, value in task_state_dict(task).items()}
    assert sum(value.numel() for value in saved.values()) < sum(p.numel() for p in task.network.parameters()) / 2
    again = make(assets=task.assets(), **keys)
    load_weights(again, saved)
    assert torch.equal(task(clips(), NOISE).error, again(clips(), NOISE).error)


def test_adapters_refuse_another_base(make: Make, folder: Path) -> None:
    keys = {**LORA, "weights": str(folder), "lively": False}
    assets = make(**keys).assets()
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    state = {name: value.contiguous() for name, value in diffusers_weights.diffusers_state(make()).items()}
    state["proj_out.weight"] = state["proj_out.weight"] + 1
    save_file(state, file)
    with pytest.raises(InputError, match="differs from the weights"):
        make(assets=assets, **keys)


def test_a_stage_that_trains_everything_needs_its_folder_once(make: Make, folder: Path) -> None:
    keys = {"weights": str(folder), "lively": False}
    assets = make(**keys).assets()
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    again = make(assets=assets, **keys)  # its own checkpoint holds all weights
    assert again.assets() == assets
    with pytest.raises(InputError, match="neither diffusion_pytorch_model"):
        make(**keys)


def test_a_folder_of_another_shape_is_refused_by_name(make: Make, folder: Path) -> None:
    with pytest.raises(InputError, match=r"lacks transformer_blocks\.2\."):
        make(weights=str(folder), depth=3)
    with pytest.raises(InputError, match="has no folder transformer"):
        make(weights=str(folder / "transformer"))


def test_a_folder_that_does_not_fit_is_refused_before_anything_is_written(make: Make, folder: Path) -> None:
    """Where a run is checked, of tensors without numbers: by the headers of the files that are there."""
    keys = {"text": {"kind": "given", "width": 16, "length": 6}, "null_text": "zeros", "lively": False}
    with FakeTensorMode(allow_non_fake_inputs=True):
        make(weights=str(folder), **keys)
        with pytest.raises(InputError, match=r"lacks transformer_blocks\.2\."):
            make(weights=str(folder), depth=3, **keys)
        (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"short")
        with pytest.raises(InputError, match="is not a complete safetensors file"):
            make(weights=str(folder), **keys)


OF_THE_FOLDER = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "snr_shift_scale": 1.0, "timestep_spacing": "trailing",
                 "clip_sample": False}  # fmt: skip


def scheduled(folder: Path, **changes: Any) -> str:
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(OF_THE_FOLDER | changes))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"beta_start": 0.001}, "beta_start=0.001"),
        ({"beta_end": 0.02}, r"beta_end=0\.02, and the stage has 0\.012"),
        ({"beta_schedule": "linear"}, "schedule=linear"),
        ({"snr_shift_scale": 3.0}, r"shift=3\.0"),
        ({"rescale_betas_zero_snr": False}, "zero_terminal=false"),
        ({"prediction_type": "sample"}, "objective=x0"),
        ({"num_train_timesteps": 500, "beta_start": 0.0017, "beta_end": 0.024}, "steps=500"),
    ],
)
def test_a_folder_of_another_schedule_is_refused_by_key(
    make: Make, folder: Path, changes: dict[str, Any], key: str
) -> None:
    make(weights=scheduled(folder))
    with pytest.raises(
        ConfigError, match=rf"scheduler_config\.json has diffusion\.{key}.*set stages\.generator\.diffusion"
    ):
        make(weights=scheduled(folder, **changes))


def test_of_another_models_folder_the_shape_is_told_before_its_schedule(make: Make, folder: Path) -> None:
    with pytest.raises(InputError, match=r"lacks transformer_blocks\.2\."):
        make(weights=scheduled(folder, snr_shift_scale=3.0), depth=3)


def test_a_folder_that_draws_otherwise_is_told(make: Make, folder: Path) -> None:
    said: list[str] = []
    make(weights=scheduled(folder), note=said.append)
    assert not said
    make(weights=scheduled(folder, timestep_spacing="leading"), note=said.append)
    assert len(said) == 1 and "timestep_spacing=leading, but Kineograph uses trailing" in said[0]


_ROTARY = {"use_rotary_positional_embeddings": True}
_LATER = _ROTARY | {"patch_size_t": 2, "sample_height": 300, "sample_width": 300, "sample_frames": 81}
PUBLISHED: dict[str, dict[str, Any]] = {  # what their config.json say of positions, where it is not diffusers' default
    "2b": {},
    "5b": _ROTARY,
    "5b-i2v": _ROTARY | {"use_learned_positional_embeddings": True, "in_channels": 32},
    "1.5-5b": _LATER,
    "1.5-5b-i2v": _LATER | {"in_channels": 32, "ofs_embed_dim": 512},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_shape_has_the_positions_of_its_own_folder_and_of_no_other_kind(tmp_path: Path, name: str) -> None:
    assert set(PUBLISHED) == set(RELEASED)
    text = {"kind": "given", "width": 8}
    small = {"task": "cogvideox", "weights": str(tmp_path), "depth": 1, "heads": 2, "text": text, "null_text": "zeros"}
    config = parse(CogVideoXConfig, {**small, "shape": name})
    with torch.device("meta"):
        network = Transformer(config, 16, 8, 5, base=(13, 60, 90))
    (tmp_path / "transformer").mkdir()
    for other, published in PUBLISHED.items():
        (tmp_path / "transformer" / "config.json").write_text(json.dumps(published))
        alike = [RELEASED[each].get("positions") for each in (name, other)]
        later = [each.startswith("1.5") for each in (name, other)]
        if alike[0] == alike[1] and later[0] == later[1]:
            tuning.check_positions(network, str(tmp_path), "tuned")
        else:
            with pytest.raises(ConfigError, match=r"set stages\.tuned\."):
                tuning.check_positions(network, str(tmp_path), "tuned")


def test_a_step_can_be_estimated_before_the_folder_is_there(make: Make) -> None:
    keys = {
        **LORA,
        "weights_in": "bf16",
        "text": {"kind": "given", "width": 8, "length": 5},
        "null_text": "zeros",
        "lively": False,
    }
    batch = replace(clips(captions=False), text_embeds=torch.zeros(4, 5, 8))
    wanted = {name: p.shape for name, p in player_parameters(make(**keys), "model").items()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        task = make(weights="nowhere", **keys)
        found = player_parameters(task, "model")
        assert sorted(p.shape for p in found.values()) == sorted(wanted.values())
        task.loss("model", task(batch, NOISE)).total.sum.backward()
        assert all(p.grad is not None for p in found.values())
    with pytest.raises(InputError, match=r"weights=.*nowhere does not exist: give a diffusers folder"):
        make(weights="nowhere", **keys)


# Weights of another stage ----------------------------------------------------------------------------------------


def test_adapters_start_from_the_whole_weights_of_a_stage(make: Make) -> None:
    """q, k and v are one matrix there and three here; back again they are one."""
    source, task = make(), make(lively=False, **LORA)
    given = task.remap_init({name: value.clone() for name, value in task_state_dict(source).items()}, "init=x")
    load_weights(task, task_state_dict(task) | given)
    assert torch.allclose(source(clips(), NOISE).error, task(clips(), NOISE).error, rtol=1e-5)
    state = {name: value for name, value in task_state_dict(task).items() if ".lora_" not in name}
    again = make(lively=False, init="x")
    load_weights(again, again.remap_init(state, "init=y"))
    assert torch.equal(source(clips(), NOISE).error, again(clips(), NOISE).error)


def test_a_start_that_lacks_what_does_not_train_is_refused(make: Make, folder: Path) -> None:
    task, over_folder = make(**LORA), make(**LORA, weights=str(folder))
    with pytest.raises(InputError, match=r"init=x lacks .* such as patch_in\.weight.*weights=DIR"):
        task.remap_init(task_state_dict(over_folder), "init=x")
    with pytest.raises(
        InputError, match=r"init=x lacks 24 of 64 frozen tensors, such as blocks\.1\.norm1\.linear\.weight"
    ):
        task.remap_init(task_state_dict(make(depth=1)), "init=x")
    with pytest.raises(InputError, match=r"init=x has adapters, and tune=full has none: .*kineo export"):
        make().remap_init(task_state_dict(task), "init=x")
    assert over_folder.remap_init(task_state_dict(over_folder), "init=x").keys() == task_state_dict(over_folder).keys()


# Adapters by name ------------------------------------------------------------------------------------------------


def test_adapters_go_out_under_diffusers_names(make: Make) -> None:
    task = make(**LORA)
    stepped(task, ema=EmaConfig(decay=0))
    state = diffusers_weights.lora_state(task)
    assert "transformer_blocks.1.attn1.to_out.0.lora_B.weight" in state and len(state) == 16
    layer = task.network.blocks[1].attention.to_q
    assert torch.equal(state["transformer_blocks.1.attn1.to_q.lora_A.weight"], layer.lora_A["default"].weight)
