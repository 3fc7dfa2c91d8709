"""Every kind of Muse run through the public command: super-resolution, critics, unconditional, cache, own data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import kineograph as kg
from kineograph.core.run_folder import RunFolder
from kineograph.stage.load import StageLoader
from kineograph.train import checkpoint
from tests.run.calling import kineo, written

TOKENIZER: dict[str, Any] = {
    "task": "vqgan", "width": 8, "multipliers": [1, 2], "patch": 2, "quantizer": {"kind": "fsq", "levels": [5, 5]}, "perceptual": {"weight": 0},
}  # fmt: skip
GENERATOR: dict[str, Any] = {
    "task": "muse", "codec": "tokenizer", "width": 32, "depth": 1, "heads": 2, "text": {"kind": "learned", "width": 16, "depth": 1, "length": 16},
    "sample": {"steps": 4},
}  # fmt: skip
BASE: dict[str, Any] = {
    "seed": 1,
    "data": {"source": "moving_digits", "size": 16, "frames": 1, "glyphs": 2},
    "train": {
        "steps": 4, "batch_size": 4, "log_every": 1, "save_every": 4, "validate_every": 4, "validation_samples": 4,
        "sample_every": 4, "samples": 2, "workers": 0, "warmup": 1, "trackers": [], "device": "cpu",
    },
    "stages": {"tokenizer": TOKENIZER, "generator": GENERATOR},
}  # fmt: skip


def write(folder: Path, *changes: dict[str, Any]) -> Path:
    return written(folder, BASE, *changes)


def weights(run: Path, stage: str) -> dict[str, torch.Tensor]:
    return checkpoint.select(run / stage / "checkpoints").tensors("model")


@pytest.mark.slow
def test_super_resolution_from_the_base_generator(tmp_path: Path) -> None:
    stages = {
        "tokenizer_32": TOKENIZER | {"data": {"size": 32}},
        "superres": GENERATOR | {"codec": "tokenizer_32", "low_res": "generator", "data": {"size": 32}},
    }
    run = tmp_path / "run"
    assert kineo("train", write(tmp_path, {"stages": stages}), "--run", run) == 0
    assert kineo("sample", run, "a red 3 at the top left", "--out", tmp_path / "out") == 0
    (picture,) = [path for path in (tmp_path / "out").glob("*.png") if "grid" not in path.name]
    assert Image.open(picture).size == (32, 32)


@pytest.mark.parametrize("kind", [pytest.param("separate", marks=pytest.mark.slow), "self"])
def test_critics(tmp_path: Path, kind: str) -> None:
    critic = {
        "task": "muse.critic",
        "generator": "generator",
        "width": 32,
        "depth": 1,
        "heads": 2,
        "sample": {"steps": 4},
    }
    change = {"stages": {"critic": critic} if kind == "separate" else {"generator": {"critic": "self"}}}
    run = tmp_path / "run"
    config = write(tmp_path, change)
    assert kineo("train", config, "--run", run, "train.save_first=true") == 0
    stage = "critic" if kind == "separate" else "generator"
    before = checkpoint.checkpoint_at(run / stage / "checkpoints", 0).tensors("model")
    after = weights(run, stage)
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert any("score" in name if kind == "separate" else "critic" in name for name in moved)
    drawn = kg.load(run, device="cpu")
    with_critic = drawn.sample(["a red 3 at the top left"] * 2, seed=1).pixels
    assert with_critic.shape == (2, 1, 3, 16, 16)
    if kind == "separate":
        without = kg.load(run, device="cpu", stage="generator").sample(["a red 3 at the top left"] * 2, seed=1).pixels
        assert not torch.equal(with_critic, without)


def test_unconditional_on_bare_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    data = {"data": {"source": "folder", "folder": str(folder), "size": 16}}
    config = write(tmp_path, {"stages": {"generator": {"text": None}}})
    tree = yaml.safe_load(config.read_text())
    tree["data"] = data["data"]
    tree["stages"]["generator"]["text"] = {"kind": "none"}
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    run = tmp_path / "run"
    assert kineo("train", config, "--run", run) == 0
    assert kineo("sample", run, "--count", "3", "--out", tmp_path / "out") == 0
    assert len(list((tmp_path / "out").glob("unconditional-*.png"))) == 3
    assert len(json.loads((run / "generator/samples/step-00000004/prompts.json").read_text())) == 2


def test_captions_are_asked_for_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (20, 20)).save(folder / "a.png")
    Image.new("RGB", (20, 20)).save(folder / "b.png")
    tree = yaml.safe_load(write(tmp_path).read_text())
    tree["data"] = {"source": "folder", "folder": str(folder), "size": 16}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    assert kineo("train", tmp_path / "run.yaml", "--run", tmp_path / "run") == 2
    assert "caption" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_training_from_the_cache_is_training_from_pixels(tmp_path: Path) -> None:
    config = write(tmp_path, {"data": {"count": 32}, "train": {"sample_every": 0}})
    pixels, cached = tmp_path / "pixels", tmp_path / "cached"
    assert kineo("train", config, "--run", pixels) == 0
    assert kineo("train", config, "--run", cached, "stages.generator.cache=true") == 0
    (header,) = (cached / "generator" / "cache").glob("pack-*/cache.json")
    assert json.loads(header.read_text())["done"] == 32
    for name, value in weights(pixels, "generator").items():
        assert torch.allclose(value, weights(cached, "generator")[name], atol=1e-6), name
    # The command alone makes the same cache, and training then finds it.
    third = tmp_path / "third"
    assert kineo("train", config, "--run", third, "stages.generator.skip=true") == 0
    assert kineo("cache", third) == 2  # its one stage with a codec is skipped
    fourth = tmp_path / "fourth"
    assert kineo("train", config, "--run", fourth) == 0
    assert kineo("cache", fourth) == 0
    assert len(list((fourth / "generator" / "cache").glob("pack-*/tokens.npy"))) == 1


def test_endless_data_cannot_be_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kineo("train", write(tmp_path), "--run", tmp_path / "run", "stages.generator.cache=true") == 2
    assert "data.count" in capsys.readouterr().err


class Squares(torch.utils.data.Dataset):
    """A user's own dataset: float pictures and their captions, in no dict."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        picture = torch.zeros(3, 16, 16)
        picture[index % 3, 4:12, 4:12] = 1.0
        return picture, f"a {('red', 'green', 'blue')[index % 3]} square"


