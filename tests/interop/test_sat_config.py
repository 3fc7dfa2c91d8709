"""`kineo import FILE --from sat-config`: every key of a SAT config is translated or named; what is printed is a valid config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kineograph import cli
from kineograph.core.config import Tree, flatten
from kineograph.core.config_file import load_file, read_yaml
from kineograph.core.errors import InputError
from kineograph.interop.key_translation import KeyTranslation, flatten_lists
from kineograph.interop.sat_config import _Translator, translate
from kineograph.run.plan import make_plan

SAT = Path(__file__).parent / "sat"
TRAIN, MODEL = SAT / "train.yaml", SAT / "model_5b_lora.yaml"
KEYS = {path: flatten_lists(load_file(path)) for path in (TRAIN, MODEL)}
LEFT = re.compile(r"^# not translated: (\S+) = (.*)$", re.MULTILINE)


def left(text: str) -> dict[str, str]:
    return dict(LEFT.findall(text))


def ours(*files: Path) -> Any:
    return read_yaml(translate(files), "it")


def changed(tmp_path: Path, source: Path, changes: dict[str, Any]) -> Path:
    """A copy of a file with dotted keys set (or with None removed)."""
    tree = load_file(source)
    for key, value in changes.items():
        place: Tree = tree
        *path, last = key.split(".")
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    file = tmp_path / source.name
    file.write_text(yaml.safe_dump(tree))
    return file


def test_training_is_translated() -> None:
    found = ours(TRAIN, MODEL)
    assert found["name"] == "My-clips-LoRA" and found["seed"] == 7
    assert found["train"] == {
        "steps": 1200, "log_every": 25, "save_every": 300, "workers": 6, "checkpointing": True, "clip": 0.1, "lr": 2e-4,
        "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-4, "validate_every": 150, "sample_every": 150, "validation_samples": 6,
        "batch_size": 8, "accumulate": 4, "precision": "bf16", "format": "mp4", "schedule": "linear", "warmup": 100,
        "show": "latents", "ema": {"decay": 0},
    }  # fmt: skip
    assert found["data"] == {
        "source": "folder", "folder": "clips", "size": [320, 480], "fps": 8, "frames": 33, "validation": 0.1, "test": 0.1,
        "skip_frames": 3, "validation_folder": "clips-held-out",
    }  # fmt: skip


def test_validation_on_the_training_folder(tmp_path: Path) -> None:
    """As in SAT's own sft.yaml."""
    file = changed(tmp_path, TRAIN, {"args.valid_data": ["clips"], "args.split": "1,0,0"})
    data = ours(file, MODEL)["data"]
    assert data["validation"] == 0.0 and "validation_folder" not in data


def test_the_model_is_translated() -> None:
    stage = ours(TRAIN, MODEL)["stages"]["generator"]
    assert stage == {
        "task": "cogvideox",
        "shape": "5b",
        "weights": "released",
        "weights_in": "bf16",
        "text": {"length": 226, "name": "weights/t5-v1_1-xxl", "kind": "t5", "padding": "read"},
        "caption_dropout": 0.2,
        "diffusion": {"steps": 1000, "schedule": "scaled_linear", "zero_terminal": True, "objective": "v", "shift": 1.0},
        "sample": {"steps": 40, "guidance": 6, "solver": "dpm_solver_sde", "guidance_schedule": "cosine"},
        "tune": "lora",
        "lora": {"rank": 128, "alpha": 1},
    }  # fmt: skip


def test_the_learning_rate_falls_as_it_does_there(tmp_path: Path) -> None:
    """What no file says is SAT's own default: linear to 0 after a hundredth of the steps."""

    def train(**changes: Any) -> Tree:
        found = ours(changed(tmp_path, TRAIN, {f"args.{key}": value for key, value in changes.items()}))["train"]
        return {key: found[key] for key in ("schedule", "final_lr", "warmup") if key in found}

    assert train() == {"schedule": "linear", "warmup": 100}  # those of a fine-tuning
    assert train(mode="pretrain") == {"schedule": "linear", "warmup": 12}
    assert train(warmup=0.25) == {"schedule": "linear", "warmup": 300}
    assert train(lr_decay_style="constant") == {"schedule": "constant", "warmup": 100}
    assert train(lr_decay_style="cosine") == {"schedule": "cosine", "final_lr": 0.1, "warmup": 100}
    assert train(lr_decay_style="cosine", lr_decay_ratio=0.2)["final_lr"] == 0.2
    strange = changed(tmp_path, TRAIN, {"args.lr_decay_style": "exponential"})
    assert "schedule" not in ours(strange)["train"] and left(translate([strange]))["args.lr_decay_style"]


def test_frozen_weights_are_kept_as_there(tmp_path: Path) -> None:
    """Under adapters alone: what is trained is kept in float32 on both sides."""
    assert ours(TRAIN, MODEL)["stages"]["generator"]["weights_in"] == "bf16"
    halves = changed(tmp_path, TRAIN, {"deepspeed.bf16.enabled": False, "deepspeed.fp16.enabled": True})
    assert "weights_in" not in ours(halves, MODEL)["stages"]["generator"]
    whole = changed(tmp_path, MODEL, {"model.network_config.params.modules.lora_config": None})
    assert "weights_in" not in ours(TRAIN, whole)["stages"]["generator"]


def test_what_is_printed_is_a_config_that_a_run_can_have() -> None:
    plan = make_plan(ours(TRAIN, MODEL))
    config = plan.stages[0].spec.config
    assert (config.depth, config.heads, config.width) == (42, 48, 3072)  # type: ignore[attr-defined]


