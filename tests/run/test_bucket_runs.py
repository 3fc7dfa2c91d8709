"""Runs on clips of several shapes: from the files, from a cache that processes share, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from kineograph.cache.pack import read_header
from kineograph.cache.source import Cache
from kineograph.cache.store import CacheSet
from kineograph.core.config import merge
from kineograph.core.errors import ConfigError, InputError, RunInUse
from kineograph.core.protocols import TextEncoder
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext
from kineograph.data.loader import Loader
from kineograph.run.cache import cache_run
from kineograph.train import checkpoint
from tests.run import clip_tasks

ROOT = Path(__file__).parents[2]
STAGES = {
    "codec": {"task": "tests.run.clip_tasks.BlockCodec", "train": {"steps": 1}},
    "generator": {"task": "tests.run.clip_tasks.LatentGenerator", "codec": "codec"},
}
BUCKETS = {"sizes": [[16, 24], [24, 16], [16, 16]], "frames": [1, 5]}


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """18 GIFs and pictures: wide, tall and square, of one and of several frames, each with a caption."""
    root = tmp_path / "clips"
    root.mkdir()
    for number in range(18):
        size = [(48, 32), (32, 48), (32, 32)][number % 3]
        frames = [
            Image.fromarray(np.full((size[1], size[0], 3), 10 * number + 8 * t, np.uint8))
            for t in range(5 if number % 2 else 1)
        ]
        suffix = "gif" if len(frames) > 1 else "png"
        more: dict[str, Any] = (
            {"save_all": True, "append_images": frames[1:], "duration": 125} if len(frames) > 1 else {}
        )
        frames[0].save(root / f"c{number:02}.{suffix}", **more)
        (root / f"c{number:02}.txt").write_text(f"clip {number}")
    return root


def data(clips: Path, **more: Any) -> dict[str, Any]:
    return {
        "source": "folder", "folder": str(clips), "size": 16, "frames": 5, "fps": 8, "validation": 0.2,
        "buckets": BUCKETS | more,
    }  # fmt: skip


def config(folder: Path, clips: Path, **changes: Any) -> Path:
    """A file for the command line."""
    base = {key: value for key, value in clip_tasks.BASE.items() if key not in ("data", "stages")}
    tree = merge({**base, "data": data(clips), "stages": STAGES}, changes)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def bucketed(folder: Path, clips: Path, name: str = "run", **changes: Any) -> Path:
    from kineograph.run.train import train as run_train

    path = config(folder, clips, **changes)
    clip_tasks.SEEN.clear()
    return run_train([str(path)], run=folder / name, quiet=True)


def weights(run: Path, stage: str = "generator") -> dict[str, torch.Tensor]:
    return checkpoint.select(run / stage / "checkpoints").tensors("model")


# Training ----------------------------------------------------------------------------------------------------------


def test_a_run_trains_on_every_shape_and_keeps_the_report(tmp_path: Path, clips: Path) -> None:
    lines: list[str] = []
    from kineograph.run.train import train as run_train

    run = run_train(
        [str(config(tmp_path, clips, train={"steps": 12, "batch_size": 4}))], run=tmp_path / "run", note=lines.append
    )
    shapes = {tuple(latents.shape[1:]) for latents, _, _ in clip_tasks.SEEN}
    assert shapes == {(t, h, w) for t in (1, 3) for h, w in ((2, 3), (3, 2), (2, 2))}
    report = json.loads((run / "generator" / "buckets.json").read_text())
    assert report["budget"] == 4 * 5 * 16 * 16
    assert sum(row["items"] for row in report["buckets"]) == len(
        [x for x in clips.iterdir() if x.suffix != ".txt"]
    ) - held(run)
    assert {row["rows"] for row in report["buckets"]} == {20, 13, 4, 2}
    assert any(line.startswith("buckets: ") for line in lines)
    assert any("5 × 24 × 16" in line for line in lines)


def held(run: Path) -> int:
    """Items of the validation split."""
    from kineograph.run.open_data import open_data
    from kineograph.run.plan import make_plan

    plan = make_plan(RunFolder(run).config())
    return len(open_data(plan.stages[0], plan.seed, note=lambda line: None).validation)


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path, clips: Path) -> None:
    whole = bucketed(tmp_path, clips, "whole", train={"steps": 6})
    bucketed(tmp_path, clips, "parts", train={"steps": 3})
    parts = bucketed(tmp_path, clips, "parts", train={"steps": 6})
    assert all(torch.equal(value, weights(parts)[name]) for name, value in weights(whole).items())


def test_a_vqgan_trains_on_buckets(tmp_path: Path, clips: Path) -> None:
    stage = {
        "task": "vqgan", "width": 8, "multipliers": [1, 2], "quantizer": {"kind": "fsq", "levels": [5, 5]},
        "adversarial": {"width": 8, "start": 0}, "perceptual": {"weight": 0},
    }  # fmt: skip
    picture = {"frames": 1, "buckets": {"frames": [1]}}
    stages = {"codec": {"skip": True}, "generator": {"skip": True}, "tokenizer": stage}
    run = bucketed(tmp_path, clips, data=picture, stages=stages, train={"batch_size": 4})
    assert checkpoint.select(run / "tokenizer" / "checkpoints").step == 3


def test_what_trains_on_one_shape_says_so(tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_tasks.LatentGenerator, "can_bucket", lambda task: False)
    with pytest.raises(ConfigError, match=r"generator .*one shape.*stages\.generator\.data\.buckets=null"):
        bucketed(tmp_path, clips)
    assert not (tmp_path / "run").exists()


def test_a_shape_that_the_codec_cannot_encode_is_refused(tmp_path: Path, clips: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.buckets has clips of 4 × .*1 \+ 2 k"):
        bucketed(tmp_path, clips, data={"buckets": {"frames": [1, 4]}})
    assert not (tmp_path / "run").exists()


# The cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 0), ("fp16", 11), ("bf16", 8)])
def test_cached_posteriors_train_as_the_files_do(tmp_path: Path, clips: Path, precision: str, bits: int) -> None:
    direct = bucketed(tmp_path, clips, "direct")
    seen = list(clip_tasks.SEEN)
    cached = bucketed(tmp_path, clips, "cached", stages={"generator": {"cache": True, "cache_precision": precision}})
    assert len(seen) == len(clip_tasks.SEEN) > 0
    tolerance = 8 * 2.0**-bits if bits else 0
    for (latents, mask, captions), (from_disk, its_mask, its_captions) in zip(seen, clip_tasks.SEEN, strict=True):
        assert torch.allclose(latents, from_disk, rtol=tolerance, atol=tolerance)
        assert captions == its_captions
        assert mask is None or torch.equal(mask, its_mask)
    if not bits:
        assert all(torch.equal(value, weights(cached)[name]) for name, value in weights(direct).items())
    (pack, *_) = sorted((cached / "generator" / "cache").glob("pack-*"))
    assert np.load(pack / "latents.npy").dtype.itemsize == (4 if precision == "fp32" else 2)
    assert np.load(pack / "text_embeds.npy").dtype.itemsize == (4 if precision == "fp32" else 2)


def set_folder(run: Path) -> Path:
    (path,) = (run / "generator" / "cache").glob("*/set.json")
    return path.parent


def test_a_pack_has_items_of_one_shape_and_their_rate(tmp_path: Path, clips: Path) -> None:
    run = bucketed(tmp_path, clips, stages={"generator": {"cache": True}})
    cache_set = CacheSet.read(set_folder(run))
    assert cache_set is not None and len(cache_set.header.packs) > 1
    for name, bucket in zip(cache_set.header.packs, cache_set.header.bucket_of, strict=True):
        header = read_header(cache_set.folder.parent / name)
        assert header is not None and header.done == header.count
        frames, height, width = cache_set.header.shapes[bucket]
        assert header.shape == (1 + frames // 2, 2, height // 8, width // 8)
        assert set(np.load(cache_set.folder.parent / name / "fps.npy").tolist()) == {8.0}


def test_text_encoders_are_released_once_everything_is_encoded(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []

    class Frozen(TextEncoder):
        def release(self) -> None:
            released.append(1)

    class WithText(clip_tasks.LatentGenerator):
        def __init__(self, config: clip_tasks.ClipConfig, context: BuildContext) -> None:
            super().__init__(config, context)
            self.text = Frozen()

    monkeypatch.setattr(clip_tasks.LatentGenerator, "build", classmethod(lambda cls, *given: WithText(*given)))
    bucketed(tmp_path, clips)
    assert not released
    bucketed(tmp_path, clips, "cached", stages={"generator": {"cache": True}})
    assert released == [1]


def opened(run: Path, **keys: Any) -> Cache:
    tree = {"folder": str(set_folder(run)), "size": (16, 16), "frames": 5, **keys}
    return Cache.open(Cache.Config.model_validate(tree), "train", 0)


def test_a_cache_of_buckets_is_a_source_of_its_own(tmp_path: Path, clips: Path) -> None:
    run = bucketed(tmp_path, clips, stages={"generator": {"cache": True}})
    source = opened(run)
    assert source.buckets is not None
    for (batch,) in Loader(source, seed=0, batch_size=4).steps(0, 6):
        assert batch.latents is not None and batch.text_embeds is not None
        assert len({tuple(row.shape) for row in batch.latents}) == 1
    (shown,) = Loader(source, seed=0, batch_size=4).fixed_batches(4, 4, one_shape=True)
    assert shown.latents is not None
    again = Loader(source, seed=0, batch_size=4, workers=1).steps(0, 2)
    for (a,), (b,) in zip(Loader(source, seed=0, batch_size=4).steps(0, 2), again, strict=True):
        assert torch.equal(a.latents, b.latents)  # type: ignore[arg-type]


def test_a_codec_that_did_not_make_the_cache_refuses_it(tmp_path: Path, clips: Path) -> None:
    source = opened(bucketed(tmp_path, clips, stages={"generator": {"cache": True}}))
    source.check_grid(lambda frames, height, width: (1 + frames // 2, height // 8, width // 8))
    with pytest.raises(InputError, match=r"codec makes t h w = \(1, 2, 3\) of 1 × 16 × 24|codec makes t h w"):
        source.check_grid(lambda frames, height, width: (1 + frames // 2, height // 4, width // 8))


def test_a_change_of_buckets_or_facts_is_another_cache(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bucketed(tmp_path, clips)
    first = cache_run([str(run)], note=lambda line: None)
    assert cache_run([str(run)], note=lambda line: None) == first
    facts = classmethod(lambda cls, config: {"vae": "another"})
    monkeypatch.setattr(clip_tasks.LatentGenerator, "cache_facts", facts)
    assert cache_run([str(run)], note=lambda line: None) != first


def test_nothing_trains_while_a_cache_is_made(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.lock(shared=True):
        code = (
            "import sys; from kineograph.core.run_folder import RunFolder\n"
            "from kineograph.core.errors import RunInUse\n"
            "folder = RunFolder(sys.argv[1])\n"
            "with folder.lock(shared=True): print('shared')\n"
            "try:\n"
            "    with folder.lock(): print('alone')\n"
            "except RunInUse: print('in use')\n"
        )
        asked = subprocess.run([sys.executable, "-c", code, str(folder.path)], cwd=ROOT, capture_output=True, text=True)
        assert asked.stdout.split("\n")[:2] == ["shared", "in use"], asked.stderr
        with pytest.raises(RunInUse), folder.lock():
            pass


def test_a_disk_without_room_is_told_before_it_is_full(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 100

    monkeypatch.setattr("kineograph.cache.fill.shutil.disk_usage", lambda path: Full)
    with pytest.raises(InputError, match=r"need about .* GiB.*generator\.cache=false"):
        bucketed(tmp_path, clips, stages={"generator": {"cache": True}})
