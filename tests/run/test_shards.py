"""Runs on tar shards: the indexed ones train like any source, streams save where they are and go on there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kineograph.core.errors import ConfigError
from kineograph.run.cache import cache_run
from kineograph.run.dataset_writer import write_dataset
from kineograph.train import checkpoint
from tests.run import clip_tasks
from tests.run.clip_tasks import BASE, train


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_dataset(
        "moving-digits", tmp_path / "shards", 24, "webdataset", ["size=16", "frames=5", "glyphs=2", "shard=4"]
    )


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """BASE on shards instead of digits; the keys of digits alone must go."""
    data = {"source": "webdataset", "size": 16, "frames": 5, "validation": 0.1}
    tree = {**BASE, "data": data, "train": {**BASE["train"], "batch_size": 4}}
    monkeypatch.setattr(clip_tasks, "BASE", tree)
    return tree


def position(run: Path, step: int) -> dict[str, int]:
    return checkpoint.select(run / "generator" / "checkpoints", step).state()["data"]


def test_an_indexed_run_lists_what_the_shards_lack(tmp_path: Path, shards: Path, base: dict[str, Any]) -> None:
    broken = shards / "shard-000002.tar"
    broken.write_bytes(broken.read_bytes()[:3000])
    lines: list[str] = []
    run = train(tmp_path, lines=lines, data__shards=str(shards))
    skipped = [json.loads(line) for line in (run / "skipped.jsonl").read_text().splitlines()]
    assert [row["path"] for row in skipped] == ["shard-000002.tar"] and "whole files" in skipped[0]["reason"]
    assert any("samples are left out" in line and "the shard ends" in line for line in lines), lines
    assert position(run, 3) == {}  # the step says it all
    assert cache_run([str(run)], None)


def test_a_stream_goes_on_at_its_shard(tmp_path: Path, shards: Path, base: dict[str, Any]) -> None:
    streams = [f"pipe:cat {path}" for path in sorted(shards.glob("*.tar"))]
    keys = {"data__shards": streams, "data__shuffle_buffer": 1, "train__save_every": 2}
    lines: list[str] = []
    whole = train(tmp_path, "whole", lines, train__steps=6, **keys)
    seen = [captions for _, _, captions in clip_tasks.SEEN]
    assert any("resume restarts at the beginning of the oldest unfinished shard" in line for line in lines)
    train(tmp_path, "parts", train__steps=4, **keys)
    saved = position(tmp_path / "parts", 4)
    assert saved["shards"] > 1 and saved == position(whole, 4)
    train(tmp_path, "parts", train__steps=6, **keys)
    resumed = [captions for _, _, captions in clip_tasks.SEEN]
    assert len(resumed) == 2
    flat = [text for captions in seen for text in captions or ()]
    first = flat.index((resumed[0] or [""])[0])
    assert 4 < first < 16  # neither from the start nor beyond what was reached
    assert flat[first : first + 4] == resumed[0]
    with pytest.raises(ConfigError, match="is a stream: download the shards"):
        train(tmp_path, "cached", stages__generator__cache=True, **keys)


def test_the_order_of_a_stream_must_not_depend_on_the_machine(
    tmp_path: Path, shards: Path, base: dict[str, Any]
) -> None:
    streams = [f"pipe:cat {path}" for path in sorted(shards.glob("*.tar"))]
    keys = {"data__shards": streams, "train__deterministic": True}
    with pytest.raises(ConfigError, match=r"depends on the number of data workers.*set train\.workers=4"):
        train(tmp_path, "refused", train__workers="auto", **keys)
    train(tmp_path, "fixed", **keys)
