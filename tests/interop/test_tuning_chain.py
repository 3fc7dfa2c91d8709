"""The whole way: a released folder, tuned here by the command, taken out, and loaded by diffusers."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import CogVideoXPipeline

from kineograph.core.config_file import read_yaml
from kineograph.run.plan import make_plan
from tests.interop.test_import_export import CLOSE, our_answer, ours
from tests.interop.tiny import TEXT_LENGTH, answer, tiny_pipeline
from tests.run.calling import kineo


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of MP4s with captions."""
    folder = tmp_path_factory.mktemp("data") / "clips"
    assert (
        kineo(
            "data", "make", "moving-digits", "--out", str(folder), "--count", "8", "--as", "mp4", "size=32", "frames=5"
        )
        == 0
    )
    return folder


def config(place: Path, stage: dict[str, Any], clips: Path | None = None) -> str:
    tree = {
        "name": "tuned",
        "data": {"size": 32, "frames": 5, "glyphs": 2},
        "train": {
            "steps": 2, "batch_size": 2, "lr": 0.01, "warmup": 0, "workers": 0, "trackers": [], "device": "cpu", "sample_every": 0,
            "validate_every": 0, "ema": {"decay": 0.5},
        },
        "stages": {
            "generator": {
                "task": "cogvideox", "depth": 2, "heads": 2, "head_width": 16, "time_width": 8, "positions": "sincos", "base_size": [4, 4],
                "base_frames": 2, "text": {"kind": "t5", "length": TEXT_LENGTH, "padding": "read"}, "diffusion": {"shift": 1.0}, **stage,
            }
        },
    }  # fmt: skip
    if clips is not None:
        tree["data"] = {"source": "folder", "folder": str(clips), "size": 32, "frames": 5, "fps": 8, "validation": 0.25}
    place.write_text(yaml.safe_dump(tree))
    return str(place)


