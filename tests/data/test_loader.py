import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kineograph.core.batch import Batch, Sample
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError, RunFailed, Unreadable
from kineograph.core.protocols import Source
from kineograph.data import loader as loader_module
from kineograph.data import reader
from kineograph.data.digit_captions import parse_caption
from kineograph.data.folder import Folder
from kineograph.data.loader import Loader
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.media.clips import write_clip
from tests.small_disk import on_small_disk
from tests.subprocesses import python_path


class Numbers(Source):
    """Item i is a 2 × 2 picture of i, with a random number from its rng as caption; some cannot be read."""

    def __init__(self, count=20, broken=(), pause=0.0):
        self.count, self.broken, self.pause = count, broken, pause
        self.reads = []

    def __len__(self):
        return self.count

    def read(self, index, rng):
        self.reads.append(index)
        if index in self.broken:
            raise Unreadable(self.identity(index), "broken")
        time.sleep(self.pause)
        return Sample(
            pixels=torch.full((1, 1, 2, 2), index % 256, dtype=torch.uint8), caption=f"{index} {rng.integers(10**9)}"
        )

    def caption(self, index):
        return str(index)

    def identity(self, index):
        return f"item-{index}"


class Stuck(Numbers):
    is_user_dataset = True

    def read(self, index, rng):
        time.sleep(3600)


def content(batches):
    """Slot → caption of one step; the caption tells item and randomness."""
    return {int(slot): text for batch in batches for slot, text in zip(batch.slots, batch.captions, strict=True)}


def run(source, start=0, stop=5, **options):
    options = {"seed": 1, "batch_size": 8} | options
    return [content(step) for step in Loader(source, **options).steps(start, stop)]


def test_an_epoch_holds_every_item_once():
    whole = [text.split()[0] for step in run(Numbers(20), stop=5) for text in step.values()]
    assert sorted(whole[:20], key=int) == [str(index) for index in range(20)]
    assert whole[:20] != whole[20:]


def test_randomness_differs_by_step_and_slot():
    texts = [text.split()[1] for step in run(Numbers(4), stop=5) for text in step.values()]
    assert len(set(texts)) == len(texts)


