"""Sound from the data to clips that are heard: whole runs, very small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kineograph.core.errors import InputError
from kineograph.core.safe_media import MediaLimits
from kineograph.data.decode import Clip
from kineograph.data.digit_sound import PITCHES
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.data.sound_track import read_sound
from kineograph.evaluate.metric.sound_accuracy import SoundAccuracy, find_digit, match_times
from kineograph.evaluate.metric_api import EvalBatch, MetricSkipped
from kineograph.evaluate.runner import evaluate
from kineograph.media.clips import write_clip
from kineograph.run.train import train
from kineograph.sample.command import write_samples
from kineograph.sample.sampler import Sampler

QUICK = [
    "train.steps=2", "train.batch_size=2", "train.log_every=1", "train.validation_samples=2", "train.samples=2", "train.save_every=2",
    "train.validate_every=2", "train.sample_every=2", "train.workers=0", "train.device=cpu", "train.trackers=[]", "train.warmup=1",
]  # fmt: skip
SMALL = [
    "data.count=40", "stages.tokenizer.width=8", "stages.sound_tokenizer.width=8", "stages.generator.depth=1", "stages.generator.width=32",
    "stages.generator.heads=2",
]  # fmt: skip
FRAMES, FPS, RATE = 4, 4, 4000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(["nuwa-sound-tiny", *QUICK, *SMALL], run=tmp_path_factory.mktemp("runs") / "sound", quiet=True)


def listen(path: Path, frames: int = FRAMES) -> torch.Tensor:
    """The sound of a file, T S."""
    clip = Clip(torch.zeros(frames, 1, 1, 1).numpy(), FPS)
    return torch.from_numpy(read_sound(path, clip, RATE, RATE // FPS, MediaLimits()))


def test_clips_that_are_drawn_are_heard(run, tmp_path):
    first, second, sheet = write_samples(run, ["a 3 moves left"], out=tmp_path, count=2, seed=4)
    assert (first.suffix, sheet.suffix) == (".mp4", ".png")
    beside = listen(first)  # from the WAV
    samples = Sampler.open(run).sample(["a 3 moves left"], count=2, seed=4)
    assert samples.sounds is not None and len(samples.sounds) == 2
    assert samples.sounds[0].rate == RATE and samples.sounds[0].samples.shape == (FRAMES, 1000)
    assert torch.allclose(beside, samples.sounds[0].samples, atol=1e-3) and beside.abs().max() > 0
    assert not torch.equal(samples.sounds[0].samples, samples.sounds[1].samples)
    first.with_suffix(".wav").unlink()
    inside = listen(first)  # from the MP4
    assert (inside - beside).square().mean() < 0.3 * beside.square().mean()
    sidecar = json.loads(second.with_suffix(".json").read_text())
    assert sidecar["sound"] == {"file": second.with_suffix(".wav").name, "sample_rate": RATE}
    (again,) = samples.save(tmp_path / "gif", "gif")[:1]
    assert torch.allclose(listen(again), beside, atol=1e-3)


def test_frames_and_sound_stay_together(run, tmp_path):
    with pytest.raises(InputError, match="frames and sound would no longer go together"):
        write_samples(run, ["a 3 moves left"], out=tmp_path / "x", fps=8)
    assert not (tmp_path / "x").exists()
    story = Sampler.open(run).story(["a 3 moves left", "a 3 moves up"])
    video, _ = story.save(tmp_path)
    assert video.suffix == ".mp4" and len(listen(video, story.total)) == story.total > FRAMES
    assert listen(video, story.total)[-1].abs().max() > 0
    assert [frames.ndim for frames in story] == [4, 4]


def test_samples_while_training_have_their_sound(run):
    (folder,) = (run / "generator" / "samples").glob("step-*")
    clips = [path for path in folder.glob("*.mp4") if not path.name.startswith(("grid", "online"))]
    assert len(clips) == 2 and all(listen(path).shape == (FRAMES, 1000) for path in clips)
    assert all(path.with_suffix(".wav").is_file() for path in clips)


def test_evaluate_reports_pitch_and_clicks(run):
    results = evaluate(run, ["sound_accuracy"], samples=2, device="cpu", note=lambda line: None)
    (stage,) = results.stages
    result = stage.results["sound_accuracy"]
    assert {"pitch_accuracy", "click_accuracy", "bounced"} <= result.values.keys()
    assert result.labels["ceiling of pitch"] == result.labels["ceiling of clicks"] == 1.0
    prompted = evaluate(run, ["sound_accuracy"], prompts=["a 3 moves up"], device="cpu", note=lambda line: None)
    assert prompted.stages[0].results["sound_accuracy"].labels == {"count": 1}


def test_real_clips_are_right_and_false_ones_are_not():
    source = MovingDigits(
        MovingDigitsConfig(size=32, frames=5, fps=4, channels=1, directions=4, speed=3, grid=3, sample_rate=RATE),
        "validation",
    )
    samples = [source.read(index) for index in range(40)]
    pixels = torch.stack([sample.pixels / 255 for sample in samples])
    sounds = torch.stack([sample.extra["audio"] for sample in samples])
    captions = [sample.caption for sample in samples]

    def judge(**batch: torch.Tensor) -> dict[str, float]:
        metric = SoundAccuracy(RATE, FPS)
        metric.update(EvalBatch(captions=captions, **batch))
        return metric.compute().values

    right = judge(generated=pixels, sound=sounds)
    assert right["pitch_accuracy"] == right["click_accuracy"] == 1.0 and 0.2 < right["bounced"] < 0.8
    assert right["click_accuracy_where_bounced"] == 1.0
    swapped = judge(generated=pixels, sound=sounds.roll(1, 0))
    assert swapped["pitch_accuracy"] < 0.4 and swapped["click_accuracy"] < 0.8
    early = judge(
        generated=pixels, sound=torch.cat([sounds[:, 2:], sounds[:, :2]], dim=1)
    )  # each click two frames early
    assert early["pitch_accuracy"] > 0.95 and early["click_accuracy_where_bounced"] == 0
    silent = judge(generated=pixels, sound=torch.zeros_like(sounds))
    assert silent["pitch_accuracy"] == 0 and silent["click_accuracy"] == pytest.approx(1 - right["bounced"])


def test_pitches_and_times_are_matched_within_their_limits():
    assert [find_digit(float(pitch)) for pitch in PITCHES] == list(range(10))
    assert find_digit(340.0) is None and find_digit(None) is None and find_digit(444.0) == 5
    assert match_times([], []) and match_times([3.1], [2.2]) and not match_times([3.3], [2.2])
    assert not match_times([], [2.0]) and not match_times([1.0], []) and match_times([2.0], [1.9, 2.5])
    with pytest.raises(MetricSkipped, match="one moving digit"):
        SoundAccuracy(RATE, FPS).update(EvalBatch(captions=["a cat"], generated=torch.zeros(1, 5, 1, 8, 8)))


def test_data_without_sound_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"reads sound, and the items .*set data\.sample_rate"):
        train(["nuwa-sound-tiny", *QUICK, *SMALL, "data.sample_rate=null"], run=tmp_path / "run", quiet=True)
    for number in range(4):
        write_clip(tmp_path / "clips" / f"{number}.mp4", torch.rand(6, 3, 32, 32), FPS)
        (tmp_path / "clips" / f"{number}.txt").write_text("a clip")
    words = [
        "data.source=folder",
        f"data.folder={tmp_path / 'clips'}",
        "data.fps=4",
        "data.sample_rate=4000",
        "data.channels=1",
    ]
    with pytest.raises(InputError, match="no sound track; add a sound track"):
        train(["nuwa-sound-tiny", *QUICK, *SMALL[1:], *words], run=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
