"""CogVideoX by the command: clips of several shapes, cached and resumed; latents shown; what a cache depends on; what would be lighter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from kineograph.core.batch import Prompts
from kineograph.core.capabilities import SupportsLatentSampling
from kineograph.core.config import parse
from kineograph.core.noise import Noise
from kineograph.family.cogvideox import CogVideoX, CogVideoXConfig, CogVideoXSample
from kineograph.train import checkpoint
from tests.run.calling import kineo

from .conftest import CAPTIONS, TINY, Make, ToyCodec

VAE = {
    "task": "causal_vae", "widths": [4, 4, 8], "layers": 1, "groups": 2, "latent_channels": 4, "norm": "frame", "perceptual": {"weight": 0},
    "train": {"steps": 2},
}  # fmt: skip
TEXT = {"kind": "learned", "width": 16, "depth": 1, "heads": 2, "length": 6}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """16 GIFs: wide and tall, of 5 and of 9 frames."""
    root = tmp_path / "clips"
    root.mkdir()
    random = np.random.default_rng(0)
    for number in range(16):
        size, count = [(24, 16), (16, 24)][number % 2], [5, 9][number // 2 % 2]
        start = random.integers(0, 100, (size[1], size[0], 3))
        frames = [Image.fromarray((start + 10 * t).astype(np.uint8)) for t in range(count)]
        frames[0].save(root / f"c{number:02}.gif", save_all=True, append_images=frames[1:], duration=125)
        (root / f"c{number:02}.txt").write_text(CAPTIONS[number % 4])
    return root


def config(place: Path, folder: Path, **generator: Any) -> str:
    tree = {
        "name": "shapes",
        "data": {
            "source": "folder", "folder": str(folder), "size": [16, 24], "frames": 9, "fps": 8, "validation": 0.25,
            "buckets": {"sizes": [[16, 24], [24, 16]], "frames": [5, 9]},
        },
        "train": {
            "steps": 8, "batch_size": 2, "warmup": 0, "workers": 0, "trackers": [], "device": "cpu", "sample_every": 0, "save_every": 100,
            "validate_every": 0, "compile": False,
        },
        "stages": {
            "vae": VAE,
            "generator": {"task": "cogvideox", "codec": "vae", **{k: v for k, v in TINY.items() if k != "codec"}, "text": TEXT, **generator},
        },
    }  # fmt: skip
    place.write_text(yaml.safe_dump(tree, sort_keys=False))
    return str(place)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.select(run / "generator" / "checkpoints").tensors("model")


@pytest.mark.parametrize("keys", [{}, {"first_frame": True, "image": {"noise": [0.0, 0.5]}}], ids=["text", "image"])
def test_clips_of_several_shapes_train_are_cached_and_resume(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    seen: list[tuple[int, ...]] = []
    predict = CogVideoX.predict
    monkeypatch.setattr(
        CogVideoX, "predict", lambda self, x, *rest: seen.append(x.shape[1:]) or predict(self, x, *rest)
    )
    file, whole, parts = config(tmp_path / "c.yaml", folder, **keys), tmp_path / "whole", tmp_path / "parts"
    assert kineo("train", file, "--run", str(whole)) == 0, capsys.readouterr().err
    # three widths: latents are a quarter as high, wide and (but for the first) long
    assert set(seen) == {(t, 4, h, w) for t in (2, 3) for h, w in ((4, 6), (6, 4))}
    assert kineo("train", file, "--run", str(parts), "stages.generator.train.steps=4") == 0
    assert kineo("cache", str(parts)) == 0, capsys.readouterr().err
    shapes = {np.load(path, mmap_mode="r").shape[1:] for path in parts.glob("generator/cache/pack-*/latents.npy")}
    assert shapes == {(t, 8, h, w) for t, _, h, w in set(seen)}  # mean and log-variance
    capsys.readouterr()
    assert kineo("train", file, "--run", str(parts), "stages.generator.train.steps=8") == 0, capsys.readouterr().err
    assert "cached items" in capsys.readouterr().err
    for name, value in weights(whole).items():  # the cache is in half precision
        torch.testing.assert_close(weights(parts)[name], value, atol=2e-3, rtol=0)
    report = json.loads((parts / "generator" / "buckets.json").read_text())
    assert len(report["buckets"]) == 4 and all(row["items"] for row in report["buckets"])


def test_16_bit_weights_with_8_bit_moments_resume_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    keys = {"weights_in": "bf16", "heads": 4, "train": {"optimizer": "adamw_8bit", "ema": {"decay": 0.9}}}
    file = tmp_path / "c.yaml"
    tree = yaml.safe_load(Path(config(file, tmp_path, **keys)).read_text())
    tree["data"] = {"source": "moving_digits", "size": 16, "frames": 5, "count": 20}
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert kineo("train", str(file), "--run", str(whole), "stages.generator.train.steps=4") == 0, (
        capsys.readouterr().err
    )
    assert kineo("train", str(file), "--run", str(parts), "stages.generator.train.steps=2") == 0
    assert kineo("train", str(file), "--run", str(parts), "stages.generator.train.steps=4") == 0
    one, two = (checkpoint.select(run / "generator" / "checkpoints") for run in (whole, parts))
    for kind in ("model", "optimizer", "ema"):
        assert all(torch.equal(value, two.tensors(kind)[name]) for name, value in one.tensors(kind).items())
    kinds = {value.dtype for value in one.tensors("optimizer").values()}
    assert kinds == {torch.int16, torch.int8, torch.uint8, torch.float32}
    names = [name for name in one.tensors("model") if name.startswith("network.")]
    assert {one.tensors("model")[name].dtype for name in names} == {torch.bfloat16}
    assert {one.tensors("ema")[name].dtype for name in names} == {torch.float32}


def test_a_learned_table_has_one_shape(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture) -> None:
    file = config(tmp_path / "c.yaml", folder, positions="rotary+learned")
    assert kineo("train", file, "--run", str(tmp_path / "run")) == 2
    assert "stages.generator.data.buckets=null" in capsys.readouterr().err


def test_a_clip_goes_on_by_the_command(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was shown the beginnings of clips reads the one that it is given."""
    seen: list[torch.Tensor] = []
    predict = CogVideoX.predict

    def seeing(
        self: CogVideoX, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, image: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        seen.append(image.flatten(2).any(-1).sum(1))  # latent frames that each row is shown
        return predict(self, x, t, text, image, *rest)

    monkeypatch.setattr(CogVideoX, "predict", seeing)
    keys = {"first_frame": True, "image": {"clip": 0.5, "dropout": 0.0}}
    file, run = config(tmp_path / "c.yaml", folder, **keys), tmp_path / "run"
    assert kineo("train", file, "--run", str(run)) == 0, capsys.readouterr().err
    assert set(torch.cat(seen).tolist()) == {1, 2}  # of three
    seen.clear()
    prime, out = folder / "c02.gif", tmp_path / "out"
    assert kineo("sample", str(run), "a red one", "--prime", str(prime), "--steps", "2", "--out", str(out)) == 0, (
        capsys.readouterr().err
    )
    assert set(torch.cat(seen).tolist()) == {2}  # five of its frames
    assert len(list(out.glob("*.gif"))) == 1


def test_latents_are_what_is_decoded(make: Make) -> None:
    task = make().eval()
    assert isinstance(task, SupportsLatentSampling)
    asked, options = Prompts(Noise.for_rows(1, 0, 2), captions=CAPTIONS[:2]), CogVideoXSample(steps=3)
    found = task.sample_latents(asked, options)
    assert found.shape == (2, 3, 4, 4, 4)
    assert torch.equal(ToyCodec().decode(found), task.sample(asked, options))


# What a cache depends on, and what would be lighter --------------------------------------------------------------


def stage(folder: Path, **keys: Any) -> CogVideoXConfig:
    tree = {"task": "cogvideox", "weights": str(folder), "text": {"kind": "t5", "length": 6}, **keys}
    return parse(CogVideoXConfig, tree)


def test_a_cache_knows_the_files_that_made_it(tmp_path: Path) -> None:
    for part in ("vae", "text_encoder", "transformer"):
        (tmp_path / "one" / part).mkdir(parents=True)
        (tmp_path / "one" / part / "config.json").write_text("{}")
        (tmp_path / "one" / part / "model.safetensors").write_bytes(bytes(range(256)) * 8192)  # 2 MiB
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    facts = CogVideoX.cache_facts(stage(tmp_path / "one"))
    assert facts == CogVideoX.cache_facts(stage(tmp_path / "two"))  # content, not place
    assert facts != CogVideoX.cache_facts(stage(tmp_path / "one", first_frame=True))
    (tmp_path / "two" / "transformer" / "config.json").write_text("other")
    assert facts == CogVideoX.cache_facts(stage(tmp_path / "two"))  # no part in latents
    for part in ("vae", "text_encoder"):
        changed = CogVideoX.cache_facts(stage(tmp_path / "two"))
        with (tmp_path / "two" / part / "model.safetensors").open("r+b") as file:
            file.seek(1_000_000)
            file.write(b"\xff" * 4096)
        assert CogVideoX.cache_facts(stage(tmp_path / "two")) != changed
    assert CogVideoX.cache_facts(stage(tmp_path / "nowhere"))["vae"] is None


def test_what_would_be_lighter() -> None:
    folder = Path("released")
    assert CogVideoX.memory_savers(stage(folder)) == {"weights_in": "bf16", "tune": "lora"}
    assert CogVideoX.memory_savers(stage(folder, weights_in="bf16", tune="lora")) == {}
    assert CogVideoX.memory_savers(parse(CogVideoXConfig, {"task": "cogvideox", **TINY})) == {"weights_in": "bf16"}
