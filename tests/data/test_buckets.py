"""Buckets: what goes where, batches of one shape under one budget, the same for any number of processes and after any resume."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.cli import main
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.data import check
from kineograph.data.buckets import Bucket, BucketOrder, BucketsConfig, MediaInfo, assign_buckets, choose_bucket
from kineograph.data.folder import Folder
from kineograph.data.loader import Loader
from kineograph.data.webdataset import WebDataset

WIDE, TALL, SQUARE = (32, 48), (48, 32), (32, 32)
SHAPES = [Bucket(1, *WIDE), Bucket(1, *TALL), Bucket(9, *WIDE), Bucket(9, *TALL)]


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """7 wide, 5 tall and 1 square picture, each of one gray of its own."""
    root = tmp_path / "mixed"
    root.mkdir()
    sizes = [(96, 64)] * 7 + [(64, 96)] * 5 + [(64, 64)]
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (10 * number + 5,) * 3).save(root / f"p{number:02}.png")
        (root / f"p{number:02}.txt").write_text(f"gray {number}")
    return root


def opened(folder: Path, split: str = "train", **keys) -> Folder:
    buckets = {"sizes": [WIDE, TALL, SQUARE]} | keys.pop("buckets", {})
    tree = {"folder": str(folder), "size": list(SQUARE), "validation": 0, "buckets": buckets} | keys
    return Folder.open(parse(Folder.Config, tree, "data"), split, 0)  # type: ignore[arg-type]


def seen(batch) -> list[int]:
    """Which pictures of `mixed` a batch holds."""
    return [round((float(row.float().mean()) - 5) / 10) for row in batch.pixels]


# What goes where --------------------------------------------------------------------------------------------------


def test_shapes_of_a_resolution_have_its_area_and_all_aspects() -> None:
    shapes = BucketsConfig(aspects=("16:9", "1:1", "9:16"), frames=(1, 17)).shapes(Bucket(17, 256, 256))
    assert shapes == sorted(
        Bucket(frames, *size) for frames in (1, 17) for size in ((192, 336), (256, 256), (336, 192))
    )
    assert all(abs(shape.height * shape.width / 256**2 - 1) < 0.05 for shape in shapes)


@pytest.mark.parametrize(
    ("extent", "wanted"),
    [
        (MediaInfo(1920, 1080, 300, 10.0), Bucket(9, *WIDE)),
        (MediaInfo(1080, 1920, 300, 10.0), Bucket(9, *TALL)),  # a phone's clip stays upright
        (MediaInfo(1080, 1920), Bucket(1, *TALL)),
        (MediaInfo(1920, 1080, 30, 1.0), Bucket(1, *WIDE)),  # 8 frames at 8 a second are too few for 9
        (MediaInfo(1920, 1080, 34, 34 / 30), Bucket(9, *WIDE)),
    ],
)
def test_an_item_goes_where_most_of_it_is_seen(extent: MediaInfo, wanted: Bucket) -> None:
    assert SHAPES[choose_bucket(extent, SHAPES, fps=8.0).bucket] == wanted


def test_without_a_rate_frames_are_counted_as_they_are() -> None:
    assert SHAPES[choose_bucket(MediaInfo(96, 64, 30, 1.0), SHAPES, fps=None).bucket].frames == 9


def test_of_shapes_alike_the_largest_that_needs_no_enlarging_is_taken() -> None:
    shapes = [Bucket(1, 64, 64), Bucket(1, 256, 256), Bucket(1, 512, 512)]
    assert shapes[choose_bucket(MediaInfo(300, 300), shapes, None).bucket].height == 256
    assert shapes[choose_bucket(MediaInfo(2000, 2000), shapes, None).bucket].height == 512
    small = choose_bucket(MediaInfo(40, 40), shapes, None)
    assert shapes[small.bucket].height == 64 and small.enlarged


def test_what_is_too_short_is_padded_and_told(tmp_path: Path) -> None:
    buckets = assign_buckets(
        [MediaInfo(96, 64, 4, 0.5)], BucketsConfig(sizes=(WIDE,), frames=(9, 17)), Bucket(9, *WIDE), 8.0
    )
    assert buckets.shape(0).frames == 9 and buckets.fits[0].padded
    assert "1 too short and padded" in "\n".join(buckets.lines())


def test_a_bucket_with_few_items_is_closed() -> None:
    extents = [MediaInfo(96, 64)] * 5 + [MediaInfo(64, 96)] * 4 + [MediaInfo(64, 64)]
    config = {"sizes": (WIDE, TALL, SQUARE)}
    assert sorted(map(len, assign_buckets(extents, BucketsConfig(**config), Bucket(1, 32, 32), None).members)) == [
        1,
        4,
        5,
    ]
    joined = assign_buckets(extents, BucketsConfig(**config, least=2), Bucket(1, 32, 32), None)
    assert sum(map(len, joined.members)) == 10 and Bucket(1, *SQUARE) not in joined.shapes
    alone = assign_buckets(extents, BucketsConfig(**config, least=99), Bucket(1, 32, 32), None)
    assert [len(members) for members in alone.members if len(members)] == [10]  # the last one stays


def test_the_budget_counts_tokens() -> None:
    config = BucketsConfig(patch=(4, 16, 16))
    assert config.tokens(Bucket(49, 480, 720)) == 13 * 30 * 45
    assert config.tokens(Bucket(1, 480, 720)) == 30 * 45
    pixels = BucketsConfig()
    assert pixels.tokens(Bucket(3, 4, 5)) == 60


def test_rows_follow_from_the_budget(mixed: Path) -> None:
    buckets = opened(mixed, buckets={"budget": 2 * 32 * 48 + 100}).buckets
    assert buckets is not None
    assert dict(zip(buckets.shapes, buckets.batch_sizes(99), strict=True)) == {
        Bucket(1, *WIDE): 2,
        Bucket(1, *TALL): 2,
        Bucket(1, *SQUARE): 3,
    }
    usual = opened(mixed).buckets
    assert usual is not None and usual.batch_sizes(3) == [3, 2, 2]  # 3 squares of 1,024 pixels


def test_a_clip_beyond_the_budget_is_refused(mixed: Path) -> None:
    """What is named is enough for all of them."""
    shapes = {"sizes": [[32, 32], [32, 48], [48, 32]], "budget": 1000}
    with pytest.raises(ConfigError, match="to 1536 or more"):
        Loader(opened(mixed, buckets=shapes), seed=0, batch_size=4).check()
    with pytest.raises(ConfigError, match=r"bucket 1 × 32 × 48 has 1,536 tokens.*budget=1100.*to 1536"):
        Loader(opened(mixed, buckets={"budget": 1100}), seed=0, batch_size=4).check()


def test_the_report_tells_counts_rows_and_crops(mixed: Path) -> None:
    source = opened(mixed, buckets={"sizes": [WIDE, TALL], "budget": 4 * 32 * 48})
    assert source.buckets is not None
    table = source.buckets.table(8)
    assert [(row["items"], row["rows"], row["batches_an_epoch"]) for row in table] == [(8, 4, 2.0), (5, 4, 1.25)]
    text = "\n".join(source.buckets.lines(8))
    assert "13 items in 2 of 2 shapes" in text and "1 × 48 × 32" in text and "4 a batch" in text
    assert f"{(7 + 2 / 3) / 8:.0%} of the image kept" in text  # the square loses a third


@pytest.mark.parametrize(
    ("buckets", "told"),
    [
        ({"aspects": ["16x9"]}, "'16x9' is not an aspect"),
        ({"aspects": ["0:1"]}, "'0:1' is not an aspect"),
        ({"resolutions": [64]}, "sizes cannot be combined with resolutions"),
        ({"aspects": ["1:1"]}, "sizes cannot be combined with aspects"),
        ({"multiple": 64}, "sizes cannot be combined with multiple"),
        ({"aspects": ["1:1"], "multiple": 64}, "sizes cannot be combined with aspects and multiple"),
    ],
)
def test_odd_configs_are_refused(tmp_path: Path, buckets: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(Folder.Config, {"folder": "x", "buckets": {"sizes": [WIDE], **buckets}}, "data")


# Batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_has_one_shape_and_every_item_comes(mixed: Path) -> None:
    met: Counter[int] = Counter()
    shapes = set()
    for (batch,) in Loader(opened(mixed), seed=3, batch_size=3).steps(0, 8):
        shapes.add(tuple(batch.pixels.shape))
        met.update(seen(batch))
    assert shapes == {(2, 1, 3, *WIDE), (2, 1, 3, *TALL), (3, 1, 3, *SQUARE)}
    assert set(met) == set(range(13))


def test_captions_and_pictures_stay_together(mixed: Path) -> None:
    for (batch,) in Loader(opened(mixed), seed=1, batch_size=3).steps(0, 5):
        assert batch.captions == [f"gray {number}" for number in seen(batch)]


def test_over_many_epochs_every_item_comes_equally_often() -> None:
    extents = [MediaInfo(96, 64)] * 7 + [MediaInfo(64, 96)] * 5 + [MediaInfo(64, 64)]
    buckets = assign_buckets(extents, BucketsConfig(sizes=(WIDE, TALL, SQUARE)), Bucket(1, *SQUARE), None)
    order = BucketOrder(buckets, seed=5, batch_size=3)
    rounds = 60
    steps = next(step for step in range(10_000) if order.epoch_of(step) == rounds)
    met = Counter(item for step in range(steps) for item in order.batch_at(step)[1].tolist())
    assert set(met) == set(range(13))
    assert min(met.values()) >= rounds  # nothing is lost
    assert max(met.values()) <= rounds + 3  # and a small bucket's items are not shown out of proportion


def test_when_an_epoch_ends_every_item_has_come() -> None:
    extents = [MediaInfo(96, 64)] * 7 + [MediaInfo(64, 96)] * 2
    order = BucketOrder(
        assign_buckets(extents, BucketsConfig(sizes=(WIDE, TALL)), Bucket(1, *WIDE), None), 5, batch_size=3
    )
    met: Counter[int] = Counter()
    for step in range(60):
        met.update(order.batch_at(step)[1].tolist())
        if order.epoch_of(step + 1) > order.epoch_of(step):
            assert len(met) == 9 and min(met.values()) >= order.epoch_of(step) + 1


def test_a_step_is_a_function_of_seed_and_step() -> None:
    extents = [MediaInfo(96, 64)] * 20 + [MediaInfo(64, 96)] * 11
    buckets = assign_buckets(extents, BucketsConfig(sizes=(WIDE, TALL)), Bucket(1, *WIDE), None)
    first = [BucketOrder(buckets, 5, 4).batch_at(step) for step in range(30)]
    again = [BucketOrder(buckets, 5, 4).batch_at(step) for step in reversed(range(30))][::-1]
    assert all(a[0] == b[0] and (a[1] == b[1]).all() for a, b in zip(first, again, strict=True))
    other = [BucketOrder(buckets, 6, 4).batch_at(step) for step in range(30)]
    assert [shape for shape, _ in first] != [shape for shape, _ in other]
    assert len({shape for shape, _ in first[:8]}) == 2  # mixed, not one bucket after the other


def whole(mixed: Path, world: int, accumulate: int = 1, start: int = 0, workers: int = 0) -> list[torch.Tensor]:
    """The global batches of steps start … 5, put together from all processes' parts."""
    source = opened(mixed, buckets={"budget": 4 * 32 * 48}, crop="random")
    parts = [
        list(Loader(source, 7, 8, accumulate, workers=workers, rank=rank, world=world).steps(start, 6))
        for rank in range(world)
    ]
    joined = []
    for step in zip(*parts, strict=True):
        rows = [
            (int(slot), row)
            for micro in step
            for batch in micro
            for slot, row in zip(batch.slots, batch.pixels, strict=True)
        ]
        assert [slot for slot, _ in sorted(rows, key=lambda pair: pair[0])] == list(range(len(rows)))
        joined.append(torch.stack([row for _, row in sorted(rows, key=lambda pair: pair[0])]))
    return joined