def test_python_api_with_a_users_dataset(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    tree = yaml.safe_load(write(tmp_path).read_text())
    tree["data"] = {"size": 16}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    run = kg.train(
        str(tmp_path / "run.yaml"),
        dataset=Squares(),
        run=tmp_path / "run",
        on_log=heard.append,
        quiet=True,
        **{"train.lr": 1e-3},
    )
    assert {record["stage"] for record in heard} == {"tokenizer", "generator"}
    assert [record["step"] for record in heard if record["stage"] == "generator" and record["split"] == "train"] == [
        1,
        2,
        3,
        4,
    ]
    drawn = kg.load(run, device="cpu").sample(["a red square"], count=2)
    assert drawn.pixels.shape == (2, 1, 3, 16, 16)


class Encoded(torch.utils.data.Dataset):
    """The squares as codebook ids, told apart from their captions by type."""

    def __init__(self, codec: Any) -> None:
        self.rows = []
        for index in range(24):
            picture, caption = Squares()[index]
            self.rows.append((caption, codec.encode(picture[None, None])[0, 0]))  # h w

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]:
        return self.rows[index]


def test_codebook_ids_of_a_users_own_train_what_their_pixels_train(tmp_path: Path) -> None:
    tree = yaml.safe_load(write(tmp_path).read_text())
    tree["data"] = {"size": 16}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    pixels = kg.train(str(tmp_path / "run.yaml"), dataset=Squares(), run=tmp_path / "pixels", quiet=True)
    codec = StageLoader(RunFolder(pixels)).load("tokenizer")
    tree["stages"] = {"generator": tree["stages"]["generator"] | {"codec": f"{pixels}/tokenizer"}}
    (tmp_path / "ids.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    ids = kg.train(str(tmp_path / "ids.yaml"), dataset=Encoded(codec), run=tmp_path / "ids", quiet=True)
    for name, value in weights(pixels, "generator").items():
        assert torch.allclose(value, weights(ids, "generator")[name], atol=1e-6), name
    listed = json.loads((ids / "generator/samples/step-00000004/prompts.json").read_text())
    assert len(listed) == 2 and all(row["prompt"].endswith("square") for row in listed)
    assert kg.load(ids, device="cpu").sample(["a red square"]).pixels.shape == (1, 1, 3, 16, 16)


@pytest.mark.slow
def test_warm_start_and_another_runs_codec(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert kineo("train", write(tmp_path), "--run", first) == 0
    tree = yaml.safe_load(write(tmp_path).read_text())
    del tree["stages"]["tokenizer"]
    tree["stages"]["generator"] |= {"codec": f"{first}/tokenizer", "init": f"{first}/generator"}
    (tmp_path / "second.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    assert (
        kineo("train", tmp_path / "second.yaml", "--run", second, "train.steps=1", "train.lr=0", "train.weight_decay=0")
        == 0
    )
    old = checkpoint.select(first / "generator" / "checkpoints").weights()
    assert all(torch.equal(value, old[name]) for name, value in weights(second, "generator").items())
    assert kineo("sample", second, "a blue 5 at the centre", "--out", tmp_path / "out") == 0


def test_non_finite_data_ends_the_run_with_a_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = kineo(
        "train",
        write(tmp_path),
        "--run",
        tmp_path / "run",
        "train.lr=1e9",
        "train.clip=null",
        "train.steps=40",
        "train.max_nonfinite=3",
    )
    message = capsys.readouterr().err
    assert code == 1 and "not finite" in message and "train.lr" in message and "Traceback" not in message


def test_another_kind_takes_the_old_ones_keys_with_it(tmp_path: Path) -> None:
    words = [
        "stages.generator.text.kind=none",
        "stages.tokenizer.quantizer.codes=64",
        "stages.tokenizer.quantizer.kind=vq",
    ]
    run = tmp_path / "run"
    assert kineo("train", write(tmp_path), "--run", run, *words) == 0
    stages = yaml.safe_load((run / "config.yaml").read_text())["stages"]
    assert stages["tokenizer"]["quantizer"]["codes"] == 64 and "levels" not in stages["tokenizer"]["quantizer"]
    assert stages["generator"]["text"]["kind"] == "none"


def test_prompts_that_a_model_cannot_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert kineo("train", write(tmp_path), "--run", run, "stages.generator.text.kind=none", "train.sample_every=0") == 0
    assert kineo("sample", run, "a cat", "--out", tmp_path / "out") == 2
    assert "without captions" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_codec_that_was_trained_on_after_its_generator_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = write(tmp_path, {"train": {"sample_every": 0}}), tmp_path / "run"
    assert kineo("train", config, "--run", run) == 0
    assert kineo("train", config, "--run", run, "stages.tokenizer.train.steps=6") == 0
    assert "older weights of tokenizer" in capsys.readouterr().err
    assert kineo("sample", run, "a red 3 at the top left", "--out", tmp_path / "out") == 0
    assert "older weights of tokenizer" in capsys.readouterr().err
    # Both go on together: the newest checkpoint knows the new weights.
    assert kineo("train", config, "--run", run, "train.steps=8") == 0
    capsys.readouterr()
    assert kineo("sample", run, "a red 3 at the top left", "--out", tmp_path / "out") == 0
    assert "other weights" not in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = write(tmp_path), tmp_path / "run"
    for word, named in (
        ("stages.generator.init=nothing", "init"),
        ("stages.generator.init=nothing.safetensors", "init"),
        ("train.compile=graphs", "graphs"),
        ("train.workers=-1", "workers"),
        ("train.betas=[1.5, 2]", "betas"),
        ("stages.tokenizer.skip=true", "no checkpoint"),
        ("stages.tokenizer.cache=true", "cache"),
        ("data.size=30", "data.size"),
        ("train.batch_size=5 ", "batch_size"),
    ):
        more = ["train.accumulate=2"] if "batch_size" in word else []
        assert kineo("train", config, "--run", run, word, *more) == 2, word
        message = capsys.readouterr().err
        assert named in message and "Traceback" not in message and "unexpected" not in message, message
        assert not run.exists(), word
    assert kineo("train", config, "--run", run) == 0


def test_a_launcher_that_says_half_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert kineo("train", write(tmp_path), "--run", tmp_path / "run") == 2
    assert "WORLD_SIZE=2 without RANK" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_best_checkpoint_is_found_again_after_its_pointer_was_lost(tmp_path: Path) -> None:
    config, run = write(tmp_path, {"train": {"sample_every": 0}}), tmp_path / "run"
    assert kineo("train", config, "--run", run) == 0
    pointer = run / "generator" / "checkpoints" / "best.json"
    before = json.loads(pointer.read_text())
    pointer.unlink()
    assert kineo("train", config, "--run", run, "stages.generator.train.steps=5", "train.validate_every=0") == 0
    assert json.loads(pointer.read_text()) == before
    assert kineo("sample", run, "a red 3 at the top left", "--checkpoint", "best", "--out", tmp_path / "out") == 0