def test_adapters_without_a_word_on_what_they_stand_on_refer_to_the_released_folder() -> None:
    """The model's file alone: what SAT would load stands in the other one."""
    stage = ours(MODEL)["stages"]["generator"]
    assert stage["tune"] == "lora" and stage["weights"] == "released"


def test_nothing_is_dropped_in_silence() -> None:
    """Every key is either used up (then changing it changes what is printed, or leaves the key untranslated) or listed."""
    text = translate([TRAIN, MODEL])
    listed = left(text)
    assert {
        "args.no_load_rng",
        "args.save",
        "deepspeed.optimizer.type",
    } < listed.keys()
    assert listed["deepspeed.zero_optimization.stage"] == "2"
    everything = KEYS[TRAIN] | KEYS[MODEL]
    assert listed.keys() < everything.keys()
    assert "weights/CogVideoX-5b-sat --from sat" in text  # how to come by the weights of args.load


@pytest.mark.parametrize("key", [key for keys in KEYS.values() for key in keys])
def test_every_key_makes_a_difference(key: str) -> None:
    """A word that no key can mean shows in what is printed: in its place, or as not translated."""
    keys = KeyTranslation({})
    keys.left = KEYS[TRAIN] | KEYS[MODEL] | {key: "strange-word"}
    _Translator(keys).translate()
    printed = [*flatten(keys.ours).values(), *keys.left.values()]
    assert "strange-word" in printed or any("strange" in line for line in keys.remarks)


def test_a_two_billion_model_with_sines(tmp_path: Path) -> None:
    place = "model.network_config.params"
    file = changed(tmp_path, MODEL, {
        f"{place}.num_layers": 30, f"{place}.num_attention_heads": 30, f"{place}.hidden_size": 1920, "model.scale_factor": 1.15258426,
        f"{place}.modules.lora_config": None, "model.not_trainable_prefixes": None,
        f"{place}.modules.pos_embed_config": {
            "target": "dit_video_concat.Basic3DPositionEmbeddingMixin",
            "params": {"text_length": 226, "height_interpolation": 1.875, "width_interpolation": 1.875},
        },
        **{f"model.{part}.discretization_config.params.shift_scale": 3.0 for part in (
            "denoiser_config.params", "loss_fn_config.params.sigma_sampler_config.params", "sampler_config.params")},
    })  # fmt: skip
    stage = ours(TRAIN, file)["stages"]["generator"]
    assert stage["shape"] == "2b" and stage["diffusion"]["shift"] == 3.0 and "tune" not in stage


def test_a_model_of_ones_own_size(tmp_path: Path) -> None:
    place = "model.network_config.params"
    file = changed(tmp_path, MODEL, {f"{place}.num_layers": 12, f"{place}.latent_width": 60})
    stage = ours(TRAIN, file)["stages"]["generator"]
    assert "shape" not in stage
    assert (stage["depth"], stage["heads"], stage["head_width"], stage["base_size"]) == (12, 48, 64, [60, 60])


def test_image_to_video_of_the_later_model(tmp_path: Path) -> None:
    place = "model.network_config.params"
    file = changed(tmp_path, MODEL, {
        "model.noised_image_input": True, "model.noised_image_dropout": 0.1, f"{place}.in_channels": 32, f"{place}.ofs_embed_dim": 512,
        f"{place}.patch_size": [2, 2, 2], f"{place}.num_frames": 81, f"{place}.latent_width": 300, f"{place}.latent_height": 300,
        f"{place}.modules.pos_embed_config.params.text_length": 224,
        "model.conditioner_config.params.emb_models.0.params.max_length": 224,
    })  # fmt: skip
    stage = ours(TRAIN, file)["stages"]["generator"]
    assert stage["shape"] == "1.5-5b-i2v" and stage["image"] == {"dropout": 0.1} and stage["text"]["length"] == 224


def test_from_nothing_on_a_trained_vae(tmp_path: Path) -> None:
    """Without args.load the transformer starts from nothing; the VAE never does."""
    model = changed(tmp_path, MODEL, {"model.network_config.params.modules.lora_config": None})
    text = translate([changed(tmp_path, TRAIN, {"args.load": None}), model])
    stage = read_yaml(text, "it")["stages"]["generator"]
    assert stage["codec"] == "runs/sat/vae" and not stage.get("weights")
    assert "weights/CogVideoX-5b-sat --from sat" in text


def test_differences_that_cannot_be_had_stay_listed(tmp_path: Path) -> None:
    place = "model.sampler_config.params"
    listed = left(translate([TRAIN, changed(tmp_path, MODEL, {
        f"{place}.guider_config.params.exp": 3, f"{place}.discretization_config.params.shift_scale": 2.0,
        "model.first_stage_config.params.encoder_config.params.ch": 64, "model.scale_factor": 0.5,
    })]))  # fmt: skip
    assert listed[f"{place}.guider_config.params.exp"] == "3"
    assert listed["model.first_stage_config.params.encoder_config.params.ch"] == "64"
    assert listed["model.scale_factor"] == "0.5"
    assert any("shift_scale" in key for key in listed)


def test_a_file_of_training_alone(tmp_path: Path) -> None:
    found = ours(TRAIN)
    assert found["train"]["steps"] == 1200 and "stages" not in found


def test_strangers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("stages: {}\n")
    with pytest.raises(InputError, match="not a config of SAT"):
        translate([tmp_path / "other.yaml"])


def test_the_command_prints_it(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["import", str(TRAIN), str(MODEL), "--from", "sat-config"])
    assert end.value.code == 0
    make_plan(read_yaml(capsys.readouterr().out, "it"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as end:
        cli.main(["import", str(TRAIN), "--from", "sat-config", "--run", "x"])
    assert end.value.code == 2
