"""`kineo data make`: what is written reads back as what was drawn, and nothing is ever half there."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from kineograph.core.errors import InputError
from kineograph.data.check import check_folder
from kineograph.data.folder import Folder, FolderConfig
from kineograph.data.memmap import Memmap, MemmapConfig
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.data.webdataset import WebDataset, WebDatasetConfig
from kineograph.run import dataset_writer
from kineograph.run.dataset_writer import write_dataset
from tests.media.reading import read_clip

RNG = np.random.default_rng(0)


def drawn(index: int, **keys):
    return MovingDigits(MovingDigitsConfig(**keys), "train").read(index)


def test_gif_folder_reads_back_as_drawn(tmp_path: Path) -> None:
    out = write_dataset("moving-digits", tmp_path / "clips", 3, "gif", ["size=32", "frames=6", "fps=10"])
    assert sorted(path.name for path in out.iterdir()) == [f"{i:06d}.{s}" for i in range(3) for s in ("gif", "txt")]
    for index in range(3):
        pixels, fps = read_clip(out / f"{index:06d}.gif", channels=3)
        expected = drawn(index, size=32, frames=6, fps=10)
        assert torch.equal(pixels, expected.pixels)  # few colours, so the palette is exact
        assert fps == 10
        assert (out / f"{index:06d}.txt").read_text().strip() == expected.caption


def test_the_folder_source_takes_what_was_written(tmp_path: Path) -> None:
    write_dataset("moving-digits", tmp_path / "pictures", 4, "png", ["size=24", "channels=1"])
    source = Folder.open(FolderConfig(folder=str(tmp_path / "pictures"), size=24, channels=1, validation=0), "train", 0)
    expected = drawn(2, size=24, frames=1, channels=1)
    found = source.read(2, RNG)
    assert torch.equal(found.pixels, expected.pixels)
    assert found.caption == expected.caption


def test_the_memmap_source_takes_what_was_written(tmp_path: Path) -> None:
    out = write_dataset(
        "moving-digits", tmp_path / "array", 5, "memmap", ["size=[24, 32]", "frames=4", "channels=1", "digits=2"]
    )
    assert np.load(out / "videos.npy", mmap_mode="r").shape == (5, 4, 1, 24, 32)
    assert np.load(out / "labels.npy").shape == (5, 2)
    keys = {"size": (24, 32), "frames": 4, "channels": 1}
    source = Memmap.open(MemmapConfig(folder=str(out), validation=0, **keys), "train", 0)
    found = [source.read(index, RNG) for index in range(5)]
    expected = [drawn(index, digits=2, **keys) for index in range(5)]
    assert all(torch.equal(one.pixels, two.pixels) and one.caption == two.caption for one, two in zip(found, expected))
    digits = MovingDigits(MovingDigitsConfig(digits=2, **keys), "train")
    assert np.load(out / "labels.npy")[3].tolist() == [figure.digit for figure in digits.facts(3)]


def test_webdataset_shards(tmp_path: Path) -> None:
    out = write_dataset("moving-digits", tmp_path / "shards", 5, "webdataset", ["size=24", "frames=3", "shard=2"])
    assert sorted(path.name for path in out.iterdir()) == [f"shard-00000{i}.tar" for i in range(3)]
    names: list[str] = []
    for path in sorted(out.iterdir()):
        with tarfile.open(path) as tar:
            names += tar.getnames()
            content = json.loads(tar.extractfile(tar.getnames()[2]).read())  # type: ignore[union-attr]
    assert names == [f"{i // 2:05d}{i % 2:04d}.{suffix}" for i in range(5) for suffix in ("gif", "txt", "json")]
    assert content["caption"] == drawn(4, size=24, frames=3).caption
    assert content["figures"][0]["digit"] in range(10)
    again = write_dataset("moving-digits", tmp_path / "again", 5, "webdataset", ["size=24", "frames=3", "shard=2"])
    assert (again / "shard-000001.tar").read_bytes() == (out / "shard-000001.tar").read_bytes()


def test_webdataset_media_format(tmp_path: Path) -> None:
    write_dataset("moving-digits", tmp_path / "stills", 1, "webdataset", ["size=24", "format=png"])
    with tarfile.open(tmp_path / "stills/shard-000000.tar") as tar:
        assert tar.getnames()[0] == "000000000.png"


def test_mp4_has_the_frames_and_the_speed(tmp_path: Path) -> None:
    out = write_dataset("moving_digits", tmp_path / "films", 1, "mp4", ["size=32", "frames=5", "fps=12"])
    pixels, fps = read_clip(out / "000000.mp4")
    assert (tuple(pixels.shape), fps) == ((5, 3, 32, 32), 12)


def test_split_decides_the_items(tmp_path: Path) -> None:
    train, held = (
        write_dataset("moving-digits", tmp_path / split, 2, "png", ["size=24"], split)
        for split in ("train", "validation")
    )
    assert (train / "000000.png").read_bytes() != (held / "000000.png").read_bytes()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"what": "moving-letters"}, "use moving-digits"),
        ({"as_": "avi"}, "use gif, mp4, png, memmap, webdataset"),
        ({"split": "dev"}, "use train, validation, test"),
        ({"count": 0}, "at least 1"),
        ({"settings": ["frame=3"]}, "did you mean frames?"),
        ({"settings": ["shard=3"]}, "unknown key shard"),  # only shards have a size
        ({"settings": ["count=3"]}, "unknown key count"),  # --count says it
        ({"settings": ["frames=few"]}, "frames='few'"),
        ({"settings": ["frames=4"], "as_": "png"}, "frames=4 does not fit png"),
        ({"settings": ["size=40", "stills=0.3"], "as_": "memmap"}, "stills=0.3 does not fit a memmap"),
        ({"settings": ["shard=0"], "as_": "webdataset"}, "shard=0"),
        ({"settings": ["format=avi"], "as_": "webdataset"}, "format=avi: use gif, mp4, png, jpg, webp"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(tmp_path: Path, call: dict, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        write_dataset(**{"what": "moving-digits", "out": tmp_path / "out", "count": 2, "as_": "gif", **call})
    assert not any(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match="not an empty folder"):
        write_dataset("moving-digits", tmp_path, 1)
    with pytest.raises(InputError, match="not an empty folder"):
        write_dataset("moving-digits", tmp_path / "mine.txt", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_dataset("moving-digits", tmp_path / "empty", 1, "png", ["size=24"])
    assert len(list((tmp_path / "empty").iterdir())) == 2


@pytest.mark.parametrize("as_", ["gif", "memmap", "webdataset"])
def test_a_failure_half_way_leaves_nothing(tmp_path: Path, as_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = MovingDigits.read

    def failing(self, index, rng=None):
        if index == 2:
            assert not (tmp_path / "out").exists()  # the name appears at the end only
            raise KeyboardInterrupt
        return read(self, index, rng)

    monkeypatch.setattr(dataset_writer.MovingDigits, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        write_dataset("moving-digits", tmp_path / "out", 4, as_, ["size=24", "frames=2"])
    assert not any(tmp_path.iterdir())


class Means:
    """Embeds a picture as its mean colour, a caption as its length and first letters."""

    def embed_images(self, pixels, frame_mask=None):
        return pixels.mean((1, 3, 4)) + 1

    def embed_texts(self, captions):
        lengths = torch.tensor([[float(len(caption)), 1.0, 1.0] for caption in captions])
        encodings = torch.ones(len(captions), 4, 2)
        return lengths, encodings, torch.arange(4) < torch.tensor([[len(caption) % 3 + 1] for caption in captions])


@pytest.mark.parametrize("form", ["jpg", "webp", "gif"])
def test_shards_and_their_embeddings_are_read_back(tmp_path: Path, form: str) -> None:
    settings = ["size=24", "shard=70", f"format={form}"] + (["frames=3"] if form == "gif" else [])
    out = write_dataset("moving-digits", tmp_path / "shards", 150, "webdataset", settings, embeddings=Means())
    assert sorted(path.name for path in (out / "img_emb").iterdir()) == [f"img_emb_00000{n}.npy" for n in range(3)]
    keys = {"shards": str(out), "size": 24, "frames": 3 if form == "gif" else 1, "validation": 0}
    folders = {
        f"{k}_folder": str(out / v)
        for k, v in [("img_embeddings", "img_emb"), ("text_embeddings", "text_emb"), ("text_encodings", "txt_enc")]
    }
    source = WebDataset.open(WebDatasetConfig(**keys, **folders), "train", 0)
    assert len(source) == 150 and not source.skipped
    for index in (0, 69, 70, 149):
        sample, expected = source.read(index, RNG), drawn(index, size=24, frames=keys["frames"])
        assert sample.caption == expected.caption
        assert (sample.pixels.float() - expected.pixels.float()).abs().mean() < (8 if form == "jpg" else 0.01)
        mean = expected.pixels.float().mean((0, 2, 3)) / 255 + 1
        assert torch.allclose(sample.extra["image_embed"], mean, atol=1e-3)
        assert sample.extra["text_embed"][0] == len(expected.caption)
        assert int(sample.text_mask.sum()) == len(expected.caption) % 3 + 1
    report = check_folder(out)
    assert report.problems == []
    assert "img_emb: embeddings of 3 for 150 of 150 samples" in report.notes
    values = np.load(out / "img_emb/img_emb_000001.npy")
    values[2] = 0
    np.save(out / "img_emb/img_emb_000001.npy", values)
    (problem,) = check_folder(out).problems
    assert problem.path == "shard-000001.tar:000010002" and "is zero" in problem.reason


def test_embeddings_need_a_stage_that_embeds(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--as webdataset, not with --as gif"):
        write_dataset("moving-digits", tmp_path / "a", 1, "gif", embeddings="runs/x")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("stages: {tokenizer: {task: vqgan}}")
    with pytest.raises(InputError, match=r"none of the stages tokenizer embeds"):
        write_dataset("moving-digits", tmp_path / "a", 1, "webdataset", embeddings=str(run))
    with pytest.raises(InputError, match=r"the stages of .* are tokenizer"):
        write_dataset("moving-digits", tmp_path / "a", 1, "webdataset", embeddings=f"{run}/clip")
    assert not (tmp_path / "a").exists()


def test_pictures_go_to_the_device_of_what_embeds_them(tmp_path: Path) -> None:
    class Elsewhere(torch.nn.Linear):
        """Lies on a device that is not the data's."""

        def embed_images(self, pixels: torch.Tensor, frame_mask: torch.Tensor | None = None) -> torch.Tensor:
            assert pixels.device == self.weight.device
            return torch.ones(len(pixels), 2)

        def embed_texts(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return torch.ones(len(captions), 2), torch.ones(len(captions), 1, 2), torch.ones(len(captions), 1) > 0

    embedder = Elsewhere(2, 2, device="meta")
    out = write_dataset(
        "moving-digits", tmp_path / "shards", 2, "webdataset", ["size=24", "format=png"], embeddings=embedder
    )
    assert np.load(out / "img_emb" / "img_emb_000000.npy").shape == (2, 2)
