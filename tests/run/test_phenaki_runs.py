"""Phenaki's stages through the public command: what a person may ask of them, and what they are told where it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kineograph as kg
from kineograph.codec.perceptual import Lpips
from kineograph.core.errors import InputError
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
    monkeypatch.setattr("kineograph.run.show.draw_curves", lambda *files: None)


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
        assert line["perceptual"] > 0 and line["adversarial_weight"] > 0


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