def test_one_two_and_four_processes_see_the_same_batches(mixed: Path) -> None:
    alone = whole(mixed, 1)
    for world, accumulate in ((2, 1), (4, 1), (1, 2), (2, 2)):
        for a, b in zip(alone, whole(mixed, world, accumulate), strict=True):
            assert torch.equal(a, b)


def test_a_resumed_run_sees_what_an_uninterrupted_one_does(mixed: Path) -> None:
    for a, b in zip(whole(mixed, 1)[4:], whole(mixed, 1, start=4), strict=True):
        assert torch.equal(a, b)


def test_workers_read_the_same(mixed: Path) -> None:
    for a, b in zip(whole(mixed, 1), whole(mixed, 1, workers=1), strict=True):
        assert torch.equal(a, b)


def test_too_few_rows_for_the_processes_are_refused(mixed: Path) -> None:
    source = opened(mixed, buckets={"budget": 3 * 32 * 48})
    with pytest.raises(ConfigError, match=r"bucket 1 × 32 × 48 has 3 clips, too few for 4 processes.*6144"):
        Loader(source, 0, 8, world=4).check()


def test_validation_batches_are_of_one_shape_and_hold_each_item_once(mixed: Path) -> None:
    for world in (1, 2):
        slots: list[int] = []
        met: list[int] = []
        counts = set()
        for rank in range(world):
            batches = list(Loader(opened(mixed), 0, 4, rank=rank, world=world).fixed_batches(13, 4))
            counts.add(len(batches))
            slots += [int(slot) for batch in batches for slot in batch.slots]
            met += [number for batch in batches for number in seen(batch)]
        assert set(slots) == set(range(13)) and set(met) == set(range(13))
        assert len(counts) == 1  # no rank waits for another
        assert world == 2 or len(slots) == 13


