"""Runs on clips: stills beside them, the cache, pictures while training, and prompts."""

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
from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError, KineoError
from kineograph.data.digit_captions import parse_caption
from kineograph.run.cache import cache_run
from kineograph.run.previews import _trim_padding
from kineograph.train import checkpoint
from tests.run import clip_tasks
from tests.run.clip_tasks import BASE, train


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves take longer than everything else here, and an endless source has many captions."""
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
    monkeypatch.setattr("kineograph.stage.data.VOCABULARY_CAPTIONS", 200)


def weights(run: Path, stage: str) -> dict[str, torch.Tensor]:
    return checkpoint.select(run / stage / "checkpoints").tensors("model")


# The cache ---------------------------------------------------------------------------------------------------------


def test_a_cache_of_stills_and_clips_is_what_pixels_give(tmp_path: Path) -> None:
    direct = train(tmp_path, "direct")
    seen = list(clip_tasks.SEEN)
    cached = train(tmp_path, "cached", stages__generator__cache=True)
    again = list(clip_tasks.SEEN)
    assert len(seen) == len(again) == 3
    for (tokens, mask, captions), (from_disk, its_mask, its_captions) in zip(seen, again, strict=True):
        assert tokens.shape == (16, 3, 2, 2)
        assert torch.equal(tokens, from_disk)
        assert mask is not None and its_mask is not None and torch.equal(mask, its_mask)
        assert captions == its_captions
        assert captions is not None
        stills = [parse_caption(caption)[0].place is not None for caption in captions]  # type: ignore[index]
        assert mask.sum(1).tolist() == [1 if still else 5 for still in stills]
    for name, value in weights(direct, "generator").items():
        assert torch.equal(value, weights(cached, "generator")[name]), name
    (folder,) = (cached / "generator" / "cache").glob("pack-*")
    assert "frame_mask" in json.loads((folder / "cache.json").read_text())["arrays"]
    assert np.load(folder / "frame_mask.npy").shape == (48, 5)
    assert np.load(folder / "tokens.npy").shape == (48, 3, 2, 2)


def test_a_last_block_of_stills_alone_has_the_same_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.cache.fill.BATCH", 1)
    run = train(tmp_path, data__count=12, data__validation=0.5, stages__generator__cache=True)
    (folder,) = (run / "generator" / "cache").glob("pack-*")
    assert set(np.load(folder / "frame_mask.npy").sum(1).tolist()) == {1, 5}


def test_full_clips_are_cached_without_a_mask_in_the_batch(tmp_path: Path) -> None:
    train(tmp_path, data__stills=0.0, stages__generator__cache=True)
    assert all(mask is None for _, mask, _ in clip_tasks.SEEN)


def test_pictures_are_cached_without_masks(tmp_path: Path) -> None:
    run = train(tmp_path, data__stills=0.0, data__frames=1, stages__generator__cache=True)
    (folder,) = (run / "generator" / "cache").glob("pack-*")
    assert not (folder / "frame_mask.npy").exists()


def test_codecs_are_compiled_only_where_every_step_asks_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    parts = "kineograph.train.stepper.compile_task"
    monkeypatch.setattr(parts, lambda task, graphs, by_block=False: asked.append(type(task).__name__))
    train(tmp_path, "cached", train__compile=True, stages__generator__cache=True)
    assert asked == ["ClipCodec", "ClipGenerator"]
    train(tmp_path, "direct", train__compile=True)
    assert asked[2:] == ["ClipCodec", "ClipGenerator", "ClipCodec"]
    monkeypatch.setattr("tests.run.clip_tasks.ClipGenerator.always_encode", lambda task: True)
    train(tmp_path, "always", train__compile=True, stages__generator__cache=True)
    assert asked[5:] == ["ClipCodec", "ClipGenerator", "ClipCodec"]


def test_a_codec_that_has_seen_only_shorter_clips_is_told_of(tmp_path: Path) -> None:
    lines: list[str] = []
    train(tmp_path, "same", lines)
    assert not any("its codec was trained on" in line for line in lines)
    train(tmp_path, "longer", lines, stages__generator__data__frames=9)
    told = "trained on clips of 5 frames, and these have 9"
    assert [line.split(":")[1].strip() for line in lines if told in line] == ["generator"]


def test_the_command_makes_the_cache_that_training_finds(tmp_path: Path) -> None:
    run = train(tmp_path)
    (path,) = cache_run([str(run)], note=lambda line: None)
    lines: list[str] = []
    train(tmp_path, lines=lines, stages__generator__train={"steps": 4})
    assert any(f"trains from 48 cached items in {path}" in line for line in lines)
    assert clip_tasks.SEEN[0][1] is not None


def test_the_command_says_that_nothing_is_left_to_encode(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = train(tmp_path)
    lines: list[str] = []
    (path,) = cache_run([str(run)], note=lines.append)
    assert "generator  encoding 48/48 (100 %)" in capsys.readouterr().err
    assert cache_run([str(run)], note=lines.append) == [path]
    assert "encoding" not in capsys.readouterr().err
    assert lines == [f"generator: 48 items encoded into {path}", "generator: all 48 items were encoded before"]


def test_a_cache_is_refused_where_other_codec_weights_would_read_it(tmp_path: Path) -> None:
    """Its ids fit in number and shape; what they mean only the codec knows that made them."""
    run = train(tmp_path)
    (cache,) = cache_run([str(run)], note=lambda line: None)
    other = train(tmp_path, "other", seed=1, stages__codec__train={"steps": 1})
    tree = {
        "seed": 0,
        "train": BASE["train"],
        "data": {"source": "cache", "folder": str(cache), "size": 16, "frames": 5},
    }
    for codec, fits in ((f"{run}/codec", True), (f"{other}/codec", False)):
        tree["stages"] = {"generator": BASE["stages"]["generator"] | {"codec": codec}}
        (config := tmp_path / "cached.yaml").write_text(yaml.safe_dump(tree))
        if fits:
            kg.train(str(config), run=tmp_path / "fits", quiet=True)
            continue
        with pytest.raises(
            InputError,
            match=rf"was encoded by other weights .* than the codec {codec} has .*name the codec that made it",
        ):
            kg.train(str(config), run=tmp_path / "refused", quiet=True)
        assert not (tmp_path / "refused").exists()
    # A codec that is trained in the same run has its weights only then.
    own = {"generator": BASE["stages"]["generator"] | {"data": tree["data"]}}
    with pytest.raises(InputError, match=r"was encoded by other weights .* than the codec .*late/codec has"):
        train(tmp_path, "late", stages={"codec": BASE["stages"]["codec"], **own}, seed=2)


def test_a_stage_that_is_told_not_to_be_cached_is_named(tmp_path: Path) -> None:
    run = train(tmp_path, stages__generator__cache=False)
    lines: list[str] = []
    with pytest.raises(KineoError, match="no stage whose data could be cached"):
        cache_run([str(run)], note=lines.append)
    assert lines == ["generator: not cached, as stages.generator.cache=false says"]


def test_endless_data_are_told_to_be_so(tmp_path: Path) -> None:
    run = train(tmp_path, data__count=None)
    lines: list[str] = []
    with pytest.raises(KineoError, match="no stage whose data could be cached"):
        cache_run([str(run)], note=lines.append)
    assert lines == [
        "generator: not cached: data.source=moving_digits is endless; set data.count, such as data.count=100000"
    ]
    with pytest.raises(ConfigError, match=r"stages\.generator\.cache=true: .*data\.count"):
        train(tmp_path, "other", data__count=None, stages__generator__cache=True)
    assert not (tmp_path / "other").exists()


# Pictures ----------------------------------------------------------------------------------------------------------


def frames_of(path: Path) -> int:
    with Image.open(path) as file:
        return file.n_frames  # type: ignore[attr-defined]


def test_clips_are_shown_as_gifs_with_their_texts(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        train__sample_every=3,
        data__validation=0.1,
        prompts=["a red 3 moves left", "a blue 5 moves up", "a 1"],
    )
    shown = run / "codec" / "validation" / "step-00000003.gif"
    assert frames_of(shown) == 5
    with Image.open(shown) as file:
        assert file.height > 3 * 96  # input, online and EMA, one below the other
    told = shown.with_suffix(".txt").read_text().splitlines()
    assert len(told) == 2 and all(parse_caption(line)[0].direction for line in told)  # type: ignore[index]
    samples = run / "generator" / "samples" / "step-00000003"
    listed = json.loads((samples / "prompts.json").read_text())
    assert [row["prompt"] for row in listed] == ["a red 3 moves left", "a blue 5 moves up"]  # train.samples=2 of three
    assert all(frames_of(samples / row["file"]) <= 5 and row["file"].endswith(".gif") for row in listed)
    assert {path.name for path in samples.iterdir()} >= {"online-beside-ema.gif", "grid.gif", "grid.png"}
    assert not (run / "generator" / "validation").exists()


def test_auto_prompts_are_validation_captions(tmp_path: Path) -> None:
    run = train(tmp_path, train__sample_every=3, data__validation=0.1)
    listed = json.loads((run / "generator" / "samples" / "step-00000003" / "prompts.json").read_text())
    told = (run / "codec" / "validation" / "step-00000003.txt").read_text().splitlines()
    assert len(listed) == 2
    assert all(parse_caption(row["prompt"])[0].direction for row in listed)  # type: ignore[index]
    assert {row["prompt"] for row in listed} == set(told)


def test_a_model_without_text_is_asked_for_nothing(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        train__sample_every=3,
        data__validation=0.1,
        prompts=["a red 3"],
        stages__generator__text={"kind": "none"},
    )
    listed = json.loads((run / "generator" / "samples" / "step-00000003" / "prompts.json").read_text())
    assert [row["prompt"] for row in listed] == ["", ""]


def test_padding_is_not_shown() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    batch = Batch(slots=torch.arange(2), frame_mask=mask)
    pixels = torch.rand(2, 3, 1, 2, 2)
    short, whole = _trim_padding(pixels, batch)
    assert torch.equal(short, pixels[0, :1])
    assert torch.equal(whole, pixels[1])
    assert len(_trim_padding(pixels, Batch(slots=torch.arange(2)))[0]) == 3


# A Dataset of one's own ----------------------------------------------------------------------------------------------


class Mixed(torch.utils.data.Dataset):
    """Pictures (rank 3) beside clips (rank 4), told apart by type."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        if index % 2:
            return torch.full((5, 3, 16, 16), index / 24), f"clip {index}"
        return torch.full((3, 16, 16), index / 24), f"picture {index}"


