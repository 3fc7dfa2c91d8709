"""Sound tracks: moving digits that sound, files with and without sound, and the reader of both."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from kineograph.core.batch import Batch, Sound
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.data.digit_sound import PITCHES
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.data.open_source import Source, open_source, parse_data_config
from kineograph.evaluate.sound_reader import find_bounces, find_clicks, read_pitch
from kineograph.media.clips import write_clip
from kineograph.run.dataset_writer import write_dataset

RATE, FPS = 8000, 8
KEYS = {"size": 32, "frames": 10, "fps": FPS, "channels": 1}


def open_digits(**keys) -> MovingDigits:
    return MovingDigits(MovingDigitsConfig(**{**KEYS, "sample_rate": RATE, **keys}), "train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four clips, with the sound in the MP4 alone."""
    out = tmp_path_factory.mktemp("sound") / "clips"
    write_dataset(
        "moving-digits", out, 4, "mp4", [f"{key}={value}" for key, value in {**KEYS, "sample_rate": RATE}.items()]
    )
    assert len(list(out.glob("*.wav"))) == 4
    for file in out.glob("*.wav"):
        file.rename(out.parent / file.name)
    return out


def open_folder(folder: Path, **keys) -> Source:
    tree = {**KEYS, "source": "folder", "folder": str(folder), "sample_rate": RATE, "validation": 0, **keys}
    return open_source(parse_data_config(tree), "train", 0)


def match(first: list[float], second: list[float], limit: float) -> bool:
    """Whether each time of one list has one of the other within `limit`."""
    return all(
        any(abs(a - b) <= limit for b in theirs) for mine, theirs in ((first, second), (second, first)) for a in mine
    )


def test_a_digit_sounds_its_pitch_and_clicks_where_it_bounces():
    source, bounced, quiet = open_digits(directions=4), 0, 0
    for index in range(60):
        item, sample = source.item(index), source.read(index)
        sound = sample.extra["audio"]
        assert sound.shape == (10, 1000) and sound.abs().max() <= 1
        assert read_pitch(sound, RATE) == pytest.approx(PITCHES[item.facts[0].digit], rel=0.02)
        times = item.scenes.canvas.bounce_times(item.facts[0], item.starts)
        assert match(times, [click * FPS for click in find_clicks(sound, RATE)], 0.1)
        assert match(times, find_bounces(sample.pixels / 255), 0.3)
        bounced, quiet = bounced + bool(times), quiet + (not times)
    assert bounced > 5 and quiet > 5


def test_the_reader_hears_nothing_in_silence_and_noise_and_is_not_fooled_by_octaves():
    time = torch.arange(RATE) / RATE
    noise = 0.3 * torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    assert read_pitch(torch.zeros(RATE), RATE) is None and read_pitch(noise, RATE) is None
    assert find_clicks(0.3 * torch.sin(2 * torch.pi * 656 * time), RATE) == []
    for pitch in (264, 528):
        rich = 0.3 * torch.sin(2 * torch.pi * pitch * time) + 0.1 * torch.sin(4 * torch.pi * pitch * time)
        assert read_pitch(rich, RATE) == pytest.approx(pitch, rel=0.01)


def test_samples_of_a_batch_keep_their_sound_and_stills_are_padded():
    source = open_digits(stills=0.5, count=64)
    samples = [source.read(index) for index in range(16)]
    assert {len(sample.extra["audio"]) for sample in samples} == {1, 10}
    batch = Batch.collate(samples, range(16))
    assert batch.extra["audio"].shape == (16, 10, 1000)
    assert torch.equal(batch.extra["audio"][3, : len(samples[3].extra["audio"])], samples[3].extra["audio"])


def test_a_clip_is_read_back_with_the_sound_of_its_own_frames(folder):
    """AAC costs little, and nothing moves: also in the middle of a clip."""
    whole, digits = open_folder(folder), open_digits()
    middle, starts = open_folder(folder, frames=6), set()
    for index in range(4):
        real = digits.read(int(whole.identity(index)[:6]))
        assert (whole.read(index, numpy_rng(0)).extra["audio"] - real.extra["audio"]).square().mean() < 0.03**2
        for seed in range(3):
            sample = middle.read(index, numpy_rng(seed))
            errors = [(real.pixels[k : k + 6] / 255 - sample.pixels / 255).square().mean() for k in range(5)]
            start = int(torch.tensor(errors).argmin())
            starts.add(start)
            assert find_clicks(sample.extra["audio"], RATE) == pytest.approx(
                find_clicks(real.extra["audio"][start : start + 6], RATE), abs=0.002
            )
    assert len(starts) > 2