def test_adapters_tuned_on_a_folder(released: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    stage = {"weights": str(released), "tune": "lora", "lora": {"rank": 2, "alpha": 3.0}}
    run, alone, merged = (tmp_path / name for name in ("run", "alone", "merged"))
    assert kineo("train", config(tmp_path / "c.yaml", stage, clips), "--run", str(run)) == 0, capsys.readouterr().err
    assert kineo("export", str(run), "--to", "diffusers", str(merged)) == 0, capsys.readouterr().err
    assert kineo("export", str(run), "--to", "diffusers", "--lora", str(alone)) == 0
    here = our_answer(ours(run))
    pipeline = CogVideoXPipeline.from_pretrained(merged)
    torch.testing.assert_close(answer(pipeline.transformer), here, **CLOSE)
    plain = CogVideoXPipeline.from_pretrained(released)
    assert (answer(plain.transformer) - here).abs().max() > 1e-3  # it learned something
    plain.load_lora_weights(alone)
    torch.testing.assert_close(answer(plain.transformer), here, **CLOSE)
    # averaged weights by default, those of the last step when asked for
    assert kineo("export", str(run), "--to", "diffusers", "--online", str(tmp_path / "online")) == 0
    online = CogVideoXPipeline.from_pretrained(tmp_path / "online").transformer
    assert (answer(online) - here).abs().max() > 1e-5


def test_adapters_go_on_from_adapters(
    released: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stage = {"weights": str(released), "tune": "lora", "lora": {"rank": 2, "alpha": 3.0}}
    first, second = tmp_path / "first", tmp_path / "second"
    assert kineo("train", config(tmp_path / "a.yaml", stage, clips), "--run", str(first)) == 0, capsys.readouterr().err
    again = {**stage, "init": f"{first}/generator", "train": {"lr": 0.0}}
    assert kineo("train", config(tmp_path / "b.yaml", again, clips), "--run", str(second)) == 0, capsys.readouterr().err
    assert "16 of 16 tensors" in capsys.readouterr().err
    torch.testing.assert_close(our_answer(ours(second)), our_answer(ours(first)), **CLOSE)


@pytest.mark.parametrize(("gone", "message"), [("", "does not exist"), ("vae", "has no folder vae")])
def test_weights_that_are_not_there_leave_no_run(
    folder: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture, gone: str, message: str
) -> None:
    shutil.rmtree(folder / gone)
    run = tmp_path / "run"
    made = config(tmp_path / "c.yaml", {"weights": str(folder), "tune": "lora"}, clips)
    assert kineo("train", made, "--run", str(run)) == 2
    assert f"stages.generator.weights={folder} {message}: give a diffusers folder" in capsys.readouterr().err
    assert not run.exists()


def test_sizes_that_are_named_fit_the_transformer_and_not_its_vae_alone(
    released: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = config(tmp_path / "c.yaml", {"weights": str(released), "tune": "lora"}, clips)
    assert kineo("train", place, "--run", str(tmp_path / "run"), "data.size=[40, 32]") == 2
    assert "the height must be a multiple of 16 (32 or 48)" in capsys.readouterr().err
    assert kineo("train", place, "--run", str(tmp_path / "run"), "data.size=[42, 32]") == 2
    assert "the height must be a multiple of 16 (32 or 48)" in capsys.readouterr().err


def test_another_schedule_than_the_folders_is_refused_with_the_key_to_set(
    released: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stage = {"weights": str(released), "tune": "lora", "diffusion": {"shift": 3.0}}
    place = config(tmp_path / "c.yaml", stage, clips)
    assert kineo("train", place, "--run", str(tmp_path / "run")) == 2
    assert "set stages.generator.diffusion.shift=1.0" in capsys.readouterr().err


@pytest.mark.parametrize("full", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_estimate_needs_no_weights_and_says_so(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, full: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    gone = str(tmp_path / "gone") if full else "gone"
    made = config(tmp_path / "c.yaml", {"weights": gone, "tune": "lora"}, clips)
    assert kineo("doctor", made, "stages.generator.text.width=16", "--memory", "8") == 0, capsys.readouterr().err
    told = rf"MISSING +stages\.generator\.weights={tmp_path / 'gone'} does not exist.*estimated without"
    assert re.search(told, capsys.readouterr().out)


def test_all_weights_tuned_on_a_folder(
    released: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Kept in bf16, with moments of 8 bits, from cached latents; the averaged weights go out."""
    stage = {"weights": str(released), "tune": "full", "weights_in": "bf16", "train": {"optimizer": "adamw_8bit"}}
    run, out = tmp_path / "run", tmp_path / "out"
    assert kineo("cache", config(tmp_path / "bad.yaml", {**stage, "depth": 3}, clips), "--run", str(run)) == 2
    assert not run.exists()
    file = config(tmp_path / "c.yaml", stage, clips)
    assert kineo("cache", file, "--run", str(run)) == 0, capsys.readouterr().err  # nothing is to be trained before
    assert kineo("train", file, "--run", str(run)) == 0
    told = capsys.readouterr().err
    assert "cached items" in told and "warning" not in told
    assert kineo("export", str(run), "--to", "diffusers", "--dtype", "fp32", str(out)) == 0, capsys.readouterr().err
    task = ours(run)
    task.network.float()
    here = our_answer(task)
    torch.testing.assert_close(answer(CogVideoXPipeline.from_pretrained(out).transformer), here, **CLOSE)
    assert (answer(CogVideoXPipeline.from_pretrained(released).transformer) - here).abs().max() > 1e-2


def test_weights_of_16_bits_with_a_plain_optimizer_are_warned_of(
    released: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stage = {"weights": str(released), "weights_in": "bf16", "train": {"steps": 1}}
    for tune, warned in (("full", True), ("lora", False)):  # adapters are float32
        file = config(tmp_path / f"{tune}.yaml", {**stage, "tune": tune}, clips)
        assert kineo("train", file, "--run", str(tmp_path / tune)) == 0, capsys.readouterr().err
        assert ("set train.optimizer=adamw_8bit" in capsys.readouterr().err) == warned


@pytest.mark.slow
def test_all_weights_tuned_from_an_imported_run(released: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    start, run, out = (tmp_path / name for name in ("start", "run", "out"))
    assert kineo("import", str(released), "--from", "diffusers", "--run", str(start)) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip() == str(start)
    text = {"kind": "t5", "name": str(released / "text_encoder"), "length": TEXT_LENGTH, "padding": "read"}
    stage = {"codec": f"{start}/vae", "init": f"{start}/generator", "text": text}
    assert kineo("train", config(tmp_path / "c.yaml", stage), "--run", str(run)) == 0
    said = capsys.readouterr().err
    whole = len(ours(start).network.state_dict())
    assert f"{whole} of {whole} tensors taken" in said
    assert kineo("export", str(run), "--to", "diffusers", str(out)) == 0, capsys.readouterr().err
    pipeline = CogVideoXPipeline.from_pretrained(out)
    here = our_answer(ours(run))
    torch.testing.assert_close(answer(pipeline.transformer), here, **CLOSE)
    assert (answer(tiny_pipeline().transformer) - here).abs().max() > 1e-3


def test_adapters_tuned_over_an_imported_run(released: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its weights stand in every checkpoint, so that nothing but the VAE is asked of that run later."""
    start, run, out = (tmp_path / name for name in ("start", "run", "out"))
    assert kineo("import", str(released), "--from", "diffusers", "--run", str(start)) == 0, capsys.readouterr().err
    text = {"kind": "t5", "name": str(released / "text_encoder"), "length": TEXT_LENGTH, "padding": "read"}
    stage = {"codec": f"{start}/vae", "init": f"{start}/generator", "text": text, "tune": "lora", "lora": {"rank": 2}}
    assert kineo("train", config(tmp_path / "c.yaml", stage), "--run", str(run)) == 0, capsys.readouterr().err
    shutil.rmtree(start / "generator")
    assert kineo("export", str(run), "--to", "diffusers", "--lora", str(out)) == 0, capsys.readouterr().err
    here, plain = our_answer(ours(run)), CogVideoXPipeline.from_pretrained(released)
    assert (answer(plain.transformer) - here).abs().max() > 1e-3  # it learned something
    plain.load_lora_weights(out)
    torch.testing.assert_close(answer(plain.transformer), here, **CLOSE)


def test_the_examples_in_the_documents_are_plans() -> None:
    text = (Path(__file__).parents[2] / "docs" / "interop.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?m)^    stages:\n(?:(?:    .*)?\n)+?(?=\S|\n    stages|\n\S)", text)
    assert len(blocks) == 2
    for block in blocks:
        plan = make_plan(read_yaml(textwrap.dedent(block), "block"))
        assert [stage.spec.config.task for stage in plan.stages] == ["cogvideox"]