def test_pictures_for_people_are_alike(mixed: Path) -> None:
    (batch,) = Loader(opened(mixed), 0, 4).fixed_batches(13, 13, one_shape=True)
    assert batch.pixels.shape == (13, 1, 3, *SQUARE)
    tight = Loader(opened(mixed, buckets={"budget": 1100}), 0, 1)  # too little for a step, which nobody asks for here
    assert len(list(tight.fixed_batches(13, 13, one_shape=True))) == 1


def test_an_unreadable_item_is_replaced_in_its_batch_shape(mixed: Path) -> None:
    source = opened(mixed)
    whole_file = (mixed / "p12.png").read_bytes()
    (mixed / "p12.png").write_bytes(whole_file[: len(whole_file) // 2])  # the only square, broken after it was measured
    loader = Loader(source, seed=3, batch_size=3)
    squares = [batch for (batch,) in loader.steps(0, 8) if batch.pixels.shape[-2:] == SQUARE]
    assert squares and all(12 not in seen(batch) for batch in squares)
    assert list(loader.skipped) == ["p12.png"]


def test_what_cannot_be_measured_is_left_out_and_listed(mixed: Path) -> None:
    (mixed / "p03.png").write_bytes(b"")
    source = opened(mixed)
    assert source.skipped == {"p03.png": "empty file (0 bytes)"}
    assert len(source) == 12
    with pytest.raises(InputError, match="1 of 13 items cannot be measured"):
        opened(mixed, max_unreadable=0.05)


def test_both_splits_share_the_shapes_that_are_open(mixed: Path) -> None:
    keys = {"validation": 0.3, "buckets": {"least": 3}}
    train, held = opened(mixed, **keys), opened(mixed, "validation", **keys)
    assert train.buckets is not None and held.buckets is not None
    assert train.buckets.shapes == held.buckets.shapes == [Bucket(1, *WIDE), Bucket(1, *TALL)]
    assert len(train) + len(held) == 13


def test_files_are_measured_once(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(mixed)
    monkeypatch.setattr("kineograph.data.folder.probe_media", lambda *given: pytest.fail("measured again"))
    assert opened(mixed).buckets == first.buckets


def test_a_source_with_buckets_travels_to_workers(mixed: Path) -> None:
    source = opened(mixed)
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(source.read(0, np.random.default_rng(0)).pixels, again.read(0, np.random.default_rng(0)).pixels)


# Clips ------------------------------------------------------------------------------------------------------------


def test_clips_go_by_length_at_the_wanted_rate(tmp_path: Path, make_video, counting, numbers) -> None:
    root = tmp_path / "clips"
    root.mkdir()
    make_video(root / "long.mp4", counting(60), fps=30)  # 2 s: 16 frames at 8 a second
    make_video(root / "short.mp4", counting(20), fps=30)  # 0.67 s: 6
    make_video(root / "lying.mp4", counting(60, 32, 48), fps=30, rotation=90)  # a portrait clip, stored on its side
    source = opened(root, fps=8, frames=13, buckets={"sizes": [WIDE, TALL], "frames": [5, 13]})
    assert source.buckets is not None
    shapes = {source.identity(item): source.buckets.shape(item) for item in range(3)}
    assert shapes == {"long.mp4": (13, *WIDE), "short.mp4": (5, *WIDE), "lying.mp4": (13, *TALL)}
    sample = source.read([source.identity(item) for item in range(3)].index("long.mp4"), np.random.default_rng(0))
    assert sample.fps == 8 and sample.pixels.shape == (13, 3, *WIDE)
    taken = np.array(numbers(sample.pixels))
    assert np.allclose(np.diff(taken), 30 / 8, atol=1) and abs((taken[-1] - taken[0]) - 12 * 30 / 8) <= 1


# Tar shards -------------------------------------------------------------------------------------------------------


def test_shards_have_buckets_too(mixed: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "00000.tar", "w") as tar:
        for path in sorted(mixed.iterdir()):
            tar.add(path, path.name)
    tree = {
        "shards": str(tmp_path / "00000.tar"),
        "size": list(SQUARE),
        "validation": 0,
        "buckets": {"sizes": [WIDE, TALL, SQUARE]},
    }
    source = WebDataset.open(parse(WebDataset.Config, tree, "data"), "train", 0)
    assert sorted(map(len, source.buckets.members)) == [1, 5, 7]
    for (batch,) in Loader(source, seed=1, batch_size=3).steps(0, 6):
        assert batch.pixels.shape[-2:] in (WIDE, TALL, SQUARE)
        assert batch.captions == [f"gray {number}" for number in seen(batch)]
    stream = tree | {"shards": f"pipe:cat {tmp_path / '00000.tar'}"}
    with pytest.raises(ConfigError, match="download the shards"):
        WebDataset.open(parse(WebDataset.Config, stream, "data"), "train", 0)


# Parts of clips ---------------------------------------------------------------------------------------------------


def test_parts_of_a_clip_are_items_with_captions_of_their_own(tmp_path: Path, make_video, counting, numbers) -> None:
    root = tmp_path / "clips"
    root.mkdir()
    make_video(root / "a.mp4", counting(60), fps=30)
    make_video(root / "b.mp4", counting(30), fps=30)
    rows = [
        {"file_name": "a.mp4", "clips": [{"start": 0, "end": 0.5, "text": "first"}, {"start": 1.0, "caption": "last"}]},
        {"file_name": "b.mp4", "text": "whole"},
    ]
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {"folder": str(root), "size": [32, 48], "frames": 4, "fps": 8, "validation": 0}
    source = Folder.open(parse(Folder.Config, tree, "data"), "train", 0)
    assert [source.identity(item) for item in range(3)] == ["a.mp4@0-0.5", "a.mp4@1-inf", "b.mp4"]
    assert [source.caption(item) for item in range(3)] == ["first", "last", "whole"]
    assert source.list_missing_captions() == []
    for seed in range(6):
        first, last = (source.read(item, np.random.default_rng(seed)) for item in (0, 1))
        assert first.fps == last.fps == 8
        taken = [numbers(sample.pixels[sample.frame_mask]) for sample in (first, last)]
        assert len(taken[0]) == len(taken[1]) == 4
        assert max(taken[0]) <= 15 and min(taken[1]) >= 29
        assert np.allclose(np.diff(taken[1]), 30 / 8, atol=1)
    short = opened(root, fps=8, frames=9, buckets={"sizes": [WIDE], "frames": [3, 9]})
    assert short.buckets is not None
    assert [short.buckets.shape(item).frames for item in range(3)] == [3, 3, 3]  # 4, 8 and 8 frames at 8 a second


def test_parts_of_a_file_share_its_split(tmp_path: Path, counting) -> None:
    root = tmp_path / "clips"
    root.mkdir()
    rows = []
    for number in range(12):
        frames = [Image.new("RGB", (16, 16), (10 * t,) * 3) for t in range(8)]
        frames[0].save(root / f"{number}.gif", save_all=True, append_images=frames[1:], duration=100)
        rows += [
            {"file_name": f"{number}.gif", "start": at, "end": at + 0.4, "text": f"{number} at {at}"} for at in (0, 0.4)
        ]
    (root / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))  # any name, if it names files
    tree = {"folder": str(root), "size": 16, "frames": 2, "validation": 0.4}
    train, held = (Folder.open(parse(Folder.Config, tree, "data"), split, 0) for split in ("train", "validation"))
    files = [{source.items[item].name for item in range(len(source))} for source in (train, held)]
    assert not files[0] & files[1] and len(train) + len(held) == 24
    for seed in range(4):
        for item in range(4):
            sample = train.read(item, np.random.default_rng(seed))
            levels = [round(float(frame.float().mean()) / 10) for frame in sample.pixels]
            assert min(levels) >= (4 if "at 0.4" in train.caption(item) else 0)
            assert max(levels) <= (7 if "at 0.4" in train.caption(item) else 3)


def test_parts_that_are_not_there_are_told(tmp_path: Path, make_video, counting) -> None:
    root = tmp_path / "clips"
    root.mkdir()
    make_video(root / "a.mp4", counting(30), fps=30)
    (root / "metadata.jsonl").write_text(
        '{"file_name": "a.mp4", "start": 3, "end": 4, "text": "beyond"}\n'
        '{"file_name": "a.mp4", "start": 2, "end": 1, "text": "backwards"}\n'
        '{"file_name": "a.mp4", "start": 0, "text": "good"}\n'
    )
    tree = {"folder": str(root), "size": 16, "frames": 2, "validation": 0}
    source = Folder.open(parse(Folder.Config, tree, "data"), "train", 0)
    assert [problem.reason for problem in source.problems] == ["line 2: a clip from 2 to 1 s is empty"]
    assert [source.caption(item) for item in range(2)] == ["good", "beyond"]
    with pytest.raises(Unreadable, match=r"begins at 3 s, but it lasts 1 s"):
        source.read(1, np.random.default_rng(0))


def test_the_folder_check_tells_what_goes_where(mixed: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", str(mixed), "size=32", "buckets={sizes: [[32, 48], [48, 32]]}"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "0 problems" in told and "13 items in 2 of 2 shapes" in told and "1 × 48 × 32" in told
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", str(mixed), "size=32"])
    assert ended.value.code == 2 and "nothing that is checked depends on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("size=32", "nothing that is checked depends on"),
        ("szie=32", "did you mean data.size"),
        ("frames=none", "data.frames='none'"),
    ],
)
def test_the_folder_check_refuses_wrong_keys_before_it_decodes(
    mixed: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    monkeypatch.setattr(check, "check_folder", lambda *_: pytest.fail("decoded before the keys were read"))
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", str(mixed), setting])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert message in told.err and not told.out