def test_a_wav_beside_a_clip_is_its_sound(folder, tmp_path):
    clip, rate = torch.zeros(8, 3, 32, 32), 16_000
    tone = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(rate) / rate)
    write_clip(tmp_path / "a.gif", clip + torch.arange(8)[:, None, None, None] / 8, FPS, Sound(tone.view(8, -1), rate))
    sound = open_folder(tmp_path, frames=8).read(0, numpy_rng(0)).extra["audio"]
    assert sound.shape == (8, 1000) and read_pitch(sound, RATE) == pytest.approx(440, rel=0.01)


def test_a_sound_track_that_nothing_decodes_is_named(folder, tmp_path):
    content = next(folder.glob("*.mp4")).read_bytes()
    assert content.count(b"mp4a") == 1
    (tmp_path / "a.mp4").write_bytes(content.replace(b"mp4a", b"zzza").replace(b"esds", b"zzzs"))
    (tmp_path / "a.txt").write_text("a 3")
    source = open_folder(tmp_path)
    with pytest.raises(Unreadable, match="its sound track is of a codec that cannot be decoded"):
        source.read(0, numpy_rng(0))


def test_a_sound_of_values_that_are_no_numbers_is_unreadable(tmp_path):
    """One would make the loss of its whole batch NaN."""
    write_clip(tmp_path / "a.mp4", torch.rand(10, 3, 32, 32), FPS)
    samples = np.full(16_000, np.nan, "<f4").tobytes()
    form = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(samples), b"WAVE", b"fmt ", 16, 3, 1, 8000, 32000, 4, 32)
    (tmp_path / "a.wav").write_bytes(form + struct.pack("<4sI", b"data", len(samples)) + samples)
    with pytest.raises(Unreadable, match="not numbers; add a sound track"):
        open_folder(tmp_path).read(0, numpy_rng(0))


def test_a_clip_without_sound_is_unreadable_and_says_what_to_do(tmp_path):
    write_clip(tmp_path / "mute.mp4", torch.rand(10, 3, 32, 32), FPS)
    write_clip(tmp_path / "mute.gif", torch.rand(10, 3, 32, 32), FPS)
    (tmp_path / "torn.mp4").write_bytes((tmp_path / "mute.mp4").read_bytes())
    (tmp_path / "torn.wav").write_bytes(b"RIFF no sound")
    source = open_folder(tmp_path)
    reasons = {}
    for index in range(3):
        with pytest.raises(Unreadable) as error:
            source.read(index, numpy_rng(0))
        reasons[source.identity(index)] = error.value.reason
    assert "no sound track; add a sound track or a .wav of the same name" in reasons["mute.mp4"]
    assert "gif files hold none" in reasons["mute.gif"] and "data.sample_rate=null" in reasons["mute.gif"]
    assert "not a sound" in reasons["torn.mp4"]
    assert "audio" not in open_folder(tmp_path, sample_rate=None).read(0, numpy_rng(0)).extra


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sample_rate": 8001}, "use a multiple of fps, such as 8000"),
        ({"digits": 2}, "one digit sounds at a time"),
        ({"source": "folder", "folder": ".", "fps": None}, "set data.fps"),
        ({"source": "memmap", "folder": "x.npy"}, "reads no sound tracks; use folder or moving_digits"),
    ],
)
def test_settings_that_cannot_sound_are_refused(keys, message, tmp_path):
    if keys.get("source") == "memmap":
        write_dataset("moving-digits", tmp_path / "m", 4, "memmap", ["size=32", "frames=10", "channels=1"])
        keys = {**keys, "folder": str(tmp_path / "m")}
    with pytest.raises((ConfigError, InputError), match=message):
        open_source(parse_data_config({**KEYS, "sample_rate": RATE, **keys}), "train", 0)


def test_sound_needs_a_format_that_can_hold_it(tmp_path):
    with pytest.raises(InputError, match="goes with --as mp4 or gif"):
        write_dataset("moving-digits", tmp_path / "x", 1, "memmap", ["sample_rate=8000"])
