"""A cache after its data changed or its filling was interrupted: only what is missing is encoded, and all rows are those of a fresh cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from kineograph.cache import fill
from kineograph.cache.source import Cache
from kineograph.core.config import merge
from kineograph.core.errors import RunInUse
from kineograph.core.run_folder import RunFolder
from kineograph.run.cache import cache_run
from kineograph.train import checkpoint
from tests.cache.reuse_task import ENCODED
from tests.run import clip_tasks
from tests.subprocesses import python_path

ROOT = Path(__file__).parents[2]
STAGES = {
    "codec": {"task": "tests.run.clip_tasks.BlockCodec", "train": {"steps": 1}},
    "generator": {"task": "tests.cache.reuse_task.Keeper", "codec": "codec", "train": {"steps": 1}},
}


def draw(path: Path, number: int) -> None:
    """A clip of 9 frames (of which 5 are taken, from a random start) or a picture, wide or tall, no two pixels alike."""
    rng = np.random.default_rng(number)
    size = [(24, 36), (36, 24)][number % 2]
    frames = [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for _ in range(9 if number % 3 else 1)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=125)
    path.with_suffix(".txt").write_text(f"clip {number}")


@pytest.fixture(autouse=True)
def _quiet(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
    monkeypatch.setattr(fill, "PACK", 3)  # several packs
    monkeypatch.setattr(fill, "BATCH", 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 16 clips; what it holds beside its caches."""
    from kineograph.run.train import train

    place = tmp_path_factory.mktemp("trained")
    (place / "clips").mkdir()
    for number in range(16):
        draw(place / "clips" / f"c{number:02}.gif", number)
    data = {
        "source": "folder", "folder": str(place / "clips"), "size": 16, "frames": 5, "fps": 8, "validation": 0.2, "crop": "random",
        "buckets": {"sizes": [[16, 24], [24, 16]], "frames": [1, 5]},
    }  # fmt: skip
    base = {key: value for key, value in clip_tasks.BASE.items() if key not in ("data", "stages")}
    (place / "run.yaml").write_text(yaml.safe_dump({**base, "data": data, "stages": STAGES}, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "home"))
        patch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
        train([str(place / "run.yaml")], run=place / "run", quiet=True)
    return place


def copied(trained: Path, place: Path, name: str = "run", **changes: Any) -> Path:
    """The run in another place, on the clips that lie there."""
    run = Path(shutil.copytree(trained / "run", place / name))
    (run / "data.json").unlink()  # the copied clips will change: else they would be other items at another place
    if not (place / "clips").exists():
        shutil.copytree(trained / "clips", place / "clips")
    tree = yaml.safe_load((run / "config.yaml").read_text().replace(str(trained / "clips"), str(place / "clips")))
    data = changes.pop("data", {})  # which every stage has of its own in a saved config
    changes = merge({"stages": {stage: {"data": data} for stage in tree["stages"]}}, changes)
    (run / "config.yaml").write_text(yaml.safe_dump(merge(tree, changes), sort_keys=False))
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return copied(trained, tmp_path)


def cached(run: Path, lines: list[str] | None = None) -> Path:
    ENCODED.clear()
    (path,) = cache_run([str(run)], note=(lines if lines is not None else []).append)
    return path


def content(path: Path) -> list[tuple[Any, ...]]:
    """All rows in the order of the data: name, shape, caption and every field."""
    source = opened(path)
    rows = []
    for index in range(len(source)):
        sample = source.read(index, np.random.default_rng(0))
        fields = {
            "latents": sample.latents,
            "embeds": sample.text_embeds,
            "text_mask": sample.text_mask,
            "mask": sample.frame_mask,
        }
        values = {name: value.tolist() for name, value in {**fields, **sample.extra}.items() if value is not None}
        shape = source.buckets.shape(index) if source.buckets is not None else None
        rows.append((source.identity(index), shape, sample.caption, sample.fps, values))
    return rows


def fresh(run: Path, trained: Path, **changes: Any) -> list[tuple[Any, ...]]:
    """The rows of a cache that is made from nothing on the same clips."""
    return content(cached(copied(trained, run.parent, "fresh", **changes)))


def packs(path: Path) -> list[Path]:
    return sorted(path.parent.glob("pack-*"))


def opened(path: Path) -> Cache:
    keys = {"folder": str(path), "size": (16, 16), "frames": 5}
    return Cache.open(Cache.Config.model_validate(keys), "train", 0)


def names(path: Path) -> list[str]:
    source = opened(path)
    return [source.identity(index) for index in range(len(source))]


