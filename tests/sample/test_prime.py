"""Frames to begin from: the last ones of a clip, at the run's speed, as many as fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from PIL import Image

from kineograph.core.errors import InputError
from kineograph.media.clips import write_clip
from kineograph.sample.sampler import Sampler
from tests.media.reading import read_clip
from tests.sample.tiny_task import Counting, make_run


@pytest.fixture(scope="module")
def sampler(tmp_path_factory) -> Sampler:
    """Trained on clips of 7 frames at 8 a second; encodes 1, 3, 5 … of them; overlap 3."""
    place = tmp_path_factory.mktemp("runs") / "clips"
    run = make_run(place, frames=7, generator="Counting", codec_task="PairCodec", fps=8)
    return Sampler.open(run.path, device="cpu")


@pytest.fixture
def given(monkeypatch) -> list[list[int]]:
    """The numbers of the frames that the task was given."""
    seen: list[list[int]] = []
    draw = Counting.sample

    def watched(self, prompts, options):
        seen.append((prompts.prime[0, :, 0].flatten(1).mean(1) * 255 / 5).round().int().tolist())
        return draw(self, prompts, options)

    monkeypatch.setattr(Counting, "sample", watched)
    return seen


def clip(frames: int, size: int = 32) -> torch.Tensor:
    """Frame n has brightness 5 n."""
    return (torch.arange(frames)[:, None, None, None] * 5).expand(-1, 3, size, size).to(torch.uint8)


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_short_clip_is_used_whole(sampler, tmp_path, given, capsys, suffix):
    drawn = sampler.sample("a 3", prime=write_clip(tmp_path / f"x{suffix}", clip(5), 8))
    assert given == [[0, 1, 2, 3, 4]]
    assert drawn.pixels.shape[1] == 7
    assert drawn.sidecar["prime"] is not None
    assert (drawn.sidecar["prime"]["frames"], drawn.sidecar["prime"]["of"]) == (5, 5)
    assert capsys.readouterr().err == ""


def test_frames_that_do_not_fit_the_codec_are_dropped_at_the_front(sampler, tmp_path, given, capsys):
    sampler.sample("a 3", prime=write_clip(tmp_path / "x.gif", clip(4), 8))
    assert given == [[1, 2, 3]]
    assert capsys.readouterr().err == f"{tmp_path / 'x.gif'}: continuing the last 3 of 4 frames\n"


@pytest.mark.parametrize("frames", [7, 30])
def test_a_long_clip_is_continued_from_the_default_overlap(sampler, tmp_path, given, capsys, frames):
    path = write_clip(tmp_path / "x.gif", clip(frames), 8)
    sampler.sample("a 3", prime=path)
    sampler.sample("a 3", prime=path, options={"sample.overlap": 5})
    sampler.sample("a 3", prime=clip(frames))  # a tensor likewise
    last = list(range(frames))
    assert given == [last[-3:], last[-5:], last[-3:]]
    assert f"continuing the last 3 of {frames} frames" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
@pytest.mark.parametrize(
    ("fps", "frames", "wanted"),
    [
        (16, 9, [0, 2, 4, 6, 8]),  # every second one, with the last
        (16, 10, [1, 3, 5, 7, 9]),
        (16, 40, [35, 37, 39]),  # 20 at the run's speed: longer than what is drawn, so the usual overlap
        (4, 3, [0, 0, 1, 1, 2]),  # each twice, the last once
        (24, 13, [0, 3, 6, 9, 12]),
        (20, 11, [0, 2, 5, 7, 10]),  # by timestamps, not by a whole stride
    ],
)
def test_a_clip_is_resampled_to_the_frame_rate_of_the_run(sampler, tmp_path, given, suffix, fps, frames, wanted):
    sampler.sample("a 3", prime=write_clip(tmp_path / f"x{suffix}", clip(frames), fps))
    assert given == [wanted]


def test_a_run_without_fps_keeps_the_frame_rate_of_the_clip(tmp_path, given):
    run = make_run(tmp_path / "run", frames=7, generator="Counting", codec_task="PairCodec")
    plain = Sampler.open(run.path, device="cpu")
    drawn = plain.sample("a 3", prime=write_clip(tmp_path / "fast.gif", clip(5), 20))
    assert given == [[0, 1, 2, 3, 4]] and drawn.fps == pytest.approx(20)
    assert plain.sample("a 3", prime=write_clip(tmp_path / "one.png", clip(1), 20)).fps == 8  # a picture has none
    story = plain.story(["a 3", "a 4"], prime=tmp_path / "fast.gif")
    (video, *_) = story.save(tmp_path / "told", "gif")
    assert story.fps == pytest.approx(20) and read_clip(video)[1] == pytest.approx(20, rel=0.1)


def test_image_to_video_notes_a_missing_picture(sampler, tmp_path, monkeypatch, capsys):
    sampler.sample("a 3")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sampler.task, "can_animate", lambda: True, raising=False)
    sampler.sample("a 3", prime=write_clip(tmp_path / "one.png", clip(1), 8))
    assert capsys.readouterr().err == ""
    sampler.sample("a 3")
    assert "animates a picture, and --prime is not set" in capsys.readouterr().err


def test_a_run_with_fps_keeps_it(sampler, tmp_path):
    assert sampler.sample("a 3", prime=write_clip(tmp_path / "fast.gif", clip(15), 20)).fps == 8


def test_a_picture_is_read_upright_in_the_size_and_colours_of_the_run(sampler, tmp_path, monkeypatch):
    seen: list[torch.Tensor] = []
    draw = Counting.sample
    monkeypatch.setattr(Counting, "sample", lambda *call: seen.append(call[1].prime) or draw(*call))
    picture = Image.new("L", (96, 64))
    picture.paste(200, (0, 0, 48, 64))
    exif = picture.getexif()
    exif[0x0112] = 3  # upside down, as a phone would note
    picture.save(tmp_path / "phone.jpg", exif=exif, quality=100)
    sampler.sample(["a 3", "a 4"], prime=tmp_path / "phone.jpg")
    assert seen[0].shape == (2, 1, 3, 32, 32)
    assert seen[0][..., :14].max() < 0.02
    assert (seen[0][..., 18:] - 200 / 255).abs().max() < 0.02


def test_a_stage_of_pictures_needs_another_stage_not_more_frames(sampler):
    alone = replace(sampler.limits, shape=replace(sampler.limits.shape, frames=1))
    with pytest.raises(InputError, match=r"draws 1 frame at a time.*use a stage trained on longer clips"):
        alone.check_overlap(1, 9, "--overlap")


def test_a_prime_must_leave_frames_to_draw(sampler, tmp_path):
    with pytest.raises(
        InputError, match=r"--prime: .* draws 1 frame at a time, too few to continue a clip: raise --frames"
    ):
        sampler.sample("a 3", prime=clip(1), frames=1)
    for wrong in (torch.zeros(3, 32, 32), torch.zeros(0, 3, 32, 32), torch.zeros(1, 5, 32, 32)):
        with pytest.raises(InputError, match="T C H W"):
            sampler.sample("a 3", prime=wrong)
    gray = torch.full((1, 3, 32, 32), 0.5)
    for wrong in (gray * 255, gray - 1, gray * float("nan")):
        with pytest.raises(InputError, match=r"prime has values from .*float in \[0, 1\]"):
            sampler.sample("a 3", prime=wrong)
    with pytest.raises(InputError, match="does not exist"):
        sampler.sample("a 3", prime=tmp_path / "gone.gif")


@pytest.mark.parametrize("steered", [False, True])
def test_super_resolution_gets_the_first_frame(sampler, tmp_path, given, capsys, monkeypatch, steered):
    monkeypatch.setattr(Counting, "can_continue", lambda task: False)
    upscaler = sampler.task.stages["codec"] if steered else sampler.task  # its generator, or itself
    monkeypatch.setattr(upscaler, "can_upscale", lambda: True, raising=False)
    monkeypatch.setattr(upscaler, "prime_size", lambda options: None, raising=False)
    sampler.sample("a 3", prime=write_clip(tmp_path / "x.gif", clip(5) + 10, 8))
    assert given == [[2]]
    assert "the first frame is enlarged" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".png", ".gif"])
def test_a_picture_of_too_many_pixels_is_refused_with_its_size_and_the_limit(sampler, tmp_path, monkeypatch, suffix):
    """The true limit is Pillow's, 179 million pixels: writing such a picture takes too long for a test."""
    path = tmp_path / f"poster{suffix}"
    Image.new("L", (60, 50)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for asked in (lambda: sampler.sample(["x"], prime=path), lambda: sampler.story(["x"], prime=path)):
        with pytest.raises(
            InputError, match=rf"poster{suffix} is too large: 3,000 pixels.* 2,000 are decoded; scale it down"
        ):
            asked()