class Encoded(torch.utils.data.Dataset):
    """The same, encoded beforehand: ids and captions, no pixels; pictures have one token time, short clips a mask over frames."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        times = 3 if index % 2 else 1
        item = {
            "video_codebook_ids": torch.full((times, 2, 2), round(15 * index / 24)),
            "texts": f"{'clip' if times == 3 else 'picture'} {index}",
        }
        if times == 3:
            item["video_frame_mask"] = torch.arange(5) < (3 if index % 4 == 1 else 5)
        return item | self.changes


OWN = {"data": {"size": 16, "frames": 5, "validation": 0.2}}


def test_pictures_and_clips_of_a_dataset_share_batches(tmp_path: Path) -> None:
    train(tmp_path, dataset=Mixed(), data=OWN["data"], data__stills=0.0, data__count=None)
    lengths = {
        (caption.split()[0], int(real))
        for _, mask, captions in clip_tasks.SEEN
        for caption, real in zip(captions or [], mask.sum(1).tolist() if mask is not None else [], strict=True)
    }
    assert lengths == {("picture", 1), ("clip", 5)}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained codec, as another run's stage."""
    folder = tmp_path_factory.mktemp("codec")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
        return f"{train(folder, stages={'codec': BASE['stages']['codec']})}/codec"