def test_resume_equals_the_tail_and_reads_nothing_else():
    source = Numbers(20)
    assert run(source, 3, 5) == run(Numbers(20), 0, 5)[3:]
    assert len(source.reads) == 16


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_accumulation_cuts_the_same_batch(accumulate):
    steps = list(Loader(Numbers(), 1, 8, accumulate).steps(0, 3))
    assert all(len(step) == accumulate and all(len(batch) == 8 // accumulate for batch in step) for step in steps)
    assert [content(step) for step in steps] == run(Numbers(), 0, 3)


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (4, 1), (2, 2), (2, 4)])
def test_processes_share_the_same_batch(world, accumulate):
    ranks = [list(Loader(Numbers(), 1, 8, accumulate, rank=rank, world=world).steps(0, 3)) for rank in range(world)]
    for step, expected in enumerate(run(Numbers(), 0, 3)):
        assert content([batch for rank in ranks for batch in rank[step]]) == expected
        for part in range(accumulate):  # a micro-batch is the same set of slots for any world
            slots = torch.cat([rank[step][part].slots for rank in ranks])
            assert sorted(slots.tolist()) == list(range(part * 8 // accumulate, (part + 1) * 8 // accumulate))


def test_batch_must_divide():
    with pytest.raises(ConfigError, match=r"train.batch_size=10 .* use 12"):
        Loader(Numbers(), 1, 10, accumulate=2, world=2)


def test_unreadable_items_are_replaced_alike_everywhere():
    source = Numbers(20, broken=(3, 4, 11))
    loader = Loader(source, 1, 8)
    steps = [content(step) for step in loader.steps(0, 5)]
    assert loader.skipped == {f"item-{index}": "broken" for index in (3, 4, 11)}
    assert run(Numbers(20, broken=(3, 4, 11)), 2, 4) == steps[2:4]
    halves = [run(Numbers(20, broken=(3, 4, 11)), rank=rank, world=2) for rank in (0, 1)]
    assert [a | b for a, b in zip(*halves, strict=True)] == steps
    whole = run(Numbers(20))
    same = [steps[i][slot] == whole[i][slot] for i in range(5) for slot in range(8)]
    assert same.count(False) == 6  # two epochs of three: the others did not move


def test_nothing_readable():
    with pytest.raises(RunFailed, match=r"in a row"):
        run(Numbers(3, broken=(0, 1, 2)))


def test_limit_on_unreadable_items_as_they_are_met():
    source = Numbers(1000, broken=range(300))
    with pytest.raises(RunFailed, match=r"data.max_unreadable=0.2"):
        run(source, 0, 100, batch_size=10, max_unreadable=0.2)
    assert len(source.reads) < 300  # long before the end
    assert len(run(Numbers(1000, broken=range(100)), 0, 100, batch_size=10, max_unreadable=0.2)) == 100


def test_items_that_were_read_before_count_among_those_met():
    """A cache that takes over its readable items asks for the broken ones alone."""
    source = Numbers(1000, broken=range(150))
    loader = Loader(source, seed=0, batch_size=10, max_unreadable=0.2)
    with pytest.raises(RunFailed, match=r"data.max_unreadable=0.2"):
        list(loader.ordered_batches(range(150), 10))
    loader = Loader(source, seed=0, batch_size=10, max_unreadable=0.2)
    loader.count_as_read(850)
    assert len(list(loader.ordered_batches(range(150), 10))) == 15
    assert loader.replaced == set(range(150))


def test_what_is_drawn_for_an_item_in_order_belongs_to_its_name():
    class Moved(Numbers):
        def identity(self, index):
            return f"item-{index - 3}"

    def drawn(source, places):
        (batch,) = Loader(source, seed=0, batch_size=4).ordered_batches(places, 4)
        return [caption.split()[1] for caption in batch.captions]

    first = drawn(Numbers(), range(4))
    assert drawn(Moved(), range(3, 7)) == first
    assert len(set(first)) == 4


def test_items_that_do_not_fit_together():
    class Mixed(Numbers):
        def read(self, index, rng):
            return Sample(tokens=torch.zeros(1, 2, 2 + index % 2, dtype=torch.int64))

    with pytest.raises(InputError, match="different shapes"):
        run(Mixed())


def test_empty_source():
    with pytest.raises(InputError, match="no items"):
        Loader(Numbers(0), 1, 8)


# Validation ---------------------------------------------------------------------------------------------------------


def test_fixed_is_the_same_every_time_and_for_any_world():
    first = Loader(Numbers(50), 1, 8)
    expected = content(first.fixed_batches(13, 4))
    assert len(expected) == 13
    assert expected == content(first.fixed_batches(13, 4)) == content(Loader(Numbers(50), 1, 8).fixed_batches(13, 4))
    for world in (2, 4):
        parts = [list(Loader(Numbers(50), 1, 8, rank=rank, world=world).fixed_batches(13, 4)) for rank in range(world)]
        assert len({len(part) for part in parts}) == 1
        assert content([batch for part in parts for batch in part if not batch.spare]) == expected
        whole = [sorted(batch.slots.tolist()) for batch in first.fixed_batches(13, 4)]
        assert [
            sorted(slot for batch in ranks if not batch.spare for slot in batch.slots.tolist())
            for ranks in zip(*parts, strict=True)
        ] == whole


def test_what_several_ranks_have_is_counted_by_one():
    parts = [list(Loader(Numbers(50), 1, 8, rank=rank, world=4).fixed_batches(3, 4)) for rank in range(4)]
    assert [[batch.spare for batch in part] for part in parts] == [[False], [False], [False], [True]]
    again = [list(Loader(Numbers(50), 1, 8, rank=rank, world=4).fixed_batches(9, 4)) for rank in range(4)]
    assert [[batch.spare for batch in part] for part in again] == [[False] * 3] + [[False, False, True]] * 3


def test_fixed_reads_once():
    source = Numbers(50)
    loader = Loader(source, 1, 8)
    assert content(loader.fixed_batches(10, 4)) == content(loader.fixed_batches(10, 4))
    assert len(source.reads) == 10


def test_fixed_takes_all_there_are():
    assert sorted(
        int(text.split()[0]) for text in content(Loader(Numbers(7), 1, 8).fixed_batches(100, 4)).values()
    ) == list(range(7))


# Workers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(pictures):
    (pictures / "broken.png").write_bytes(b"nothing")
    return Folder.open(Folder.Config(folder=str(pictures), size=8, validation=0, crop="random", flip=0.5), "train", 0)


def pixels(step):
    return torch.cat([batch.pixels for batch in step])


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_batches(folder, workers):
    alone, helped = Loader(folder, 1, 6, 2), Loader(folder, 1, 6, 2, workers=workers)
    for one, other in zip(alone.steps(2, 7), helped.steps(2, 7), strict=True):
        assert torch.equal(pixels(one), pixels(other))
        assert content(one) == content(other)
        assert [batch.slots.tolist() for batch in one] == [batch.slots.tolist() for batch in other]
    assert (
        helped.skipped
        == alone.skipped
        == {"broken.png": "not a PNG, JPEG, WebP, AVIF, JPEG 2000, BMP, TIFF or GIF image"}
    )


def test_workers_end_when_iteration_stops_early(folder):
    steps = Loader(folder, 1, 6, workers=2).steps(0, 1000)
    next(steps)
    before = children()
    assert len(before) >= 2
    steps.close()
    gc.collect()
    deadline = time.monotonic() + 60
    while children() & before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children() & before


def children():
    """The workers: children of this process's fork server."""
    parents = {int(entry): parent(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    servers = {pid for pid, above in parents.items() if above == os.getpid() and b"forkserver" in command_line(pid)}
    return {pid for pid, above in parents.items() if above in servers}


def command_line(pid):
    """Empty for what has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent(pid):
    """Its parent; 0 for what has ended."""
    try:
        state, above = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(above)


def test_killed_worker_is_an_error_and_not_a_hang(folder):
    before = set(children())  # an earlier test's worker may take a moment to end
    steps = Loader(folder, 1, 6, workers=1, prefetch=2).steps(0, 1000)
    next(steps)
    (worker,) = set(children()) - before
    os.kill(worker, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        RunFailed, match=r"a data worker died .*ended by SIGKILL, as the kernel does when memory runs out"
    ):
        for _ in range(100):
            next(steps)
    assert time.monotonic() - began < 60  # and not the timeout of the loader


def test_workers_leave_stopping_to_the_main_process(folder):
    before = set(children())
    steps = Loader(folder, 1, 6, workers=1).steps(0, 40)
    next(steps)
    (worker,) = set(children()) - before
    os.kill(worker, signal.SIGTERM)
    os.kill(worker, signal.SIGINT)
    assert len(list(steps)) == 39


def test_timeout_says_which_key(folder):
    loader = Loader(Stuck(), 1, 8, workers=1, timeout=1.0)
    with pytest.raises(RunFailed, match=r"train.timeout"):
        next(loader.steps(0, 5))


def test_errors_in_workers_arrive_as_they_are(tmp_path):
    class Wrong(Numbers):
        is_user_dataset = True

        def read(self, index, rng):
            raise InputError("plain words")

    with pytest.raises(InputError, match=r"^plain words$"):
        next(Loader(Wrong(), 1, 8, workers=1).steps(0, 5))


@pytest.mark.slow
def test_script_without_main_guard(pictures, tmp_path):
    """Worker processes must not run the user's script again."""
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent(f"""
        from kineograph.data.folder import Folder
        from kineograph.data.loader import Loader
        print("hello")
        source = Folder.open(Folder.Config(folder={str(pictures)!r}, size=8), "train", 0)
        print(sum(len(batch) for step in Loader(source, 1, 4, workers=2).steps(0, 3) for batch in step))
        """)
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": python_path()},
    )
    assert done.stdout.split() == ["hello", "12"], done.stderr


@pytest.mark.parametrize("pin", [False, True])
def test_pinning_on_request(monkeypatch, pin):
    monkeypatch.setattr(Batch, "pin_memory", lambda self: replace(self, fps=torch.tensor(-1.0)))
    ((batch,),) = Loader(Numbers(), 1, 8, pin=pin).steps(0, 1)
    assert (batch.fps is not None) == pin


@pytest.mark.gpu
def test_pinned_in_workers(folder):
    ((batch,),) = Loader(folder, 1, 6, workers=1, pin=True).steps(0, 1)
    assert batch.pixels.is_pinned()
    assert batch.to(torch.device("cuda")).pixels.is_cuda


def test_batches_are_contiguous_bytes(folder):
    (batch,) = next(Loader(folder, 1, 6).steps(0, 1))
    assert batch.pixels.dtype == torch.uint8
    assert batch.pixels.shape == (6, 1, 3, 8, 8)
    assert batch.pixels.is_contiguous()
    assert batch.frame_mask is None
    assert np.isfinite(batch.fps.numpy()).all()


# Pictures beside clips ---------------------------------------------------------------------------------------------


class Lengths(Numbers):
    """Item i has as many frames as `lengths[i]`; batches are meant to have `frames`."""

    def __init__(self, lengths, frames):
        super().__init__(len(lengths))
        self.lengths, self.pad_to_frames = lengths, frames

    def read(self, index, rng):
        clip = torch.arange(1, self.lengths[index] + 1, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
        return Sample(pixels=clip, caption=str(index))


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 3, 1], [1, 4, 2]])
def test_batches_of_stills_are_as_long_as_any_other(lengths):
    (batch,) = Loader(Lengths(lengths, 4), seed=0, batch_size=3).ordered_batches(range(3), 3)
    assert batch.pixels.shape == (3, 4, 1, 2, 2)
    for length, clip, mask in zip(lengths, batch.pixels, batch.frame_mask, strict=True):
        assert mask.tolist() == [time < length for time in range(4)]
        assert clip[:, 0, 0, 0].tolist() == [min(time, length - 1) + 1 for time in range(4)]  # the last one repeated


def test_nothing_is_masked_where_all_are_full():
    (batch,) = Loader(Lengths([4, 4], 4), seed=0, batch_size=2).ordered_batches(range(2), 2)
    assert batch.frame_mask is None
    (pictures,) = Loader(Numbers(2), seed=0, batch_size=2).ordered_batches(range(2), 2)
    assert pictures.frame_mask is None and pictures.pixels.shape[1] == 1


def test_moving_digits_and_their_stills_share_a_batch():
    source = MovingDigits.open(MovingDigitsConfig(frames=5, stills=0.5, size=(16, 16)), "train")
    ((batch,),) = Loader(source, seed=0, batch_size=16).steps(0, 1)
    assert batch.pixels.shape == (16, 5, 3, 16, 16)
    assert set(batch.frame_mask.sum(1).tolist()) == {1, 5}
    for real, caption in zip(batch.frame_mask.sum(1).tolist(), batch.captions, strict=True):
        assert (parse_caption(caption)[0].place is not None) == (real == 1)


def test_a_folder_of_pictures_and_clips_gives_mixed_batches(tmp_path):
    root = tmp_path / "mixed"
    root.mkdir()
    rng = np.random.default_rng(0)
    for index in range(6):
        frames = torch.from_numpy(rng.integers(0, 256, (4 if index % 2 else 1, 3, 8, 8), dtype=np.uint8))
        write_clip(root / f"{index}.{'gif' if index % 2 else 'png'}", frames, 10)
        (root / f"{index}.txt").write_text(f"{'clip' if index % 2 else 'picture'} {index}")
    config = parse(Folder.Config, {"folder": str(root), "size": 8, "frames": 4, "validation": 0}, "data")
    source = Folder.open(config, "train", 0)
    (batch,) = Loader(source, seed=0, batch_size=6).ordered_batches(range(6), 6)
    assert batch.pixels.shape == (6, 4, 3, 8, 8)
    assert [caption.split()[0] for caption in batch.captions] == ["picture", "clip"] * 3
    assert batch.frame_mask.sum(1).tolist() == [1, 4] * 3
    assert (batch.pixels[0] == batch.pixels[0, :1]).all()  # padding repeats the picture
    assert not (batch.pixels[1] == batch.pixels[1, :1]).all()
    only = [index for index in range(6) if index % 2]
    assert Batch.collate([source.read(index, rng) for index in only], only).frame_mask is None


# Small shared memory --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("room", ["none at the start", "gone while it is shared"])
def test_batches_go_through_the_pipe_where_shared_memory_has_no_room(monkeypatch, room):
    """Docker gives 64 MB: torch would lose the batch in a thread, and training would wait for it for ten minutes."""

    class Forked(Numbers):
        is_user_dataset = True  # its workers are forked, with what is patched here

    expected = content(batch for step in Loader(Forked(), 1, 8).steps(0, 4) for batch in step)
    if room == "none at the start":
        monkeypatch.setattr(reader, "free_shared_memory", lambda: 0)

    def refuse(tensor):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    loader = Loader(Forked(), 1, 8, workers=2, timeout=20)
    assert content(batch for step in loader.steps(0, 4) for batch in step) == expected


def test_little_shared_memory_is_said_at_the_start(monkeypatch):
    monkeypatch.setattr(loader_module, "free_shared_memory", lambda: 64 * 2**20)
    assert "/dev/shm has 64 MiB free" in loader_module.warn_of_shared_memory(2)
    assert loader_module.warn_of_shared_memory(0) is None
    monkeypatch.setattr(loader_module, "free_shared_memory", lambda: 2**33)
    assert loader_module.warn_of_shared_memory(2) is None


_IN_24_MB = """
import time
from kineograph.data.loader import Loader
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
source = MovingDigits.open(MovingDigitsConfig(size=128, frames=8), "train", 0)
loader = Loader(source, 1, 16, workers=2, timeout=15)
rows = 0
for step in loader.steps(0, 9):
    rows += len(step[0])
    time.sleep(0 if rows > 16 else 3)  # meanwhile the workers fill the shared memory with 8 batches of 6 MB
print("all read" if rows == 9 * 16 else rows)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_24_mb_of_real_shared_memory(tmp_path):
    result = on_small_disk("/dev/shm", "24m", _IN_24_MB)
    assert result.stdout.endswith("all read\n"), result.stderr


def test_workers_do_not_outlive_an_error_that_holds_their_loader(tmp_path):
    """`kineo train … 2>&1 | head`: the error of the closed pipe holds the loader's frame, and workers ignore SIGTERM."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from kineograph.data.loader import Loader\n"
        "from kineograph.data.open_source import open_source, parse_data_config\n"
        "config = parse_data_config({'source': 'moving_digits', 'size': 16, 'count': 64})\n"
        "batches = Loader(open_source(config, 'train', 0), seed=0, batch_size=4, workers=1).steps(0, 100)\n"
        "next(batches)\n"
        "sys.keep = batches\n"
        "sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, str(script)], timeout=60).returncode == 7
