"""What is shown while a stage trains: samples, inputs and reconstructions with their texts, or latents that nothing decodes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kineograph.core.errors import ConfigError, InputError, RunFailed
from kineograph.core.run_folder import RunFolder
from kineograph.media.clips import write_clip
from kineograph.sample.sampler import Sampler
from tests.media.reading import read_clip
from tests.run import clip_tasks
from tests.run.clip_tasks import train
from tests.sample.tiny_task import TinyGenerator

STAGES = {
    "codec": {"task": "tests.run.clip_tasks.BlockCodec", "train": {"steps": 1, "sample_every": 0}},
    "generator": {"task": "tests.run.clip_tasks.LatentGenerator", "codec": "codec"},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


def shown(tmp_path: Path, name: str = "run", **changes: Any) -> Path:
    keys = {"data__fps": 6, "data__stills": 0.0, "train__sample_every": 3, "train__samples": 3}
    return train(tmp_path, name, stages=STAGES, **(keys | changes)) / "generator"


def test_samples_inputs_and_reconstructions_are_files_with_their_text(tmp_path: Path) -> None:
    stage = shown(tmp_path, train__format="mp4", train__grids=["validation"], train__caption_prefix="ours: ")
    samples = stage / "samples" / "step-00000003"
    listed = json.loads((samples / "prompts.json").read_text())
    assert len(listed) == 3
    assert (samples / "validation-grid.txt").read_text() == "".join(f"ours: {row['prompt']}\n" for row in listed)
    for row in listed:
        clip, fps = read_clip(samples / row["file"])
        assert clip.shape[0] == 5 and fps == 6
        assert (samples / row["file"]).with_suffix(".txt").read_text() == row["prompt"] + "\n"
    validation = stage / "validation" / "step-00000003"
    for number, row in enumerate(listed):  # prompts are the captions of these inputs
        clip, fps = read_clip(validation / f"{number:03d}-input.mp4")
        again, _ = read_clip(validation / f"{number:03d}-reconstruction.mp4")
        assert fps == 6 and clip.shape == again.shape == (5, 3, 16, 16)
        assert torch.equal(read_clip(stage / "samples" / "real" / row["file"])[0], clip)
        assert (validation / f"{number:03d}.txt").read_text() == row["prompt"] + "\n"
    assert (stage / "validation" / "step-00000003.gif").exists()


def test_step_0_is_drawn_on_request_and_callbacks_get_the_clips(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    keys = {"train__sample_first": True, "train__trackers": ["hub"], "train__log_checkpoints": True}
    stage = shown(tmp_path, on_log=seen.append, **keys)
    assert sorted(path.name for path in (stage / "samples").glob("step-*")) == ["step-00000000", "step-00000003"]
    drawn = [record for record in seen if record["split"] == "samples" and record["stage"] == "generator"]
    assert [record["step"] for record in drawn] == [0, 3]
    listed = json.loads((stage / "samples" / "step-00000003" / "prompts.json").read_text())
    assert [clip["caption"] for clip in drawn[1]["samples"]] == [row["prompt"] for row in listed]
    for clip, row in zip(drawn[1]["samples"], listed, strict=True):
        written, fps = read_clip(stage / "samples" / "step-00000003" / row["file"])
        assert clip["pixels"].shape == written.shape and clip["fps"] == fps == 6
    assert not [record for record in seen if record["split"] == "train" and "samples" in record]
    hub = stage.parent / "hub"
    newest = hub / "generator" / "latest"
    assert {path.name for path in newest.iterdir()} == {
        path.name for path in (stage / "checkpoints" / "step-00000003").iterdir()
    }
    again = shown(tmp_path, "again", stages__generator__init=f"file://{newest}")  # a hub folder is a start
    assert (again / "checkpoints").is_dir()


def test_each_clip_keeps_its_own_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kineograph.stage.data import StageData

    inner = StageData.fixed_batch

    def mixed(self: StageData, count: int, split: Any = "validation") -> Any:
        batch = inner(self, count, split)
        batch.fps = torch.tensor([4.0, 8.0, 12.5][:count])
        return batch

    monkeypatch.setattr(StageData, "fixed_batch", mixed)
    stage = shown(tmp_path, train__format="gif")
    speeds = [read_clip(stage / "validation" / "step-00000003" / f"{number:03d}-input.gif")[1] for number in range(3)]
    assert speeds == pytest.approx([4.0, 8.0, 12.5], rel=0.02)
    samples = stage / "samples" / "step-00000003"  # drawn for the captions of these items
    files = [row["file"] for row in json.loads((samples / "prompts.json").read_text())]
    assert [read_clip(samples / file)[1] for file in files] == pytest.approx([4.0, 8.0, 12.5], rel=0.02)


def test_rows_are_drawn_a_few_at_a_time_and_alike(tmp_path: Path) -> None:
    asked: list[int] = []
    inner = clip_tasks.LatentGenerator.sample

    def counted(self: Any, prompts: Any, options: Any) -> torch.Tensor:
        asked.append(len(prompts))
        return inner(self, prompts, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip_tasks.LatentGenerator, "sample", counted)
        small = shown(tmp_path, "small", train__accumulate=8, train__format="gif")
    assert max(asked) == 2  # 16 / 8, as training takes them
    large = shown(tmp_path, "large", train__format="gif")
    for path in (small / "samples").glob("*/*-0.gif"):
        assert torch.equal(read_clip(path)[0], read_clip(large / path.relative_to(small))[0])


def test_latents_alone_decode_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decode", "reconstruct"):
        monkeypatch.setattr(clip_tasks.BlockCodec, name, lambda *given: pytest.fail("decoded"))
    stages = {**STAGES, "codec": {**STAGES["codec"], "skip": False}}
    monkeypatch.setattr(
        clip_tasks.BlockCodec, "forward", lambda self, batch, noise: self.gain.square() * torch.ones(len(batch))
    )
    run = train(
        tmp_path, stages=stages, data__stills=0.0, train__sample_every=3, train__samples=3, train__show="latents",
        train__validate_every=0, stages__codec__train__show="media",
    ) / "generator"  # fmt: skip
    out = run / "samples" / "step-00000003"
    found = load_file(out / "latents.safetensors")
    assert found["samples"].shape == (3, 3, 1, 2, 2)  # B t c h w
    assert found["inputs"].shape == (3, 3, 2, 2, 2)  # mean and log-variance
    prompts = json.loads((out / "prompts.json").read_text())
    assert [row["prompt"] + "\n" for row in prompts] == (out / "latents.txt").read_text().splitlines(keepends=True)
    assert {path.name for path in out.iterdir()} == {"latents.safetensors", "latents.txt", "prompts.json"}


def test_the_same_prompts_and_noise_every_time(tmp_path: Path) -> None:
    run = shown(tmp_path, train__show="latents", train__steps=6, train__lr=0.0)
    first, second = (load_file(run / "samples" / f"step-0000000{step}" / "latents.safetensors") for step in (3, 6))
    assert torch.equal(first["samples"], second["samples"]) and torch.equal(first["inputs"], second["inputs"])


def test_a_task_without_latents_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.show=latents: .*use media"):
        train(tmp_path, train__sample_every=3, train__show="latents")
    with pytest.raises(ConfigError, match=r"train\.grids=\['validation'\] cannot be drawn"):
        shown(tmp_path, train__show="latents", train__grids=["validation"])
    assert not (tmp_path / "run").exists()


def test_what_pictures_took_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("kineograph.run.previews.release_memory", lambda: asked.append(True))
    shown(tmp_path)
    assert asked == [True]


def test_training_goes_on_where_pictures_find_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shown(tmp_path, "plain")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore advice")

    monkeypatch.setattr("kineograph.run.previews.Previews._draw_reconstructions", full)
    lines: list[str] = []
    stage = shown(tmp_path, lines=lines)
    told = "\n".join(lines)
    assert "step 3: not all samples were drawn, since the GPU has no memory left beside training, which goes on" in told
    assert "set train.show=latents" in told and "Tried to allocate 9 GiB.)" in told and "More advice" not in told
    assert (stage / "samples" / "step-00000003" / "prompts.json").exists()  # what was drawn before
    assert not (stage / "validation").exists()
    first, second = (load_file(next(path.glob("checkpoints/step-*/model.safetensors"))) for path in (plain, stage))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("animates", [False, True])
def test_prompts_of_ones_own_come_with_a_picture_only_where_one_is_animated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, animates: bool
) -> None:
    beside: list[Any] = []
    inner = clip_tasks.LatentGenerator.sample

    def heard(self: Any, prompts: Any, options: Any) -> torch.Tensor:
        beside.append(prompts.batch)
        return inner(self, prompts, options)

    monkeypatch.setattr(clip_tasks.LatentGenerator, "sample", heard)
    monkeypatch.setattr(clip_tasks.LatentGenerator, "can_animate", lambda task: animates, raising=False)
    shown(tmp_path, prompts=["a red 3", "a blue 7"])
    assert beside and all((batch.pixels is not None) == animates for batch in beside)
    assert all(batch.captions == ["a red 3", "a blue 7"] for batch in beside)


TINY = {"generator": {"task": "tests.sample.tiny_task.TinyGenerator"}}


def test_prompts_with_pictures_of_their_own_are_drawn_as_kineo_sample_draws_them(tmp_path: Path) -> None:
    picture = write_clip(tmp_path / "light.png", torch.full((1, 3, 16, 16), 0.9), 8)
    prompts = ["a red 3", {"prompt": "a blue 7", "image": str(picture), "seed": 3}, {"prompt": "a 5", "frames": 3}]
    keys = {"data__fps": 8, "data__channels": 3, "train__sample_every": 3, "train__samples": 4, "stages": TINY}
    run = train(tmp_path, prompts=prompts, **keys)
    assert RunFolder(run).config()["prompts"] == prompts
    samples = run / "generator" / "samples" / "step-00000003"
    listed = json.loads((samples / "prompts.json").read_text())
    clips = [read_clip(samples / row.pop("file"))[0] for row in listed]
    assert listed == [{"prompt": "a red 3"}, *prompts[1:]]
    assert [len(clip) for clip in clips] == [5, 5, 3] and clips[1][0].float().mean() > 0.85 * 255
    (path,) = Sampler.open(run, device="cpu").sample("a blue 7", seed=3, prime=picture).save(tmp_path / "alone")
    assert torch.equal(clips[1], read_clip(path)[0])
    assert (samples / "grid.gif").exists() and (samples / "online-beside-ema.gif").exists()
    names = [row["file"] for row in json.loads((samples / "prompts.json").read_text())]
    assert sorted(path.name for path in (samples / "online").iterdir()) == sorted(names)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"prompt": "a 3", "image": "gone.png"}, r"prompts\.1: .*gone\.png does not exist: give a picture"),
        ({"prompt": "a 3", "colour": "red"}, r"prompts\.1: unknown key colour: known here"),
        ({"prompt": "a 3", "scene": 1}, r"prompts\.1: scene=1 has an effect in a story only: remove it"),
        ({"prompt": "a 3", "mask": "x.png"}, r"prompts\.1: mask needs the picture to inpaint: add image"),
        ({"prompt": "a 3", "frames": 4}, r"prompts\.1: frames=4 does not fit pairs: use 2k \+ 1"),
    ],
)
def test_prompts_that_cannot_be_drawn_are_refused_before_training(tmp_path: Path, prompt: Any, why: str) -> None:
    stages = {
        "codec": {"task": "tests.sample.tiny_task.PairCodec", "train": {"steps": 1, "sample_every": 0}},
        "generator": {"task": "tests.sample.tiny_task.Counting", "codec": "codec"},
    }
    with pytest.raises(InputError, match=why):
        train(tmp_path, prompts=["a 7", prompt], stages=stages, train__sample_every=3)
    assert not (tmp_path / "run").exists()


def test_samples_are_drawn_as_many_at_a_time_as_the_run_says_and_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    inner = TinyGenerator.sample

    def counted(self: Any, prompts: Any, options: Any) -> torch.Tensor:
        asked.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return inner(self, prompts, options)

    monkeypatch.setattr(TinyGenerator, "sample", counted)
    lines: list[str] = []
    keys = {"data__channels": 3, "train__sample_every": 3, "train__samples": 4, "stages": TINY, "train__ema__decay": 0}
    train(tmp_path, lines=lines, **keys)
    assert asked == [4, 2, 2]
    told = "generator: out of memory with 4 rows at a time: going on with 2 (set sample.batch to 2 or less)"
    assert told in lines
    asked.clear()
    train(tmp_path, "one", sample__batch=1, **keys)
    assert asked == [1] * 4


@pytest.mark.parametrize(("apart", "times"), [(0.0, 5), (60.0, 2)])
def test_curves_are_drawn_at_the_end_of_each_stage_and_between_only_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: float, times: int
) -> None:
    drawn = []
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: drawn.append(files))
    monkeypatch.setattr("kineograph.run.previews.CURVES_EVERY", apart)
    shown(tmp_path, train__steps=3, train__sample_every=1)
    assert len(drawn) == times  # of the codec's stage one, of the generator's one a showing and one at its end


# Encoding --------------------------------------------------------------------------------------------------------


def test_nobody_waits_while_the_first_process_encodes(tmp_path: Path) -> None:
    """Its encoder stands still until both have begun the step that follows the pictures."""
    from kineograph.run import previews
    from kineograph.train.stepper import Stepper
    from tests.train.ranks import run_ranks

    deadline = time.monotonic() + 60

    def work(rank: int) -> list[str]:
        seen: list[str] = []
        inner_step, inner_write = Stepper.step, previews.write_clip

        def step(self: Stepper, number: int, *given: Any) -> Any:
            if number == 3:
                seen.append("step")
                (tmp_path / f"went-on-{rank}").touch()
            return inner_step(self, number, *given)

        def write(*given: Any) -> Path:
            while not all((tmp_path / f"went-on-{other}").exists() for other in range(2)):
                assert time.monotonic() < deadline, "the others wait"
                time.sleep(0.01)
            seen.append("clip")
            return inner_write(*given)

        Stepper.step, previews.write_clip = step, write  # type: ignore[method-assign,assignment]
        shown(tmp_path / str(rank), train__steps=4, train__grids=["train"])
        return seen

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    first, second = run_ranks(2, work)
    assert first[0] == "step" and "clip" in first
    assert second == ["step"]
    samples = tmp_path / "0" / "run" / "generator" / "samples" / "step-00000003"
    assert (samples / "grid.gif").exists() and (samples / "train-grid.gif").exists()


def test_a_phase_is_finished_when_its_pictures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose encoder fails comes back into the phase, and draws them."""
    from kineograph.run import previews
    from kineograph.train import checkpoint

    def full(*given: Any) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(previews, "write_clip", full)
        with pytest.raises(RunFailed, match=r"cannot write to .*No space left on device"):
            shown(tmp_path, train__save_every=3, train__steps=6)
    found = checkpoint.latest(tmp_path / "run" / "generator" / "checkpoints")
    assert found is not None and (found.step, found.phase) == (3, "sample")
    stage = shown(tmp_path, train__save_every=3, train__steps=6)
    for step in (3, 6):
        assert (stage / "samples" / f"step-{step:08d}" / "grid.gif").exists()