def training_name(path: Path, clip: bool = True) -> str:
    """An item of the training split in the middle of the set."""
    those = [name for name in names(path) if (int(name[1:3]) % 3 > 0) == clip]
    return those[len(those) // 2]


# What is encoded --------------------------------------------------------------------------------------------------


def change_clip(clips: Path, name: str) -> list[str]:
    caption = (clips / name).with_suffix(".txt").read_text()
    draw(clips / name, int(name[1:3]) + 30)  # of the same shape
    (clips / name).with_suffix(".txt").write_text(caption)
    return [caption]


def add_clip(clips: Path, name: str) -> list[str]:
    draw(clips / "b.gif", 91)  # before all others: every number moves
    draw(clips / "c05b.gif", 92)
    return ["clip 91", "clip 92"]


def remove_clip(clips: Path, name: str) -> list[str]:
    (clips / name).unlink()
    return []


def change_caption(clips: Path, name: str) -> list[str]:
    (clips / name).with_suffix(".txt").write_text("new text")
    return ["new text"]


def change_shape(clips: Path, name: str) -> list[str]:
    draw(clips / name, int(name[1:3]) + 31)
    return [f"clip {int(name[1:3]) + 31}"]


@pytest.mark.parametrize(
    ("change", "buckets"),
    [
        (change_clip, True),
        (add_clip, True),
        (add_clip, False),
        (remove_clip, False),
        (change_caption, True),
        (change_shape, True),
    ],
)
def test_only_what_changed_is_encoded_and_all_is_as_from_nothing(
    trained: Path, tmp_path: Path, change: Callable[[Path, str], list[str]], buckets: bool
) -> None:
    changes: dict[str, Any] = {} if buckets else {"data": {"buckets": None, "validation": 0.1}}
    run = copied(trained, tmp_path, **changes)
    before = cached(run)
    assert len(ENCODED) == len(names(before))
    expected = change(tmp_path / "clips", training_name(before))
    lines: list[str] = []
    after = cached(run, lines)
    assert after != before
    assert sorted(ENCODED) == sorted(expected)
    reused = len(names(after)) - len(expected)
    if expected:
        told = f"{len(expected)} items encoded into {after}, {reused} were in the cache already"
        assert any(told in line for line in lines)
    assert content(after) == fresh(run, trained, **changes)
    assert len(opened(before)) > 0  # it is left as it was


def test_training_reads_the_new_cache_and_says_what_it_took(trained: Path, tmp_path: Path) -> None:
    from kineograph.run.train import train

    run = copied(trained, tmp_path, stages={"generator": {"cache": True}})
    before = cached(run)
    change_caption(tmp_path / "clips", training_name(before))
    lines: list[str] = []
    ENCODED.clear()
    train(["stages.generator.train.steps=2"], run=run, note=lines.append)
    assert ENCODED == ["new text"]
    assert any("1 items encoded" in line and "in the cache already" in line for line in lines)
    assert any("trains from" in line for line in lines)


def test_another_split_takes_what_it_shares(trained: Path, tmp_path: Path) -> None:
    run = copied(trained, tmp_path, data={"validation": 0.5})
    half = cached(run)
    more = {"data": {"validation": 0.05}}
    shutil.move(run / "generator" / "cache", tmp_path / "kept")
    shutil.rmtree(run)
    run = copied(trained, tmp_path, **more)
    shutil.move(tmp_path / "kept", run / "generator" / "cache")
    whole = cached(run)
    assert set(names(half)) < set(names(whole))
    assert len(ENCODED) == len(names(whole)) - len(names(half))
    assert content(whole) == fresh(run, trained, **more)


def test_items_whose_bucket_is_another_are_encoded_again(trained: Path, run: Path, tmp_path: Path) -> None:
    before = cached(run)
    shutil.move(before.parent, tmp_path / "kept")
    shutil.rmtree(run)
    wide = {"data": {"buckets": {"sizes": [[16, 24]]}}}
    run = copied(trained, tmp_path, **wide)
    shutil.move(tmp_path / "kept", run / "generator" / "cache")
    after = cached(run)
    tall = [f"clip {int(name[1:3])}" for name in names(after) if int(name[1:3]) % 2]
    assert sorted(ENCODED) == sorted(tall)
    assert content(after) == fresh(run, trained, **wide)


def test_nothing_is_taken_from_a_cache_of_another_codec(trained: Path, tmp_path: Path, run: Path) -> None:
    from kineograph.run.train import train

    before = cached(run)
    old = checkpoint.select(run / "codec" / "checkpoints").digest()
    train(["stages.codec.train.steps=2"], run=run, quiet=True)
    assert checkpoint.select(run / "codec" / "checkpoints").digest() != old
    lines: list[str] = []
    after = cached(run, lines)
    assert after != before and len(ENCODED) == len(names(after))
    assert not any("in the cache already" in line for line in lines)
    assert lines[-1].endswith(f"are no longer read: kineo cache {run} --prune removes them")


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": {"generator": {"cache_precision": "fp32"}}},
        {"data": {"crop": "center"}},
        {"stages": {"generator": {"text": {"length": 25}}}},
    ],
)
def test_nothing_is_taken_where_items_would_be_encoded_otherwise(
    trained: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = copied(trained, tmp_path)
    before = cached(run)
    shutil.move(before.parent, tmp_path / "kept")
    shutil.rmtree(run)
    run = copied(trained, tmp_path, **changes)
    shutil.move(tmp_path / "kept", run / "generator" / "cache")
    after = cached(run)
    assert after != before and len(ENCODED) == len(names(after))


def test_what_stood_in_for_a_broken_clip_is_not_taken(trained: Path, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"data": {"buckets": None, "validation": 0}}  # buckets leave broken files out
    run = copied(trained, tmp_path, **plain)
    (tmp_path / "clips" / "c04.gif").write_bytes(b"broken")
    before = cached(run)
    shown = opened(before).caption(names(before).index("c04.gif"))
    assert shown != "clip 4"
    (gone,) = tmp_path.glob(f"clips/c{int(str(shown).split()[1]):02}.gif")
    gone.unlink()
    (run / "skipped.jsonl").unlink()
    after = cached(run)
    assert len(ENCODED) == 1 and [shown] != ENCODED  # another one stands in: the first is gone
    assert "c04.gif" in (run / "skipped.jsonl").read_text()
    assert content(after) == fresh(run, trained, **plain)


@pytest.mark.parametrize("added", [True, False])
def test_items_of_damaged_packs_are_encoded_again(run: Path, trained: Path, tmp_path: Path, added: bool) -> None:
    before = cached(run)
    damaged = packs(before)[:3]
    lost = sum(len((pack / "captions.jsonl").read_bytes().splitlines()) for pack in damaged)
    (damaged[0] / "latents.npy").write_bytes(b"no array")
    (damaged[1] / "cache.json").write_text("{")
    lines = (damaged[2] / "captions.jsonl").read_bytes().splitlines()
    (damaged[2] / "captions.jsonl").write_bytes(b"\n".join(b"\xff{" + line for line in lines) + b"\n")
    if added:
        add_clip(tmp_path / "clips", "")
    after = cached(run)
    assert len(ENCODED) == lost + (2 if added else 0)
    assert content(after) == fresh(run, trained)


def test_nothing_is_encoded_after_an_item_left(run: Path, tmp_path: Path) -> None:
    remove_clip(tmp_path / "clips", training_name(cached(run)))
    lines: list[str] = []
    after = cached(run, lines)
    assert not ENCODED and len(names(after)) > 0
    assert f"generator: all {len(names(after))} items were encoded before" in lines


# Processes that end at once, and several of them ------------------------------------------------------------------


def command(run: Path, delay: float = 0.1) -> subprocess.Popen:
    """`kineo cache`, slow enough to be killed in the middle."""
    code = (
        "import sys, time\n"
        "from kineograph.cache import fill\n"
        "from kineograph.run.cache import cache_run\n"
        "fill.PACK, fill.BATCH = 3, 2\n"
        "import tests.cache.reuse_task as task\n"
        "inner = task.Keeper.precompute\n"
        "def slow(self, batch):\n"
        "    time.sleep(float(sys.argv[2]))\n"
        "    return inner(self, batch)\n"
        "task.Keeper.precompute = slow\n"
        "cache_run([sys.argv[1]], note=print)\n"
        "print('encoded', len(task.ENCODED))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(run), str(delay)], cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path()},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_two_commands_at_once_do_no_harm(run: Path, trained: Path) -> None:
    both = [command(run), command(run)]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    lines: list[str] = []
    after = cached(run, lines)
    assert not ENCODED and any("were encoded before" in line for line in lines)
    assert content(after) == fresh(run, trained)


@pytest.mark.parametrize("changed", [False, True])
def test_a_killed_fill_is_taken_up(run: Path, trained: Path, tmp_path: Path, changed: bool) -> None:
    """By the same command, or by one whose data have changed since."""
    process = command(run, delay=0.5)
    deadline = time.monotonic() + 60

    def done() -> int:
        headers = (run / "generator").glob("cache/pack-*/cache.json")
        return sum(json.loads(header.read_text())["done"] for header in headers)

    while done() < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    kept = done()
    assert not list((run / "generator").glob("cache/*/set.json"))
    expected = add_clip(tmp_path / "clips", "") if changed else []
    after = cached(run)
    assert 4 <= kept < len(names(after)) - len(expected)
    assert len(ENCODED) == len(names(after)) - kept
    assert content(after) == fresh(run, trained)


# What becomes of the old ones -------------------------------------------------------------------------------------


def test_pruning_leaves_what_is_read(run: Path, tmp_path: Path) -> None:
    before = cached(run)
    rows = content(before)
    name = training_name(before)
    change_clip(tmp_path / "clips", name)
    lines: list[str] = []
    (after,) = cache_run([str(run)], note=lines.append, remove=True)
    assert not before.exists()
    assert [row for row in content(after) if row[0] != name] == [row for row in rows if row[0] != name]
    assert any("1 items encoded" in line for line in lines)
    assert any(line.startswith(f"{before} removed (") for line in lines)
    assert f"B kept in {after.parent}" in lines[-1]
    assert packs(after)  # packs in which rows of the set lie, also where one row is no longer read
    for clip in list((tmp_path / "clips").glob("*.gif")):
        change_clip(tmp_path / "clips", clip.name)
    old = packs(after)
    (after,) = cache_run([str(run)], note=lines.append, remove=True)
    assert not any(pack.exists() for pack in old) and len(opened(after)) > 0
    lines.clear()
    assert cache_run([str(run)], note=lines.append, remove=True) == [after]
    assert lines[-1] == f"{run}: there is no cache to remove"
    (left := after.with_name(".removed-0123")).mkdir()  # of a removal that was killed
    (earlier := after.with_name("0123456789abcdef")).mkdir()  # of an earlier version
    (earlier / "shards.json").write_text("{}")
    cache_run([str(run)], note=lines.append, remove=True)
    assert not left.exists() and not earlier.exists() and after.exists()


READER = (
    "import sys\n"
    "from kineograph.cache.source import Cache\n"
    "source = Cache.open(Cache.Config(folder=sys.argv[1], size=(16, 16), frames=5), 'train', 0)\n"
    "print(len(source), flush=True)\n"
    "sys.stdin.read()\n"
)
TRAINER = (
    "import sys\n"
    "from kineograph.core.run_folder import RunFolder\n"
    "with RunFolder(sys.argv[1]).lock(shared=True):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()\n"
)


def holding(code: str, path: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_pruning_waits_for_those_who_read_or_write(run: Path, tmp_path: Path) -> None:
    before = cached(run)
    add_clip(tmp_path / "clips", "")
    lines: list[str] = []
    with holding(READER, before) as reader:  # a run elsewhere, with data.source=cache
        (after,) = cache_run([str(run)], note=lines.append, remove=True)
        reader.communicate("")
    assert lines[-1] == f"{run}: there is no cache to remove" and f"{before} is kept: a process reads it" in lines[-2]
    assert len(content(before)) > 0
    with holding(TRAINER, run) as trainer:  # encodes beside this one
        with pytest.raises(RunInUse, match="nothing was removed"):
            cache_run([str(run)], note=lines.append, remove=True)
        trainer.communicate("")
    assert before.exists()
    cache_run([str(run)], note=lines.append, remove=True)
    assert not before.exists() and after.exists()


def test_pruning_keeps_what_a_stage_names_or_will_read(trained: Path, run: Path, tmp_path: Path) -> None:
    before = cached(run)
    add_clip(tmp_path / "clips", "")
    after = cached(run)
    tree = RunFolder(run).config()
    keys = {"source": "cache", "folder": str(before), "size": 16, "frames": 5, "validation": 0.2}
    tree["stages"]["other"] = {**tree["stages"]["generator"], "data": keys}
    (run / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    cache_run([str(run)], note=lambda line: None, remove=True)
    assert before.exists() and after.exists()
    del tree["stages"]["other"]
    tree["stages"]["generator"]["skip"] = True
    (run / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    cache_run([str(run)], note=lambda line: None, remove=True)
    assert before.exists() and after.exists()
    tree["stages"]["generator"] |= {"skip": False, "cache": False}
    (run / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    cache_run([str(run)], note=lambda line: None, remove=True)
    assert not before.exists() and not after.exists()


def test_the_command_prunes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kineograph.cli import main

    before = cached(run)
    add_clip(tmp_path / "clips", "")
    with pytest.raises(SystemExit) as ended:
        main(["cache", str(run), "--prune"])
    assert not ended.value.code
    assert f"{before} removed" in capsys.readouterr().err and not before.exists()
