from __future__ import annotations

import json
import shlex

import pytest
import torch
from PIL import Image

from kineograph.core.errors import ConfigError, InputError
from kineograph.sample.command import write_samples
from kineograph.sample.sampler import Sampler
from tests.media.reading import read_clip
from tests.sample.tiny_task import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "clips", frames=4).path


def test_media_sidecars_and_sheet(run, tmp_path):
    written = write_samples(run, ["A red 3!", "a red 3", "數字 7"], out=tmp_path, count=2, device="cpu")
    media = written[:-1]
    assert len({path.name for path in media}) == 6  # two captions share a slug and still do not share files
    assert all(path.suffix == ".gif" for path in media)
    assert written[-1].name.startswith("sheet")
    pixels, fps = read_clip(media[0])
    assert pixels.shape[0] == 4
    assert fps == pytest.approx(8, rel=0.1)
    sidecar = json.loads(media[3].with_suffix(".json").read_text())
    assert sidecar["row"] == 3
    assert sidecar["caption"] == "a red 3"
    assert sidecar["seed"] == 0
    assert sidecar["step"] == 20
    assert len(sidecar["weights"]) == 2  # generator and the codec under it
    assert Image.open(written[-1]).width > 64


def test_fps_changes_the_speed_only(run, tmp_path):
    plain, fast = (
        write_samples(run, ["a 3"], out=tmp_path / name, fps=fps, device="cpu")[0]
        for name, fps in (("plain", None), ("fast", 12.5))
    )
    assert (read_clip(plain)[1], read_clip(fast)[1]) == (pytest.approx(8, rel=0.1), pytest.approx(12.5))
    assert (read_clip(plain)[0] == read_clip(fast)[0]).all()
    sidecar = json.loads(fast.with_suffix(".json").read_text())
    assert sidecar["drawn"]["fps"] == sidecar["fps"] == 12.5
    words = shlex.split(sidecar["command"])
    assert words[words.index("--fps") + 1] == "12.5"
    assert "--fps" not in json.loads(plain.with_suffix(".json").read_text())["command"]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"fps": 0.0}, "--fps 0 is not a speed: use a number above 0"),
        ({"fps": float("nan")}, "--fps nan is not a speed"),
        ({"fps": 60.0}, "--fps 60 is faster than a GIF can play, 50: add --format mp4"),
        ({"fps": 8.0, "frames": 1}, "--fps 8 has no effect on a picture"),
        ({"fps": 8.0, "format": "png"}, "--fps 8 has no effect with --format png"),
    ],
)
def test_fps_without_effect_is_refused(run, tmp_path, call, why):
    with pytest.raises(InputError, match=why):
        write_samples(run, ["a 3"], out=tmp_path / "new", device="cpu", **call)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "flags", [{"steps": 2, "options": ["sample.steps=3"]}, {"guidance": 2.0, "options": ["sample.guidance=1"]}]
)
def test_an_option_that_is_set_twice_is_refused(run, tmp_path, flags):
    with pytest.raises(ConfigError, match=r"sample\.(steps|guidance) is set twice, by --(steps|guidance) too"):
        write_samples(run, ["a 3"], out=tmp_path, device="cpu", **flags)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told(run, tmp_path, monkeypatch):
    monkeypatch.setattr("kineograph.sample.command.TELL_EVERY", 0)
    told = []
    write_samples(run, ["a 3", "a 5"], out=tmp_path, device="cpu", note=told.append)
    assert told == ["drawing 2 samples on cpu", "1 of 2 samples are drawn", "2 of 2 samples are drawn"]


def test_a_stage_of_a_run_is_not_the_run(run, tmp_path):
    with pytest.raises(
        InputError, match=r"generator is a part of the run .*clips: name the run, and --stage generator"
    ):
        write_samples(run / "generator", ["a 3"], out=tmp_path, device="cpu")


def test_nothing_is_overwritten(run, tmp_path):
    first = write_samples(run, ["a 3"], out=tmp_path, seed=1, device="cpu")
    before = first[0].read_bytes()
    second = write_samples(run, ["a 3"], out=tmp_path, seed=2, device="cpu")
    assert first[0] != second[0]
    assert first[0].read_bytes() == before != second[0].read_bytes()


def test_the_sidecars_command_draws_the_same_bytes(run, tmp_path):
    start = write_samples(run, ["a 5"], out=tmp_path / "prime", frames=1, device="cpu")[0]
    call = {
        "count": 2,
        "seed": 7,
        "guidance": 2.5,
        "frames": 3,
        "size": "16x24",
        "prime": start,
        "negative": "it's dull",
        "format": "png",
    }
    settings = ["sample.palette=[0.5, 0.25]"]
    written = write_samples(run, ["a 3", 'say "hi"'], out=tmp_path / "one", options=settings, device="cpu", **call)
    sidecar = json.loads(written[2].with_suffix(".json").read_text())
    words = shlex.split(sidecar["command"])
    assert words[:2] == ["kineo", "sample"]
    repeated = write_samples(**_parse(words[2:], tmp_path / "two"), device="cpu")
    assert [path.name for path in repeated] == [path.name for path in written]
    assert [path.read_bytes() for path in repeated] == [path.read_bytes() for path in written]
    plain = write_samples(run, ["a 3", 'say "hi"'], out=tmp_path / "three", count=2, seed=7, format="png", device="cpu")
    assert plain[2].read_bytes() != written[2].read_bytes()


def _parse(words: list[str], out) -> dict:
    """As the command line does."""
    call: dict = {"options": [], "out": out}
    plain = []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            plain.append(word)
            continue
        name, value = word[2:], words.pop(0)
        if name == "set":
            call["options"].append(value)
        elif name != "out":
            call[name] = int(value) if name in ("seed", "count", "frames") else value
    return {"run": plain[0], "prompts": plain[1:], **call}


def test_formats(run, tmp_path):
    assert write_samples(run, ["a 3"], out=tmp_path, format="png", device="cpu")[0].suffix == ".png"
    with pytest.raises(InputError, match="--format bmp"):
        write_samples(run, ["a 3"], out=tmp_path / "none", format="bmp", device="cpu")
    with pytest.raises(ConfigError, match=r"train\.lr"):
        write_samples(run, ["a 3"], out=tmp_path / "none", options=["train.lr=1"], device="cpu")
    with pytest.raises(InputError, match="--size big"):
        write_samples(run, ["a 3"], out=tmp_path / "none", size="big", device="cpu")
    assert not (tmp_path / "none").exists()


def test_pictures_are_png_in_the_run_folder_by_default(tmp_path):
    run = make_run(tmp_path / "pictures")
    written = write_samples(run.path, [""], device="cpu")
    assert written == [run.path / "drawn" / "unconditional-0001.png"]
    drawn = Sampler.open(run.path, device="cpu").sample("")
    saved = read_clip(written[0])[0].float() / 255
    torch.testing.assert_close(saved, drawn.pixels[0], rtol=0, atol=0.51 / 255)
    assert drawn.save(tmp_path / "again")[0].read_bytes() == written[0].read_bytes()
