"""data.source=mix: shares, captions, splits and order of several sources in one run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.core.errors import ConfigError, InputError
from kineograph.core.protocols import MixShare, Source
from kineograph.core.trust import find_code
from kineograph.data.captions import require_captions
from kineograph.data.decoded_cache import keep_if_small
from kineograph.data.fit_summary import summarise_fit
from kineograph.data.loader import Loader
from kineograph.data.mix import MixConfig
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.run.data_sheet import read_data_config
from kineograph.stage.data_record import move_data
from tests.data.tar_shards import item, write


def pictures(folder: Path, count: int, caption: str = "", size: tuple[int, int] = (16, 16)) -> str:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", size, (number, 0, 0)).save(folder / f"{number}.png")
        if caption:
            (folder / f"{number}.txt").write_text(f"{caption} {number}")
    return str(folder)


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {
        "few": {"folder": pictures(tmp_path / "few", 4, "few"), "repeats": 3, "caption": "{text}, sks"},
        "many": {"folder": pictures(tmp_path / "many", 20), "uncaptioned": "empty"},
    }


def config(mix: Any, **keys: object) -> MixConfig:
    parsed = parse_data_config({"source": "mix", "mix": mix, "size": 16, "validation": 0, **keys})
    assert isinstance(parsed, MixConfig)
    return parsed


def opened(mix: Any, split: str = "train", **keys: object) -> Source:
    return open_source(config(mix, **keys), split, 0)  # type: ignore[arg-type]


def test_repeats_and_captions(parts: dict[str, dict[str, Any]]) -> None:
    source = opened(parts)
    assert len(source) == 24 and source.shares == (MixShare(4, 12), MixShare(20, 20))
    assert "an epoch has 32 samples: few 4 items × 3 = 38%, many 20 items × 1 = 62%" in str(source.note)
    loader = Loader(source, seed=0, batch_size=8)
    assert loader.count_steps(2) == 8
    seen = [batch for batches in loader.steps(0, 4) for batch in batches]
    captions = Counter(text for batch in seen for text in batch.captions or [])
    assert captions == {"": 20, **{f"few {n}, sks": 3 for n in range(4)}}
    again = [batch for batches in loader.steps(2, 4) for batch in batches]  # a resumed run
    assert [batch.captions for batch in again] == [batch.captions for batch in seen[2:]]
    assert "20 of 24 items have no caption" in str(require_captions(source, "stage x"))
    assert source.identity(4) == "many/0.png" and source.formatted_captions(1) == ["few 1, sks"]


def test_weights(parts: dict[str, dict[str, Any]]) -> None:
    parts["few"] = {"folder": parts["few"]["folder"], "weight": 3}
    parts["many"]["weight"] = 1
    source = opened(parts)
    assert source.shares == (MixShare(4, 60), MixShare(20, 20))
    drawn = Counter(
        (text or "none").split()[0]
        for (batch,) in Loader(source, seed=0, batch_size=8).steps(0, 10)
        for text in batch.captions or []
    )
    assert drawn == {"few": 60, "none": 20}


@pytest.mark.parametrize(
    ("few", "many", "message"),
    [
        ({"weight": 0}, {"weight": 1}, r"data.mix.few.weight=0"),
        ({"weight": -1}, {"weight": 1}, r"data.mix.few.weight=-1"),
        ({"weight": 1}, {}, r"data.mix.many has no weight"),
        ({"weight": 1}, {"repeats": 2}, r"a weight and parts with repeats"),
        ({"size": 32}, {}, r"data.mix.few.size=\(32, 32\) differs from data.size=\(16, 16\).*remove data.mix.few.size"),
        ({"frames": 9}, {}, r"data.mix.few.frames=9 differs from data.frames=1"),
        ({"source": "cache"}, {}, "cache cannot be part of a mix"),
        ({"wieght": 1}, {}, "unknown key data.mix.few.wieght"),
        ({"folder": None}, {}, "data.mix.few.folder"),
    ],
)
def test_wrong_parts_are_refused(
    parts: dict[str, dict[str, Any]], few: dict[str, Any], many: dict[str, Any], message: str
) -> None:
    base = {name: {"folder": part["folder"]} for name, part in parts.items()}
    with pytest.raises(ConfigError, match=message):
        opened({"few": base["few"] | few, "many": base["many"] | many})


def test_a_mix_is_a_mapping_of_names(tmp_path: Path) -> None:
    for wrong in ([{"folder": "a"}], {"a": "photos"}, {}, {"a.b": {"folder": "a"}}, {"a": {"weight": 1}}):
        with pytest.raises(ConfigError, match=r"data\.mix"):
            config(wrong)


def test_what_differs_in_kind_is_refused(parts: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    shards = write(tmp_path / "0.tar", item(0))
    with pytest.raises(InputError, match=r"data.mix.tars is endless"):
        opened(parts | {"tars": {"shards": f"pipe:cat {shards}"}})
    with pytest.raises(InputError, match=r"data.mix.digits is endless"):
        opened(parts | {"digits": {"source": "moving_digits"}})
    with pytest.raises(InputError, match=r"data.mix.gone: .*does not exist"):
        opened(parts | {"gone": {"folder": str(tmp_path / "gone")}})
    with pytest.raises(InputError, match=r"20 of 24 items have none \(many/0.png"):
        require_captions(opened({"few": parts["few"], "many": {"folder": parts["many"]["folder"]}}), "stage x")


def test_sources_of_every_kind(parts: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    write(tmp_path / "0.tar", [file for number in range(3) for file in item(number)])
    np.save(tmp_path / "videos.npy", np.zeros((5, 1, 8, 8), np.uint8))
    mix = parts | {
        "tars": {"shards": str(tmp_path / "0.tar")},
        "array": {"source": "memmap", "folder": str(tmp_path / "videos.npy"), "layout": "NTHW", "uncaptioned": "empty"},
        "digits": {"source": "moving_digits", "count": 7},
    }
    source = opened(mix, flip=0.5)
    assert len(source) == 4 + 20 + 3 + 5 + 7
    batch = next(iter(Loader(source, seed=0, batch_size=len(source)).steps(0, 1)))[0]
    assert batch.pixels is not None and batch.pixels.shape[1:] == (1, 3, 16, 16)
    assert source.item_states() is not None and len(source.item_states() or []) == len(source)


def test_held_out_items_stay_in_their_splits(parts: dict[str, dict[str, Any]]) -> None:
    alone = {
        split: open_source(parse_data_config({"source": "folder", "folder": parts["many"]["folder"], "validation": 0.3}), split, 0)
        for split in ("train", "validation")
    }  # fmt: skip
    names = {split: {f"many/{s.identity(i)}" for i in range(len(s))} for split, s in alone.items()}
    parts["many"]["validation"] = 0.3
    for split, expected in names.items():
        source = opened(parts, split)
        assert {name for name in map(source.identity, range(len(source))) if name.startswith("many")} == expected
        # A part that holds out nothing is not validated on.
        assert any(source.identity(i).startswith("few") for i in range(len(source))) is (split == "train")
    assert opened(parts, "validation").shares == ()


def test_an_unreadable_item_is_listed_with_its_part(parts: dict[str, dict[str, Any]]) -> None:
    (Path(parts["many"]["folder"]) / "3.png").write_bytes(b"broken")
    loader = Loader(opened(parts), seed=0, batch_size=8)
    list(loader.steps(0, 4))
    assert list(loader.skipped) == ["many/3.png"]


def test_buckets_of_all_parts(tmp_path: Path) -> None:
    mix = {
        "wide": {"folder": pictures(tmp_path / "wide", 6, "wide", (32, 16)), "repeats": 2},
        "tall": {"folder": pictures(tmp_path / "tall", 6, "tall", (16, 32))},
        "both": {"folder": pictures(tmp_path / "both", 2, "both", (32, 16))},
    }
    source = opened(mix, buckets={"sizes": [[16, 32], [32, 16]]})
    loader = Loader(source, seed=0, batch_size=2)
    steps = loader.count_steps(1)
    batches = [batch for batches in loader.steps(0, steps) for batch in batches]
    assert {tuple(batch.pixels.shape[3:]) for batch in batches if batch.pixels is not None} == {(16, 32), (32, 16)}
    drawn = Counter((text or "").split()[0] for batch in batches for text in batch.captions or [])
    assert drawn["wide"] == 12 and drawn["tall"] == 6 and drawn["both"] == 2
    with pytest.raises(ConfigError, match=r"data.mix.both has no buckets"):
        opened(mix | {"both": mix["both"] | {"buckets": None}}, buckets={"sizes": [[16, 32], [32, 16]]})


def test_paths_are_absolute_moved_and_trusted(
    parts: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = config({"few": {"folder": "few"}})
    assert relative.mix["few"] == {"folder": str(tmp_path / "few"), "source": "folder"}
    again = parse_data_config(relative.model_dump(mode="json"))
    assert again == relative
    moved = move_data(relative, [f"data.mix.few.folder={tmp_path / 'many'}"])
    assert isinstance(moved, MixConfig) and moved.mix["few"]["folder"] == str(tmp_path / "many")
    with pytest.raises(ConfigError, match=r"data.mix.other.folder"):
        move_data(relative, ["data.mix.other.folder=x"])
    tree = {"data": {"mix": {"mine": {"source": "my.module.Data"}, "pipe": {"shards": "pipe:cat x"}}}}
    assert dict(find_code(tree)) == {"data.mix.mine.source": "my.module.Data", "data.mix.pipe.shards": "pipe:cat x"}


def test_small_parts_are_kept_decoded_if_all_can_be(parts: dict[str, dict[str, Any]]) -> None:
    plain, kept = opened(parts), opened(parts)
    assert "24 items are kept decoded" in str(keep_if_small(kept, 1))
    for one, two in zip(*(Loader(source, seed=0, batch_size=8).steps(0, 4) for source in (plain, kept)), strict=True):
        assert torch.equal(one[0].pixels, two[0].pixels)  # type: ignore[arg-type]
    digits = {"source": "moving_digits", "count": 7}
    assert keep_if_small(opened(parts | {"digits": digits}), 1) is None


def test_digests_tell_other_items(parts: dict[str, dict[str, Any]]) -> None:
    before = opened(parts)
    assert before.items_digest() == opened(parts | {"few": parts["few"] | {"repeats": 9}}).items_digest()
    Image.new("RGB", (16, 16)).save(Path(parts["many"]["folder"]) / "new.png")
    after = opened(parts)
    assert before.items_digest() != after.items_digest() and before.fingerprint() != after.fingerprint()


def test_the_summary_and_the_sheet_know_the_parts(parts: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    wide = {"folder": pictures(tmp_path / "wide", 2, "wide", (64, 16))}
    chosen = config(parts | {"wide": wide})
    lines = summarise_fit(open_source(chosen, "train", 0), chosen)
    assert any(line.startswith("wide:   100% cropped") for line in lines)
    file = tmp_path / "mix.yaml"
    file.write_text(f"data: {{source: mix, size: 16, mix: {{few: {{folder: {tmp_path / 'few'}}}}}}}")
    assert isinstance(read_data_config(file, ["channels=1"]), MixConfig)