def encoded(folder: Path, codec: str, stage: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A generator on ids alone."""
    tree = {key: BASE[key] for key in ("seed", "train")} | OWN
    tree["stages"] = {"generator": BASE["stages"]["generator"] | {"codec": codec} | (stage or {})}
    tree["train"] = tree["train"] | {"sample_every": 3}
    config = folder / "ids.yaml"
    config.write_text(yaml.safe_dump(tree))
    clip_tasks.SEEN.clear()
    return kg.train(str(config), dataset=Encoded(**changes), run=folder / "ids", quiet=True)


def test_ids_and_captions_without_pixels_train_a_generator(tmp_path: Path, codec: str) -> None:
    run = encoded(tmp_path, codec)
    assert len(clip_tasks.SEEN) == 3
    for tokens, mask, captions in clip_tasks.SEEN:
        assert tokens.shape == (16, 3, 2, 2)
        assert captions is not None and mask is not None
        for row, real, caption in zip(tokens, mask.sum(1).tolist(), captions, strict=True):
            number = int(caption.split()[1])
            assert (row == round(15 * number / 24)).all()
            assert real == (1 if number % 2 == 0 else 3 if number % 4 == 1 else 5)
    listed = json.loads((run / "generator" / "samples" / "step-00000003" / "prompts.json").read_text())
    assert len(listed) == 2 and all(row["prompt"].split()[0] in ("clip", "picture") for row in listed)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(record["split"] == "validation" for record in records)
    assert kg.load(run, device="cpu").sample(["clip 3"]).pixels.shape == (1, 5, 3, 16, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"video_codebook_ids": torch.full((3, 2, 2), 16)}, r"ids from 16 to 16, and the codec has 16 codes: 0 to 15"),
        ({"video_codebook_ids": torch.zeros(3, 4, 4, dtype=torch.int64)}, r"\(3, 4, 4\) do not fit the codec, which makes \(3, 2, 2\)"),
        ({"video_codebook_ids": torch.zeros(5, 2, 2, dtype=torch.int64)}, r"t of 1, 2, 3"),
        (
            {"video_codebook_ids": torch.zeros(3, 2, 2, dtype=torch.int64), "video_frame_mask": torch.ones(3).bool()},
            "frames are counted, not token times",
        ),
        (
            {"video_codebook_ids": torch.zeros(1, 2, 2, dtype=torch.int64), "video_frame_mask": torch.ones(5).bool()},
            "5 real frames beside codebook ids of 1 frames",
        ),
    ],
)  # fmt: skip
def test_ids_that_the_codec_could_not_have_made_are_refused(
    tmp_path: Path, codec: str, changes: Any, message: str
) -> None:
    with pytest.raises(KineoError, match=message):
        encoded(tmp_path, codec, **changes)
    assert not (tmp_path / "ids").exists()


def test_a_codec_cannot_be_trained_on_ids(tmp_path: Path) -> None:
    with pytest.raises(
        KineoError, match=r"stage codec .* reads pixels, and the items .* have only caption, tokens.*runs/NAME/STAGE"
    ):
        train(tmp_path, dataset=Encoded(), data=OWN["data"], data__stills=0.0, data__count=None)
    assert not (tmp_path / "run").exists()
    with pytest.raises(KineoError, match="give videos"):
        train(tmp_path, dataset=["a caption"] * 8, data=OWN["data"], data__stills=0.0, data__count=None)


def test_ids_cannot_be_cached_again(tmp_path: Path, codec: str) -> None:
    with pytest.raises(ConfigError, match=r"hold caption, tokens and no pixels to encode"):
        encoded(tmp_path, codec, {"cache": True})
    assert not (tmp_path / "ids").exists()


def test_a_bad_id_later_in_the_data_ends_the_run_by_its_name(tmp_path: Path, codec: str) -> None:
    class Late(Encoded):
        def __getitem__(self, index: int) -> dict[str, Any]:
            item = super().__getitem__(index)
            return item | ({"video_codebook_ids": torch.full((3, 2, 2), 99)} if index == 17 else {})

    tree = {key: BASE[key] for key in ("seed", "train")} | OWN
    tree["stages"] = {"generator": BASE["stages"]["generator"] | {"codec": codec}}
    (tmp_path / "ids.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(KineoError, match="item-17: codebook ids from 99 to 99"):
        kg.train(str(tmp_path / "ids.yaml"), dataset=Late(), run=tmp_path / "ids", quiet=True)
