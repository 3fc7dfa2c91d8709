"""Phenaki's stages through the public command: what a person may ask of them, and what they are told where it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import kineograph as kg
from kineograph.codec.perceptual import Lpips
from kineograph.core.config_file import read_yaml
from kineograph.core.errors import InputError
from kineograph.family.phenaki.sampling import WindowSampler
from kineograph.stage.spec import read_stage
from kineograph.train import checkpoint
from tests.run.calling import kineo, written

TOKENIZER: dict[str, Any] = {
    "task": "cvivit", "width": 8, "heads": 2, "spatial_depth": 1, "temporal_depth": 1, "patch": 8, "temporal_patch": 2,
    "quantizer": {"kind": "fsq", "levels": [5, 5]}, "perceptual": {"weight": 0},
}  # fmt: skip
GENERATOR: dict[str, Any] = {
    "task": "phenaki", "codec": "tokenizer", "width": 8, "depth": 1, "heads": 2,
    "text": {"kind": "learned", "width": 8, "depth": 1, "heads": 2, "length": 8}, "sample": {"steps": 2},
}  # fmt: skip
BASE: dict[str, Any] = {
    "data": {"source": "moving_digits", "size": 16, "frames": 5, "glyphs": 2, "channels": 1, "count": 40},
    "train": {
        "steps": 2, "batch_size": 2, "log_every": 1, "save_every": 2, "validate_every": 0, "sample_every": 0, "workers": 0,
        "warmup": 0, "trackers": [], "device": "cpu",
    },
    "stages": {"tokenizer": TOKENIZER},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


def write(folder: Path, *changes: dict[str, Any]) -> Path:
    return written(folder, BASE, *changes)


def logged(run: Path, stage: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["stage"] == stage and line["split"] == "train"]


def test_a_tokenizer_with_all_its_losses_trains_by_command(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {name: value.abs() for name, value in Lpips("alexnet").state_dict().items()}
    save_file(weights, tmp_path / "lpips.safetensors")
    judged = {
        "perceptual": {"weight": 1.0, "weights": str(tmp_path / "lpips.safetensors"), "frames": 2},
        "adversarial": {"width": 4, "levels": 2},
    }
    config = write(tmp_path, {"data": {"size": [32, 48], "stills": 0.5}, "stages": {"tokenizer": judged}})
    assert kineo("train", config, "--run", tmp_path / "run") == 0
    for line in logged(tmp_path / "run", "tokenizer"):
        assert line["perceptual"] > 0 and line["adversarial_weight"] >= 0 and line["discriminator/hinge"] > 0


class Clips(torch.utils.data.Dataset):
    """Clips with text embeddings of 6 channels, or with captions alone."""

    def __init__(self, embedded: bool = True) -> None:
        self.embedded = embedded

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return torch.rand(5, 1, 16, 16), torch.rand(3, 6) if self.embedded else "a ball"


@pytest.mark.parametrize(
    ("dataset", "width", "message"),
    [
        (
            Clips(),
            8,
            r"stage generator .*text\.width=8.*item-\d+ have 6 channels: set stages\.generator\.text\.width=6",
        ),
        (Clips(embedded=False), 6, r"stage generator .*data\.source=dataset have none: give them as text_embeds"),
    ],
)
def test_text_embeddings_are_looked_at_before_the_tokenizer_trains(
    tmp_path: Path, dataset: Clips, width: int, message: str
) -> None:
    given = GENERATOR | {"text": {"kind": "given", "width": width, "length": 3}}
    config = write(tmp_path, {"stages": {"generator": given}})
    with pytest.raises(InputError, match=message):
        kg.train(config, dataset=dataset, run=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_text_encoder_that_cannot_be_had_is_told_before_the_tokenizer_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    def unreachable(*given: Any, **named: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    t5 = GENERATOR | {"text": {"kind": "t5", "name": "some-owner/some-t5", "width": 8, "length": 4}}
    config = write(tmp_path, {"stages": {"generator": t5}})
    assert kineo("train", config, "--run", tmp_path / "run") == 2
    assert (
        "stages.generator.text.name=some-owner/some-t5 cannot be loaded as t5: no network; give a local folder"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_critics_steer_only_where_something_trained_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage whose `init` holds no critic has none, is asked for nothing of one, and a critic's stage draws as its generator does."""
    plain = GENERATOR | {"sample": {"steps": 2, "guidance": 1.5, "temperature": 0.25}}
    tuned = plain | {"init": "generator", "critic": "self", "only": "generator"}
    judge = {"task": "phenaki.critic", "generator": "tuned", "width": 8, "depth": 1, "heads": 2}
    changes = {"stages": {"generator": plain, "tuned": tuned, "critic": judge | {"sample": {"temperature": 0.5}}}}
    run = tmp_path / "run"
    assert kineo("train", write(tmp_path, changes), "--run", run) == 0
    assert "stages.tuned.init=generator has no critic=self of this shape: clips are" in capsys.readouterr().err
    tuned_weights = checkpoint.select(run / "tuned" / "checkpoints").weights()
    assert tuned_weights and not any(name.startswith("critic") for name in tuned_weights)

    saved = read_yaml((run / "config.yaml").read_text(), "config.yaml")["stages"]
    expected = saved["generator"]["sample"] | {"temperature": 0.5}
    assert saved["critic"]["sample"] == expected and expected["guidance"] == 1.5

    seen: list[bool] = []

    def watched(self: Any, grid: Any) -> Any:
        found = make_critic(self, grid)
        seen.append(found is not None)
        return found

    make_critic = WindowSampler.make_critic
    monkeypatch.setattr(WindowSampler, "make_critic", watched)
    for stage in ("tuned", "critic"):
        assert kineo("sample", run, "a 3 moves left", "--stage", stage, "--out", tmp_path / stage) == 0
    assert seen == [False, True]

    ask = ("sample", run, "a 3 moves left", "--out", tmp_path / "x", "--set", "sample.critic_noise=2")
    capsys.readouterr()
    assert kineo(*ask, "--stage", "generator") == 2
    told = "sample.critic_noise=2.0 has no effect without a critic: remove it"
    assert told in capsys.readouterr().err
    assert kineo(*ask, "--stage", "critic") == 0


