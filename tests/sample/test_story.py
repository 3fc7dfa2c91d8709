"""Stories: frames continue across scenes, one scene in memory, no partial files, repeated from the sidecar."""

from __future__ import annotations

import json
import shlex
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph import cli
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.prompt import Prompt
from kineograph.media.clips import write_clip
from kineograph.sample import story as stories
from kineograph.sample.command import write_samples, write_story
from kineograph.sample.prompt_file import read_prompts
from kineograph.sample.sampler import Sampler
from tests.media.reading import read_clip
from tests.sample.tiny_task import Counting, make_run

SCENES = ["a red 3 moves left", "it stops", "it moves on"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "clips"
    return make_run(place, frames=7, generator="Counting", codec_task="PairCodec").path


@pytest.fixture(scope="module")
def sampler(run) -> Sampler:
    return Sampler.open(run, device="cpu")


def numbers(pixels: torch.Tensor) -> list[int]:
    """What Counting wrote into the frames."""
    return (pixels[:, 0].flatten(1).mean(1) * 255).round().int().tolist()


def test_frames_continue_across_scenes(sampler):
    parts = list(sampler.story(SCENES, overlap=3))
    assert [len(part) for part in parts] == [7, 4, 4]
    assert numbers(torch.cat(parts)) == list(range(15))
    for caption, part in zip(SCENES, parts):
        assert part[:, 1].mul(255).round().unique().tolist() == [len(caption)]


@pytest.mark.parametrize("overlap", [1, 3, 5])
def test_every_overlap_that_fits(sampler, overlap):
    """5 of 7: a scene then shows fewer new frames than the next one begins from."""
    story = sampler.story(SCENES, overlap=overlap)
    assert numbers(torch.cat(list(story))) == list(range(story.total))
    assert story.total == 7 + 2 * (7 - overlap)
    assert story.frame_range(2) == range(story.total - (7 - overlap), story.total)


def test_the_first_scene_is_what_sample_draws_and_others_have_noise_of_their_own(sampler):
    first, second, third = sampler.story(["it stops"] * 3, seed=5)
    assert torch.equal(first, sampler.sample("it stops", seed=5).pixels[0])
    noise = [part[0, 2, 0, 0].item() for part in (first[-4:], second, third)]
    assert len(set(noise)) == 3
    assert torch.equal(torch.cat([first, second, third]), torch.cat(list(sampler.story(["it stops"] * 3, seed=5))))
    assert not torch.equal(first, next(iter(sampler.story(["it stops"], seed=6))))


def test_the_overlap_defaults_to_that_of_the_stage(sampler):
    assert sampler.story(SCENES).overlap == 3
    assert sampler.story(SCENES, options={"sample.overlap": 5}).overlap == 5
    with pytest.raises(InputError, match=r"sample\.overlap is set twice, by --overlap too"):
        sampler.story(SCENES, overlap=1, options={"sample.overlap": 5})
    story = sampler.story(SCENES, overlap=1)
    # Scenes longer than the trained length continue themselves by the same overlap.
    assert story.overlap == story.options.overlap == 1
    assert sampler.story(SCENES, frames=9, overlap=5).total == 9 + 2 * 4


def test_mistakes_are_refused_before_drawing(sampler, monkeypatch):
    monkeypatch.setattr(Counting, "sample", lambda *_: pytest.fail("something was drawn"))
    with pytest.raises(InputError, match=r"--overlap=4 does not fit scenes of 7 frames: use 1, 3, 5$"):
        sampler.story(SCENES, overlap=4)
    for overlap in (0, 7, 9):
        with pytest.raises(InputError, match=f"--overlap={overlap} does not fit"):
            sampler.story(SCENES, overlap=overlap)
    with pytest.raises(
        InputError, match=r"--overlap=7 does not fit scenes of 21 frames, drawn 7 at a time: use 1, 3, 5$"
    ):  # a window of 7 would draw nothing
        sampler.story(SCENES, overlap=7, frames=21)
    with pytest.raises(InputError, match=r"sample\.overlap=3 does not fit scenes of 3 frames: use 1 with --overlap"):
        sampler.story(SCENES, frames=3)
    with pytest.raises(InputError, match=r"draws 1 frame at a time, too few to continue a clip: raise --frames"):
        sampler.story(SCENES, frames=1)
    with pytest.raises(ConfigError, match="frames=8 does not fit pairs: use 2k"):
        sampler.story(SCENES, frames=8)
    with pytest.raises(ConfigError, match="frames=8 does not fit pairs: use 2k"):
        sampler.sample(SCENES, frames=8)
    with pytest.raises(InputError, match="list of captions"):
        sampler.story("a 3")
    with pytest.raises(InputError, match="at least one caption"):
        sampler.story([])
    for wrong in ("", "# later", "a 3\nmoves", 3):
        with pytest.raises(InputError, match="scene 2, "):
            sampler.story(["a 3", wrong])


def test_tasks_that_cannot_continue_are_refused(tmp_path):
    plain = Sampler.open(make_run(tmp_path / "run", generator="OptionlessGenerator", codec=False).path, device="cpu")
    with pytest.raises(InputError, match=r"a story needs a generator that continues.*OptionlessGenerator does not"):
        plain.story(["a 3"])
    with pytest.raises(InputError, match=r"--prime needs a generator that continues"):
        plain.sample("a 3", prime=torch.zeros(1, 3, 32, 32))


def test_the_overlap_defaults_to_half_a_scene(tmp_path):
    plain = Sampler.open(make_run(tmp_path / "run", frames=4, codec=False).path, device="cpu")
    assert plain.story(SCENES).overlap == 2
    assert sum(len(part) for part in plain.story(SCENES)) == 4 + 2 + 2


def test_a_story_continues_a_given_clip(sampler):
    start = torch.zeros(3, 3, 32, 32)
    start[:, 0] = torch.tensor([40, 41, 42])[:, None, None] / 255
    parts = list(sampler.story(SCENES, prime=start, overlap=1))
    assert torch.equal(parts[0], sampler.sample(SCENES[0], prime=start).pixels[0])
    assert numbers(torch.cat(parts))[3:] == list(range(43, 43 + 4 + 6 + 6))


def test_each_scene_has_its_own_frames_and_overlap(sampler):
    scenes = [
        Prompt(prompt="a"),
        Prompt(prompt="bb", frames=3, overlap=1),
        Prompt(prompt="ccc", frames=13, overlap=5, seed=9),
    ]
    story = sampler.story([*scenes, "dddd"], overlap=3)
    parts = list(story)
    assert [len(part) for part in parts] == [7, 2, 8, 4] and story.total == 21
    assert [story.frame_range(scene) for scene in range(4)] == [range(7), range(7, 9), range(9, 17), range(17, 21)]
    assert numbers(torch.cat(parts)) == list(range(21))
    assert [scene.options.overlap for scene in story.scenes] == [3, 1, 5, 3]
    # A scene with a seed has the noise of a clip drawn alone with it.
    alone = sampler.sample("ccc", seed=9, frames=13).pixels[0]
    assert torch.equal(parts[2][:, 2], alone[5:, 2])


@pytest.mark.parametrize(
    ("scenes", "why"),
    [
        ([{"prompt": "a", "overlap": 1}], "line 1: overlap=1 has no effect: the first scene continues none; remove it"),
        (
            [{"prompt": "a"}, {"prompt": "b", "overlap": 2}],
            "line 2: overlap=2 does not fit scenes of 7 frames: use 1, 3, 5$",
        ),
        (
            [{"prompt": "a"}, {"prompt": "b", "frames": 3, "overlap": 3}],
            "line 2: overlap=3 does not fit scenes of 3 frames: use 1",
        ),
        ([{"prompt": "a"}, {"prompt": "b", "frames": 8}], "line 2: frames=8 does not fit pairs"),
        (
            [{"prompt": "a", "frames": 3}, {"prompt": "b", "overlap": 5}],
            "line 2: overlap=5 is more than the 3 frames before this scene: lower overlap, or lengthen them",
        ),
        ([{"prompt": "a"}, {"prompt": "b", "image": "start.png"}], "line 2: image has no effect: this scene continues"),
        ([{"prompt": "a"}, {"prompt": "b", "scene": 1}], r"line 2: scene=1 is the 2\. scene of the story"),
        ([{"prompt": "a"}, {"prompt": "b", "negative": "c"}], "line 2: negative has no effect at guidance=1"),
    ],
)
def test_scenes_that_cannot_be_drawn_name_their_line(run, tmp_path, scenes, why):
    write_clip(tmp_path / "start.png", torch.full((1, 3, 32, 32), 0.5), 8)
    path = tmp_path / "scenes.jsonl"
    path.write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    with pytest.raises((InputError, ConfigError), match=rf"scenes\.jsonl, {why}"):
        write_story(run, path, out=tmp_path / "none", device="cpu")
    assert not (tmp_path / "none").exists()


def test_a_prompts_file_holds_stories_beside_clips(run, tmp_path, capsys):
    write_clip(tmp_path / "start.png", torch.full((1, 3, 32, 32), 40 / 255), 8)
    lines = [
        {"prompt": "a clip"},
        {"prompt": "one", "scene": 1, "image": "start.png"},
        {"prompt": "two", "scene": 2, "frames": 5, "overlap": 3},
        {"prompt": "another", "scene": 1},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = write_samples(run, None, prompts_file=path, out=tmp_path / "out", device="cpu")
    names = [
        "a-clip-0001.gif",
        "story-one-0001.gif",
        "story-one-0001.png",
        "story-another-0001.gif",
        "story-another-0001.png",
    ]
    assert [path.name for path in written] == names
    assert [len(read_clip(path)[0]) for path in written if path.suffix == ".gif"] == [7, 9, 7]
    sidecar = json.loads(written[1].with_suffix(".json").read_text())
    assert sidecar["scenes"][1]["overlap"] == 3 and sidecar["scenes"][1]["frames"] == [8, 9]
    assert sidecar["scenes"][0]["image"] == str(tmp_path / "start.png") and len(sidecar["prime"]["sha256"]) == 64
    path.unlink()
    with pytest.raises(SystemExit) as end:
        cli.main([*shlex.split(sidecar["command"])[1:], "--device", "cpu"])
    assert end.value.code == 0
    again = tmp_path / "out" / "story-one-0002.gif"
    assert again.read_bytes() == written[1].read_bytes()
    with pytest.raises(InputError, match="--format png is not supported here: use gif or mp4"):
        write_samples(run, None, prompts_file=again.with_suffix(".jsonl"), format="png", device="cpu")


# Files -----------------------------------------------------------------------------------------------------------


def test_the_sidecar_repeats_the_video(run, tmp_path, capsys):
    scenes = tmp_path / "scenes.txt"
    scenes.write_text("# a story\n\n" + "\n".join(SCENES) + "\n")
    start = write_clip(tmp_path / "start.png", torch.full((1, 3, 32, 32), 0.5), 8)
    written = write_story(
        run, scenes, out=tmp_path / "one", overlap=5, seed=3, frames=9, fps=10, prime=start, negative="it's dull", guidance=2.0,
        options=["sample.palette=[0.5]"], ema=False, format="mp4", device="cpu",
    )  # fmt: skip
    video = written[0]
    assert [path.name for path in written] == ["story-a-red-3-moves-left-0001.mp4", "story-a-red-3-moves-left-0001.png"]
    assert {path.suffix for path in video.parent.iterdir()} == {".mp4", ".png", ".json", ".txt"}
    assert len(read_clip(video)[0]) == 9 + 2 * 4
    sidecar = json.loads(video.with_suffix(".json").read_text())
    assert [scene["caption"] for scene in sidecar["scenes"]] == SCENES
    assert [scene["frames"] for scene in sidecar["scenes"]] == [[1, 9], [10, 13], [14, 17]]
    assert sidecar["scenes"][2]["seconds"] == [13 / 10, 17 / 10]
    assert sidecar["drawn"] == {"frames": 17, "size": [32, 32], "channels": 3, "fps": 10}
    assert (sidecar["overlap"], sidecar["frames"], sidecar["seed"], sidecar["ema"]) == (5, 9, 3, False)
    assert len(sidecar["weights"]) == 2
    assert sidecar["options"]["guidance"] == 2.0
    assert sidecar["prime"]["frames"] == 1
    scenes.unlink()  # the sidecar needs none but its own files
    words = shlex.split(sidecar["command"])
    assert words[:2] == ["kineo", "story"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main([*words[1:], "--device", "cpu"])
    assert end.value.code == 0
    again = [tmp_path / "one" / path.name.replace("0001", "0002") for path in written]
    assert capsys.readouterr().out.split() == [str(path) for path in again]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]
    assert video.with_suffix(".txt").read_text().splitlines() == SCENES


def test_python_saves_a_gif_that_is_exact(sampler, tmp_path):
    story = sampler.story(SCENES, overlap=3)
    video, sheet = story.save(tmp_path / "new" / "folder")
    pixels, fps = read_clip(video, 3)
    assert fps == 8
    assert numbers(pixels / 255) == list(range(15))
    wide, high = Image.open(sheet).size
    assert wide > 7 * 96
    assert high > 3 * 96
    assert story.save(tmp_path / "new" / "folder")[0] != video


def test_long_stories_keep_one_scene_in_memory(sampler, tmp_path, monkeypatch):
    """200 scenes: whenever a scene is drawn, no frames of earlier ones are alive but the overlap."""
    drawn: list[weakref.ref] = []
    alive: list[int] = []
    draw = Counting.sample

    def watched(self, prompts, options):
        alive.append(sum(1 for tensor in drawn if tensor() is not None))
        pixels = draw(self, prompts, options)
        drawn.append(weakref.ref(pixels.untyped_storage()))
        return pixels

    monkeypatch.setattr(Counting, "sample", watched)
    heard: list[str] = []
    video, sheet = sampler.story([f"scene {number}" for number in range(200)]).save(tmp_path, "gif", heard.append)
    assert len(alive) == 200
    assert max(alive) == 0
    sidecar = json.loads(video.with_suffix(".json").read_text())
    shown = sidecar["sheet"]["scenes"]
    assert len(shown) == stories.SHEET
    assert (shown[0], shown[-1]) == (1, 200)
    assert Image.open(sheet).height < stories.SHEET * 140
    assert heard[0] == "scene 1 of 200, frames 1 to 7: scene 0"
    assert heard[-1] == "the sheet shows 24 of 200 scenes"
    assert sidecar["drawn"]["frames"] == 7 + 199 * 4 == len(read_clip(video)[0])


def test_views_do_not_keep_scenes_alive(sampler):
    """What a scene passes on owns no more memory than the overlap."""
    given: list[int] = []
    draw = Counting.sample

    class Watched(Counting):
        def sample(self, prompts, options):
            if prompts.prime is not None:
                given.append(prompts.prime.untyped_storage().nbytes())
            return draw(self, prompts, options)

    story = sampler.story(SCENES, overlap=3)
    before = sampler.task.__class__
    sampler.task.__class__ = Watched
    try:
        list(story)
    finally:
        sampler.task.__class__ = before
    assert given == [3 * 3 * 32 * 32 * 4] * 2


@pytest.mark.parametrize("format", ["gif", "mp4"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_story_leaves_nothing(sampler, tmp_path, monkeypatch, format, error):
    draw = Counting.sample

    def dies(self, prompts, options):
        if prompts.captions == [SCENES[2]]:
            # Only a hidden temporary file while the story is drawn.
            assert [path.name[0] for path in tmp_path.iterdir()] in ([], ["."])
            raise error
        return draw(self, prompts, options)

    monkeypatch.setattr(Counting, "sample", dies)
    with pytest.raises(error):
        sampler.story(SCENES).save(tmp_path, format)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_beside_the_video_leaves_no_empty_video(sampler, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(stories, "write_json", full)
    with pytest.raises(OSError, match="disk full"):
        sampler.story(SCENES).save(tmp_path)
    assert not list(tmp_path.glob("*.gif"))


def test_a_model_without_captions_is_refused(sampler, monkeypatch):
    monkeypatch.setattr(sampler.task, "reads", frozenset({"pixels"}))
    with pytest.raises(
        InputError,
        match=r"a story needs captions, and .* was trained without: draw a long clip with kineo sample --frames N",
    ):
        sampler.story(SCENES)


def read_scenes(path):
    return [scene.prompt for scene in read_prompts(path, "scene")]


def test_scenes_files(tmp_path):
    path = tmp_path / "scenes.txt"
    path.write_bytes("\ufeffein rotes Ä\r\n\r\n  # later\r\n  數字 7  ".encode())
    assert read_scenes(path) == ["ein rotes Ä", "數字 7"]
    path.write_bytes("a 3\u2028moves\r\nit stops\r\n".encode())
    assert read_scenes(path) == stories.check_scenes(read_scenes(path)) == ["a 3\u2028moves", "it stops"]
    path.write_text("# only\n\n")
    with pytest.raises(InputError, match="holds no scenes"):
        read_scenes(path)
    with pytest.raises(InputError, match=r"gone\.txt does not exist"):
        read_scenes(tmp_path / "gone.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_scenes(tmp_path)
    for data in (b"\xff\xd8\xff\xe0", np.arange(9, dtype=np.float32).tobytes()):
        path.write_bytes(data)
        with pytest.raises(InputError, match="is not UTF-8 text"):
            read_scenes(path)


def test_mistakes_write_nothing(run, tmp_path):
    scenes = tmp_path / "scenes.txt"
    scenes.write_text("a 3\n")
    out = tmp_path / "none"
    with pytest.raises(InputError, match="--format png is not supported here: use gif or mp4"):
        write_story(run, scenes, out=out, format="png", device="cpu")
    with pytest.raises(ConfigError, match=r"--set train\.lr=1"):
        write_story(run, scenes, out=out, options=["train.lr=1"], device="cpu")
    with pytest.raises(InputError, match="--overlap=2"):
        write_story(run, scenes, out=out, overlap=2, device="cpu")
    assert not out.exists()
