"""Sketches from the data to what is drawn after them, and codebook ids from elsewhere: whole runs, very small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph import cli
from kineograph.core.errors import InputError
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.family.nuwa.task import Nuwa
from kineograph.media.clips import write_clip
from kineograph.run.train import train
from kineograph.sample.command import write_samples
from kineograph.sample.sampler import Sampler
from tests.sample.tiny_task import make_run

QUICK = [
    "train.steps=2", "train.batch_size=2", "train.log_every=1", "train.validation_samples=2", "train.samples=2", "train.save_every=2",
    "train.validate_every=2", "train.sample_every=2", "train.workers=0", "train.device=cpu", "train.trackers=[]", "train.warmup=1",
]  # fmt: skip
SMALL = [
    "data.count=40", "stages.tokenizer.width=8", "stages.sketch_tokenizer.width=8", "stages.generator.depth=1", "stages.generator.width=32",
    "stages.generator.heads=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """A run that draws after sketches, and those that its training samples were drawn after."""
    seen: list[torch.Tensor] = []
    real = Nuwa.encode_prompt_sketch

    def spy(self, prompts):
        seen.append(prompts.batch.extra["sketch"])
        return real(self, prompts)

    Nuwa.encode_prompt_sketch = spy  # type: ignore[method-assign]
    try:
        words = ["nuwa-sketch-tiny", *QUICK, *SMALL, "stages.generator.train.sample_frames=6"]
        return train(words, run=tmp_path_factory.mktemp("runs") / "sketch", quiet=True), seen
    finally:
        Nuwa.encode_prompt_sketch = real  # type: ignore[method-assign]


def test_samples_while_training_follow_the_sketches_of_the_data(run):
    folder, seen = run
    expected = MovingDigits.open(
        MovingDigitsConfig(
            size=32, frames=4, fps=4, directions=4, speed=4, grid=4, bounce=False, kept_out=0, count=40, sketch=True
        ),
        "validation",
    )
    known = [expected.read(index).extra["sketch"] for index in range(len(expected))]
    assert seen and all(any(torch.equal(row.cpu(), sketch) for sketch in known) for row in seen[0])
    (gif, *_) = (folder / "generator" / "samples" / "step-00000002").glob("*0000*.gif")
    with Image.open(gif) as image:
        assert image.n_frames == 6  # train.sample_frames, past the trained 4


def test_the_codec_of_sketches_has_their_channels(run):
    sampler = Sampler.open(run[0], device="cpu")
    assert sampler.task.stages["sketch"].shape.channels == 1
    assert sampler.task.stages["codec"].shape.channels == 3
    assert sampler.task.reads == {"pixels", "captions", "sketch"}


def test_sampling_after_a_sketch(run, tmp_path):
    sampler = Sampler.open(run[0], device="cpu")
    options = {"sample.temperature": 0}
    plain = sampler.sample("a red 3 moves left", options=options).pixels
    sketch = (torch.rand(4, 1, 32, 32) > 0.5) * torch.ones(1)
    drawn = sampler.sample("a red 3 moves left", sketch=sketch, options=options)
    assert drawn.pixels.shape == plain.shape
    assert not torch.equal(drawn.pixels, plain)
    assert drawn.sidecar["sketch"] is not None and drawn.sidecar["sketch"]["frames"] == 4
    still = sampler.sample("a red 3 moves left", sketch=sketch[:1], options=options)  # held for the whole clip
    assert torch.equal(
        still.pixels,
        sampler.sample("a red 3 moves left", sketch=sketch[:1].expand(4, -1, -1, -1), options=options).pixels,
    )


def test_the_command_takes_a_file_and_tells_how_to_repeat_it(run, tmp_path, capsys):
    path = write_clip(tmp_path / "outline.gif", torch.rand(6, 3, 40, 40), 4)
    *media, _ = write_samples(
        run[0], ["a red 3 moves left"], out=tmp_path / "out", count=2, sketch=path, format="gif", device="cpu"
    )
    told = json.loads(media[0].with_suffix(".json").read_text())
    assert f"--sketch {path}" in told["command"]
    assert told["sketch"]["frames"] == 4
    short = write_clip(tmp_path / "short.gif", torch.rand(2, 3, 40, 40), 4)
    capsys.readouterr()
    Sampler.open(run[0], device="cpu").sample("a red 3", sketch=short)
    assert "2 of 4 frames are sketched; the last 2 are not" in capsys.readouterr().err
    with pytest.raises(InputError, match="does not exist"):
        Sampler.open(run[0], device="cpu").sample("a red 3", sketch=tmp_path / "none.gif")


@pytest.mark.parametrize("given", ["clip", "short clip", "picture"])
def test_a_story_follows_one_sketch_over_all_its_scenes(run, tmp_path, given, monkeypatch, capsys):
    """4 frames a scene, of which 2 are carried on: scene s draws frames 2s to 2s + 3, and sees the sketch under them."""
    seen, real = [], Nuwa.encode_prompt_sketch
    monkeypatch.setattr(
        Nuwa, "encode_prompt_sketch", lambda self, prompts: [seen.append(prompts.batch), real(self, prompts)][1]
    )
    levels = torch.arange(8 if given == "clip" else 5) * 30 + 20
    sketch = (levels if given != "picture" else levels[:1])[:, None, None, None].expand(-1, 3, 32, 32).to(torch.uint8)
    path = write_clip(tmp_path / ("outline.png" if given == "picture" else "outline.gif"), sketch, 4)
    (tmp_path / "scenes.txt").write_text("a red 3 moves left\na red 3 moves up\na red 3 moves right\n")
    words = [
        str(run[0]),
        str(tmp_path / "scenes.txt"),
        "--overlap",
        "2",
        "--sketch",
        str(path),
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["story", *words, "--device", "cpu"])
    assert ended.value.code == 0
    shown = [
        [round(float(frame.float().mean())) for frame in batch.extra["sketch"][0]] if batch is not None else []
        for batch in seen
    ]
    under = {
        "clip": [[20, 50, 80, 110], [80, 110, 140, 170], [140, 170, 200, 230]],
        "short clip": [[20, 50, 80, 110], [80, 110, 140], [140]],
        "picture": [[20] * 4] * 3,
    }[given]
    assert shown == under
    said = capsys.readouterr().err
    assert ("5 of 8 frames are sketched; the last 3 are not" in said) == (given == "short clip")
    (told,) = [json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")]
    assert f"--sketch {path}" in told["command"] and told["sketch"]["frames"] == (5 if given == "short clip" else 8)


def test_where_the_sketch_of_a_story_has_ended_nothing_is_sketched(run):
    sampler = Sampler.open(run[0], device="cpu")
    options = {"sample.temperature": 0}
    sketch = torch.rand(4, 1, 32, 32)
    first, second = sampler.story(
        ["a red 3 moves left"] * 2, overlap=1, frames=4, sketch=sketch[:1].expand(3, -1, -1, -1), options=options
    )
    again = sampler.sample("a red 3 moves left", sketch=sketch[:1].expand(3, -1, -1, -1), options=options).pixels[0]
    assert torch.equal(first, again)
    plain = sampler.sample("a red 3 moves left", prime=first[-1:], options=options).pixels[0]
    assert torch.equal(second, plain[1:])


def test_a_story_after_a_sketch_needs_a_stage_that_knows_sketches(tmp_path):
    plain = Sampler.open(
        make_run(tmp_path / "run", frames=7, generator="Counting", codec_task="PairCodec").path, device="cpu"
    )
    with pytest.raises(InputError, match=r"--sketch: .* was trained without sketches: use a run"):
        plain.story(["one", "two"], sketch=torch.zeros(1, 1, 8, 8))


def test_missing_sketches_are_refused_before_anything_is_written(tmp_path):
    words = ["nuwa-sketch-tiny", *QUICK, *SMALL, "stages.generator.data.sketch=false"]
    with pytest.raises(InputError, match=r"stage generator \(nuwa\) draws from sketches.*data\.sketch=true"):
        train(words, run=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_codebook_ids_from_elsewhere_train_a_generator(run, tmp_path):
    """A raw file of int64, stored flat, with its shape and vocabulary told; frames to sample are a key."""
    ids = np.random.default_rng(0).integers(0, 216, (24, 4 * 8 * 8))
    ids.astype(np.int64).tofile(tmp_path / "ids.bin")
    (tmp_path / "ids.yaml").write_text(
        f"""
data: {{source: cache, folder: {tmp_path / "ids.bin"}, array_shape: [24, 256], vocabulary: 216, tokens_shape: [4, 8, 8], size: 32, frames: 4}}
stages:
  generator: {{task: nuwa, codec: {run[0]}/tokenizer, width: 32, heads: 2, depth: 1, window: [2, 3, 3], dilations: [1], text: {{kind: none}}}}
"""
    )
    made = train([str(tmp_path / "ids.yaml"), *QUICK, "train.sample_frames=2"], run=tmp_path / "run", quiet=True)
    (gif, *_) = sorted((made / "generator" / "samples" / "step-00000002").glob("*[0-9].gif"))
    with Image.open(gif) as image:
        assert image.n_frames == 2
    with pytest.raises(InputError, match="allows 0 to 99"):
        train([str(tmp_path / "ids.yaml"), *QUICK, "data.vocabulary=100"], run=tmp_path / "other", quiet=True)
    with pytest.raises(InputError, match="holds items of shape"):
        train([str(tmp_path / "ids.yaml"), *QUICK, "data.tokens_shape=[1, 16, 16]"], run=tmp_path / "other", quiet=True)