def test_a_critics_stage_uses_its_critic_though_its_generator_draws_without_one() -> None:
    generator = GENERATOR | {"critic": "self", "sample": {"steps": 3, "critic": False}}
    judge = {"task": "phenaki.critic", "generator": "generator", "width": 8, "depth": 1, "heads": 2}
    tree = {**BASE, "stages": {"generator": generator, "critic": judge}}
    assert read_stage(tree, "generator").config.sample.critic is False  # type: ignore[attr-defined]
    found = read_stage(tree, "critic").config.sample  # type: ignore[attr-defined]
    assert (found.steps, found.critic) == (3, True)
    other = read_stage(
        {
            **tree,
            "stages": {"generator": generator | {"sample": {"overlap": 1}}, "critic": judge | {"task": "muse.critic"}},
        },
        "critic",
    )
    assert "overlap" not in type(other.config.sample).model_fields  # type: ignore[attr-defined]


def test_a_critic_of_another_runs_generator_draws_as_that_one(tmp_path: Path) -> None:
    config = write(tmp_path, {"stages": {"generator": GENERATOR | {"sample": {"steps": 3, "guidance": 1.5}}}})
    assert kineo("train", config, "--run", tmp_path / "first") == 0
    judge = {"task": "phenaki.critic", "generator": f"{tmp_path}/first/generator", "width": 8, "depth": 1, "heads": 2}
    alone = {**BASE, "stages": {"critic": judge | {"sample": {"steps": 2}}}}
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump(alone))
    again = ("train", tmp_path / "alone.yaml", "--run", tmp_path / "second")
    assert kineo(*again) == 0
    sample = read_yaml((tmp_path / "second/config.yaml").read_text(), "config.yaml")["stages"]["critic"]["sample"]
    assert (sample["steps"], sample["guidance"]) == (2, 1.5)
    assert kineo(*again) == 0  # the same command goes on
