"""A cascade from end to end: a subset of its stages is trained, pictures are enlarged and drawn anew in part by `kineo sample`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.core.errors import InputError
from kineograph.family.dalle2.conditioning import Conditioner
from kineograph.run.train import train
from kineograph.sample.command import write_samples
from kineograph.sample.sampler import Sampler
from kineograph.stage.load import StageLoader

CONFIG = {
    "data": {"source": "moving_digits", "size": 16, "count": 40},
    "train": {
        "steps": 1, "batch_size": 2, "samples": 2, "validation_samples": 2, "sample_every": 1, "validate_every": 1, "workers": 0,
        "device": "cpu", "trackers": [],
    },
    "stages": {
        "small": {
            "task": "dalle2", "image_embeds": "none", "width": 8, "multipliers": [1, 2], "blocks": 1, "sample": {"steps": 2},
        },
        "large": {
            "task": "dalle2", "image_embeds": "none", "data": {"size": 32}, "low_res": "small", "low_res_size": 16, "width": 8,
            "multipliers": [1, 2], "blocks": 1, "sample": {"steps": 2},
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and a run in which the upsampler alone is trained."""
    folder = tmp_path_factory.mktemp("cascade")
    (folder / "cascade.json").write_text(json.dumps(CONFIG))
    train([str(folder / "cascade.json"), "stages.small.skip=true"], run=folder / "upsampler", quiet=True)
    return folder


def picture(folder: Path) -> Path:
    path = folder / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return path


def test_an_upsampler_trains_alone_and_shows_enlarged_real_pictures(place):
    run = place / "upsampler"
    assert not (run / "small" / "checkpoints").exists()
    assert (run / "large" / "samples" / "step-00000001" / "grid.png").is_file()


def test_it_enlarges_a_given_picture_and_loads_nothing_else(place, tmp_path, monkeypatch):
    loaded = []
    load = StageLoader.load

    def watched(self, reference, *which, **keys):
        loaded.append(reference)
        return load(self, reference, *which, **keys)

    monkeypatch.setattr(StageLoader, "load", watched)
    written = write_samples(place / "upsampler", None, out=tmp_path / "out", prime=picture(tmp_path), device="cpu")
    assert loaded == ["large"]
    assert Image.open(written[0]).size == (32, 32)
    with pytest.raises(InputError, match="small"):
        Sampler.open(place / "upsampler", device="cpu").sample()


def test_a_part_of_a_picture_is_drawn_anew(place, tmp_path):
    run = train([str(place / "cascade.json")], run=tmp_path / "whole", quiet=True)
    mask = np.zeros((32, 32), np.uint8)
    mask[:, :16] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    keys = {"out": tmp_path / "out", "prime": picture(tmp_path), "device": "cpu"}
    written = write_samples(run, None, mask=tmp_path / "mask.png", **keys)
    before, after = (np.asarray(Image.open(path)).astype(int) for path in (picture(tmp_path), written[0]))
    assert np.abs(before - after)[:, 16:].max() <= 1
    assert np.abs(before - after)[:, :16].mean() > 5
    told = json.loads(written[0].with_suffix(".json").read_text())
    assert told["mask"]["share"] == 0.5 and f"--mask {tmp_path / 'mask.png'}" in told["command"]
    assert len(told["weights"]) == 2
    small = Sampler.open(run, stage="small", device="cpu")
    assert small.sample(count=2).pixels.shape == (2, 1, 3, 16, 16)
    with pytest.raises(InputError, match="--mask"):
        small.sample(prime=torch.rand(1, 3, 16, 16))
    with pytest.raises(
        InputError, match=r"--mask needs the picture to inpaint: add --prime \(runs of dalle2 can inpaint\)"
    ):
        small.sample(mask=torch.ones(16, 16, dtype=torch.bool))
    with pytest.raises(InputError, match="all black: make the part to inpaint white"):
        small.sample(prime=torch.rand(1, 3, 16, 16), mask=torch.zeros(16, 16, dtype=torch.bool))


def test_a_caption_reaches_the_stage_that_draws_first(place, tmp_path, monkeypatch):
    """The upsampler itself reads no text: the picture that it enlarges is drawn after the caption."""
    text = {"kind": "learned", "width": 16, "depth": 0, "positions": "none", "heads": 2, "length": 16}
    told = CONFIG | {"stages": CONFIG["stages"] | {"small": CONFIG["stages"]["small"] | {"text": text}}}
    (tmp_path / "told.json").write_text(json.dumps(told))
    run = train([str(tmp_path / "told.json")], run=tmp_path / "told", quiet=True)
    shown = json.loads((run / "large" / "samples" / "step-00000001" / "prompts.json").read_text())
    assert all(drawn["prompt"] for drawn in shown)  # while it trains too
    heard = []
    read = Conditioner.encode_prompts

    def watched(self, prompts, prior):
        heard.append((self.config.reads_text, prompts.captions))
        return read(self, prompts, prior)

    monkeypatch.setattr(Conditioner, "encode_prompts", watched)
    Sampler.open(run, device="cpu").sample("a red 3")
    assert (True, ["a red 3"]) in heard
    with pytest.raises(InputError, match="without captions"):
        Sampler.open(place / "upsampler", device="cpu").sample("a red 3")
