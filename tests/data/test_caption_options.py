"""data.caption, data.shuffle_tags, several captions an item and data.uncaptioned, for every source that has captions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.core.caption_format import CaptionFormat
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source
from kineograph.data.captions import require_captions
from kineograph.data.check import check_folder
from kineograph.data.folder import FolderConfig
from kineograph.data.loader import Loader
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.run.data_sheet import show_data
from tests.data.tar_shards import item, picture, write

COUNT = 4  # items, of which the last has no caption


def write_pictures(folder: Path, texts: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, text) in enumerate(texts.items()):
        Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(folder / f"{name}.png")
        if text:
            (folder / f"{name}.txt").write_text(text)
    return folder


def opened(split: str = "train", **keys: object) -> Source:
    tree = {"size": 8, "validation": 0, "source": "folder", **keys}
    return open_source(parse_data_config(tree), split, 0)  # type: ignore[arg-type]


def captions(source: Source, steps: range, batch_size: int = 4) -> list[list[str]]:
    """Of each step."""
    loader = Loader(source, seed=0, batch_size=batch_size)
    return [batch.captions or [] for batches in loader.steps(steps.start, steps.stop) for batch in batches]


def distinct(source: Source, steps: int = 3) -> set[str]:
    return {text for batch in captions(source, range(steps)) for text in batch}


# One item ----------------------------------------------------------------------------------------------------------


def test_a_template_is_filled_with_the_text() -> None:
    form = CaptionFormat("{text}, in the style of sks")
    assert form.format("a cat {label}") == "a cat {label}, in the style of sks"
    assert form.format(None) is None and CaptionFormat("{text}, sks", blank=True).format(None) == ""
    assert CaptionFormat("a photo of sks").format(None) == "a photo of sks"


def test_tags_keep_their_words_and_change_their_order() -> None:
    form = CaptionFormat("sks, {text}", shuffle_tags=True, draws=True)
    seen = {form.draw(["a b, c , d,,"], lambda n=n: numpy_rng(n)) for n in range(60)}
    assert len(seen) == 6
    assert all(text.startswith("sks, ") and sorted(text[5:].split(", ")) == ["a b", "c", "d"] for text in seen if text)
    assert CaptionFormat(shuffle_tags=True).draw(["b, a"], lambda: numpy_rng(0)) == "b, a"  # validation


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"caption": "{txt}, sks"}, r"data.caption.*\{txt\}.*write \{text\}"),
        ({"caption": "the digit {label}"}, r"\{label\}"),
        ({"uncaptioned": "drop"}, "data.uncaptioned='drop'"),
        ({"caption_dropout": 0.1}, "stages.NAME.caption_dropout"),
    ],
)
def test_keys_that_mislead_are_refused(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(folder=str(tmp_path), **keys)


# A folder ----------------------------------------------------------------------------------------------------------


def test_one_of_several_captions_is_drawn_each_time_and_a_resume_draws_the_same(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path, {"a": "one\ntwo\n\nthree", "b": "x, y"})
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "b.png", "text": ["x, y", "z"]}))
    source = opened(folder=str(folder), caption_lines="several", caption="{text} sks", shuffle_tags=True)
    drawn = captions(source, range(40), batch_size=2)
    assert {text for batch in drawn for text in batch} == {
        f"{t} sks" for t in ("one", "two", "three", "x, y", "y, x", "z")
    }
    assert captions(source, range(30, 40), batch_size=2) == drawn[30:]
    assert source.formatted_captions(0) == ["one sks", "two sks", "three sks"]
    validation = opened("validation", folder=str(folder), caption_lines="several", caption="{text} sks")
    fixed = next(iter(Loader(validation, seed=0, batch_size=2).fixed_batches(2, 2)))
    assert fixed.captions == ["one sks", "x, y sks"]
    assert fixed.texts == [("one", "two", "three"), ("x, y", "z")]


def test_rows_of_one_file_are_its_captions(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path, {"a": ""})
    (folder / "metadata.csv").write_text("file_name,text\na.png,one\na.png,two\na.png,one\n")
    source = opened(folder=str(folder))
    assert source.captions(0) == ("one", "two") and source.caption(0) == "one" and source.has_several_captions()


def test_pixels_do_not_depend_on_the_captions(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path, {"a": "x, y\nz", "b": "u, v"})
    plain = opened(folder=str(folder), crop="random", resize="cover", size=4)
    other = opened(
        folder=str(folder), crop="random", resize="cover", size=4, caption_lines="several", shuffle_tags=True
    )
    for one, two in zip(
        Loader(plain, seed=0, batch_size=2).steps(0, 3), Loader(other, seed=0, batch_size=2).steps(0, 3), strict=True
    ):
        assert torch.equal(one[0].pixels, two[0].pixels)  # type: ignore[arg-type]


def test_the_check_and_the_sheet_say_what_the_captions_are(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_pictures(tmp_path / "data", {"a": "one\ntwo", "b": "x", "c": ""})
    report = check_folder(folder)
    assert any("1 caption file has several lines" in line for line in report.lines())
    assert dict(report.problems) == {"c.png": "no caption"}
    report = check_folder(folder, FolderConfig(folder=str(folder), caption_lines="several", uncaptioned="empty"))
    lines = "\n".join(report.lines())
    assert "1 items have several captions, up to 2" in lines and not report.problems
    assert "1 items without a caption train on the null text" in lines
    out = show_data(folder, ["caption_lines=several", "caption={text}, sks"], tmp_path / "sheet.png")
    assert out.is_file()


# Every source ------------------------------------------------------------------------------------------------------


def _folder(path: Path) -> dict[str, object]:
    return {"folder": str(write_pictures(path, {str(n): f"text {n}" if n < COUNT - 1 else "" for n in range(COUNT)}))}


def _memmap(path: Path) -> dict[str, object]:
    path.mkdir()
    np.save(path / "videos.npy", np.zeros((COUNT, 1, 8, 8), np.uint8))
    (path / "captions.txt").write_text("text 0\ntext 1\ntext 2\n\n")
    return {"source": "memmap", "folder": str(path), "layout": "NTHW", "channels": 1}


def _webdataset(path: Path) -> dict[str, object]:
    path.mkdir()
    files = [file for n in range(COUNT) for file in item(n, caption=n < COUNT - 1)]
    write(path / "0.tar", files)
    return {"source": "webdataset", "shards": str(path), "max_unreadable": 0.5}


def _stream(path: Path) -> dict[str, object]:
    shards = f"pipe:cat {_webdataset(path)['shards']}/0.tar"
    return {"source": "webdataset", "shards": shards, "validation": 0.0, "max_unreadable": 0.5}


def test_held_out_items_may_all_be_without_a_caption(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "data", {str(n): f"text {n}" for n in range(COUNT)})
    held_out = str(write_pictures(tmp_path / "held out", {"a": ""}))
    keys = {"folder": str(folder), "validation_folder": held_out, "split_folders": False}
    blank = opened("validation", **keys, uncaptioned="empty")
    assert "1 of 1 validation items have no caption" in str(require_captions(blank, "stage x", "validation items"))
    with pytest.raises(InputError, match="1 of 1 validation items have none"):
        require_captions(opened("validation", **keys), "stage x", "validation items")


@pytest.mark.parametrize("make", [_folder, _memmap, _webdataset, _stream])
def test_uncaptioned(tmp_path: Path, make: Callable[[Path], dict[str, object]]) -> None:
    keys = make(tmp_path / "data")
    with pytest.raises(
        InputError, match=r"1 of .* have none.*data.uncaptioned=skip, or data.uncaptioned=empty"
    ) as refusal:
        require_captions(opened(**{**keys, "uncaptioned": "refuse"}), "stage x")
    assert {_folder: "metadata.jsonl", _memmap: "captions.txt beside the array"}.get(make, "KEY.txt") in str(
        refusal.value
    )
    skipping = opened(**{**keys, "uncaptioned": "skip"})
    assert require_captions(skipping, "stage x") is None
    assert "" not in distinct(skipping)
    assert len(skipping) == COUNT - 1 or make is _stream
    for spelling in ("empty", "keep"):
        blank = opened(**{**keys, "uncaptioned": spelling})
        assert "1 of" in str(require_captions(blank, "stage x"))
        assert "" in distinct(blank)
        assert "" in distinct(opened(**{**keys, "uncaptioned": spelling, "caption": "{text}!"}))


def test_what_is_skipped_is_counted(tmp_path: Path) -> None:
    source = opened(**_folder(tmp_path / "data"), uncaptioned="skip")
    assert "1 of 4 items have no caption and are left out, such as 3.png" in str(source.note)
    assert source.skipped == {"3.png": "no caption"}


@pytest.mark.parametrize("make", [_folder, _memmap])
def test_items_without_a_caption_are_skipped_before_the_split(
    tmp_path: Path, make: Callable[[Path], dict[str, object]]
) -> None:
    keys = {**make(tmp_path / "data"), "validation": 0.34, "uncaptioned": "skip"}
    for seed in range(8):  # whichever items a seed holds out
        parts = [opened(split, **keys, split_seed=seed) for split in ("train", "validation")]
        assert all(len(part) for part in parts) and sum(map(len, parts)) == COUNT - 1
        assert all(part.caption(index) for part in parts for index in range(len(part)))


def test_without_any_caption_nothing_is_skipped_and_a_fixed_caption_serves(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path, {"a": "", "b": ""})
    for choice in ("refuse", "skip", "empty"):
        source = opened(folder=str(folder), uncaptioned=choice)
        assert len(source) == 2
        with pytest.raises(InputError, match="2 of 2 items have none"):
            require_captions(source, "stage x")
    fixed = opened(folder=str(folder), caption="a photo of sks")
    assert require_captions(fixed, "stage x") is None
    assert captions(fixed, range(1), 2) == [["a photo of sks"] * 2]


def test_captions_in_json_may_be_lists(tmp_path: Path) -> None:
    files = [("0.png", picture(0)), ("0.json", json.dumps({"captions": ["a", "b"]}).encode())]
    source = opened(source="webdataset", shards=str(write(tmp_path / "0.tar", files)))
    assert source.captions(0) == ("a", "b") and source.has_several_captions()
    assert distinct(source, 9) == {"a", "b"}


def test_several_captions_are_found_wherever_they_are(tmp_path: Path) -> None:
    """A cache of text embeddings would hold one of them."""
    image = picture(0)
    files = []
    for number in range(151):
        texts = ["a", "b"] if number == 150 else "a"
        files += [(f"{number:03d}.png", image), (f"{number:03d}.json", json.dumps({"text": texts}).encode())]
    shard = str(write(tmp_path / "0.tar", files))
    assert opened(source="webdataset", shards=shard).has_several_captions()
    single = str(write(tmp_path / "1.tar", files[:300]))
    assert not opened(source="webdataset", shards=single).has_several_captions()


class Listed(torch.utils.data.Dataset):
    """Two captions for item 0, none for item 1."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, object]:
        clip = torch.zeros(3, 8, 8, dtype=torch.uint8)
        return {"image": clip, "texts": ["a", "b"]} if index == 0 else {"image": clip}


def test_items_of_a_dataset(tmp_path: Path) -> None:
    def open_own(**keys: object) -> Source:
        return open_source(parse_data_config({"size": 16, "validation": 0, **keys}), "train", 0, Listed())

    assert distinct(open_own(), 20) == {"a", "b", ""}
    loader = Loader(open_own(uncaptioned="skip"), seed=0, batch_size=2)
    assert {t for (batch,) in loader.steps(0, 20) for t in batch.captions or []} == {"a", "b"}
    assert loader.skipped == {"item-1": "no caption"}


def test_labels_and_templates_of_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "videos.npy", np.zeros((3, 1, 8, 8), np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(3))
    (tmp_path / "captions.txt").write_text("a\nb\nc\n")
    keys = {"source": "memmap", "folder": str(tmp_path), "layout": "NTHW", "channels": 1}
    for template, expected in (("{text}!", "a!"), ("digit {label}", "digit 0"), ("{text} {label}", "a 0")):
        assert opened(**keys, caption=template).formatted_captions(0) == [expected]
