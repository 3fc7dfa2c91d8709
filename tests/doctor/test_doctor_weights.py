"""`kineo doctor` on what others trained: it counts, also where it is not here yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kineograph.core.errors import InputError
from kineograph.run.dry_run import examine
from tests.doctor.test_doctor import TREE, estimated


def encoder(name: Path | str, width: int = 16, device: str = "cpu") -> Any:
    from kineograph.text.config import TextConfig
    from kineograph.text.pretrained import PretrainedText

    with torch.device(device):
        return PretrainedText(TextConfig(kind="t5", name=str(name), width=width), print)


def test_the_memory_of_a_text_encoder_counts_unless_captions_are_cached(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    from kineograph.doctor.step_trace import encoder_bytes

    config = T5Config(vocab_size=32128, d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu")  # fmt: skip
    model = T5EncoderModel(config).half()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    parameters = sum(p.numel() for p in model.parameters())
    task = torch.nn.ModuleList([encoder(tmp_path, 512)])
    assert (
        encoder_bytes(task) == 2 * parameters and encoder_bytes(task, 4) == 4 * parameters
    )  # however the files keep them
    absent = torch.nn.ModuleList([encoder(tmp_path / "yet-to-come", 512, device="meta")])
    assert encoder_bytes(absent) == 2 * parameters  # as every T5 of that width has
    assert encoder(tmp_path / "yet-to-come", 4096, device="meta").count() == 4_762_310_656  # xxl
    (tmp_path / "model.safetensors").unlink()
    assert (
        encoder_bytes(torch.nn.ModuleList([encoder(tmp_path, 512, device="meta")])) == 2 * parameters
    )  # a folder that is half there
    memory = replace(estimated(TREE)[1].memory, text=1000)
    assert memory.total == estimated(TREE)[1].memory.total + 1000


def test_an_encoder_that_must_be_there_and_is_not(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        encoder(tmp_path / "none")


def test_a_folder_of_weights_that_is_yet_to_come_is_estimated_wherever_it_will_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "small.yaml"
    text = {"kind": "t5", "width": 512, "length": 4, "padding": "read"}
    stage = {
        "task": "cogvideox",
        "weights": str(tmp_path / "none"),
        "tune": "lora",
        "depth": 1,
        "heads": 1,
        "text": text,
    }
    data = {"source": "folder", "size": 16, "frames": 1}
    path.write_text(yaml.safe_dump({"data": data, "train": {"batch_size": 1}, "stages": {"only": stage}}))
    examine([str(path)], memory=0.5)
    found = capsys.readouterr().out
    assert "MISSING" in found and "text encoder" in found and "kineo cache beforehand" in found


def test_a_critic_is_estimated_with_the_text_encoder_of_its_generator(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "critic.yaml"
    tokenizer = {"task": "vqgan", "width": 8, "multipliers": [1, 2], "perceptual": {"weight": 0}}
    shape = {"width": 32, "depth": 1, "heads": 2}
    text = {"kind": "t5", "name": str(tmp_path / "none"), "width": 512, "length": 4}
    stages = {
        "tokenizer": tokenizer,
        "generator": {"task": "muse", "codec": "tokenizer", "text": text, **shape},
        "critic": {"task": "muse.critic", "generator": "generator", **shape},
    }
    data = {"source": "folder", "size": 16}
    path.write_text(yaml.safe_dump({"data": data, "train": {"batch_size": 2}, "stages": stages}, sort_keys=False))
    examine([str(path)], memory=8)
    _, found = capsys.readouterr().out.split("critic: MuseCritic")
    assert "text encoder" in found
