"""Shards that come through pipes: shard-level order and resume, and pipes that die."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.core.errors import InputError, RunFailed, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Stream
from kineograph.core.safe_media import MediaLimits
from kineograph.data import print_url, tar
from kineograph.data.loader import Loader
from kineograph.data.shards import Shard, find_shards
from kineograph.data.tar import stream_samples
from tests.data.tar_shards import item, npy, opened, three_shards, write


def pipes(root: Path, sizes: tuple[int, ...], **more: bytes) -> list[str]:
    three_shards(root, sizes, **more)
    return [f"pipe:cat {root}/{number:05}.tar" for number in range(len(sizes))]


def texts(loader: Loader, start: int, stop: int) -> list[list[str]]:
    return [[text for batch in step for text in batch.captions] for step in loader.steps(start, stop)]


def numbers_of(steps: list[list[str]]) -> list[int]:
    return [int(text.split()[1]) for step in steps for text in step]


def test_an_epoch_holds_every_sample_once_and_says_what_resume_means(tmp_path: Path) -> None:
    source = opened(pipes(tmp_path, (5, 1, 4)))
    assert (
        isinstance(source, Stream) and "resume restarts at the beginning of the oldest unfinished shard" in source.note
    )
    found = numbers_of(texts(Loader(source, 3, 5), 0, 4))
    assert sorted(found[:10]) == sorted(found[10:]) == list(range(10))
    assert found[:10] != found[10:]
    assert found == numbers_of(texts(Loader(source, 3, 5), 0, 4))
    assert found != numbers_of(texts(Loader(source, 4, 5), 0, 4))


def test_the_buffer_mixes_shards(tmp_path: Path) -> None:
    given = pipes(tmp_path, (8, 8, 8, 8))
    one = numbers_of(texts(Loader(opened(given, shuffle_buffer=1), 0, 8), 0, 4))
    assert all(len({number // 8 for number in one[at : at + 8]}) == 1 for at in range(0, 32, 8))
    mixed = numbers_of(texts(Loader(opened(given, shuffle_buffer=16), 0, 8), 0, 4))
    assert any(len({number // 8 for number in mixed[at : at + 8]}) > 1 for at in range(0, 32, 8))


def test_ranks_and_workers_have_disjoint_shards(tmp_path: Path) -> None:
    source = opened(pipes(tmp_path, (2,) * 8), shuffle_buffer=1)
    readers = [[record.name for _, record in islice(source.records(1, r, 4, 0, {}), 4)] for r in range(4)]
    assert len({name for names in readers for name in names}) == 16
    one = [set(numbers_of(texts(Loader(source, 1, 4, rank=rank, world=2, workers=2), 0, 4))) for rank in range(2)]
    assert one[0] | one[1] == set(range(16)) and not one[0] & one[1]


@pytest.mark.parametrize("world", [2, 5])
def test_fewer_and_unequal_shards_than_ranks_never_starve_one(tmp_path: Path, world: int) -> None:
    source = opened(pipes(tmp_path, (7, 1)))
    for rank in range(world):
        steps = texts(Loader(source, 1, world * 2, rank=rank, world=world), 0, 12)
        assert [len(step) for step in steps] == [2] * 12


def test_resume_goes_on_at_the_shard_level(tmp_path: Path) -> None:
    source = opened(pipes(tmp_path, (4,) * 6), shuffle_buffer=1)
    first = Loader(source, 1, 4)
    begin = texts(first, 0, 3)  # three shards, and into no fourth
    assert first.position == {"shards": 2}  # the third was not seen to end
    rest = texts(Loader(source, 1, 4), 0, 6)
    second = Loader(source, 1, 4)
    second.load_position(first.position)
    assert texts(second, 3, 6) == rest[2:5]
    assert begin == rest[:3]
    fresh = Loader(source, 1, 4, workers=2)
    fresh.load_position({"shards": 5})  # another number of readers: the last round is read again, none is left out
    assert set(numbers_of(texts(fresh, 5, 9))) >= set(numbers_of(rest[4:6]))


def test_the_position_waits_for_the_slowest_worker(tmp_path: Path) -> None:
    loader = Loader(opened(pipes(tmp_path, (2,) * 4), shuffle_buffer=1), 1, 2, workers=2)
    steps = loader.steps(0, 8)
    next(steps)
    assert loader.position == {"shards": 0}
    for _ in range(6):
        next(steps)
    assert 0 < loader.position["shards"] <= 6
    steps.close()  # type: ignore[attr-defined]


def test_resampling_draws_shards_again(tmp_path: Path) -> None:
    source = opened(pipes(tmp_path, (1,) * 6), resample=True, shuffle_buffer=1)
    assert len(set(numbers_of(texts(Loader(source, 1, 6), 0, 1)))) < 6


def test_splits_agree_with_files_and_lie_in_a_temporary_file(tmp_path: Path) -> None:
    given = pipes(tmp_path, (40, 3, 30))
    for split in ("validation", "test"):
        stream, files = (opened(where, split, validation=0.2, test=0.2) for where in (given, tmp_path))
        assert not isinstance(stream, Stream)
        assert [stream.identity(i) for i in range(len(stream))] == [files.identity(i) for i in range(len(files))]
        assert torch.equal(
            stream.read(1, np.random.default_rng(0)).pixels, files.read(1, np.random.default_rng(0)).pixels
        )
        assert stream.caption(0) == files.caption(0)
    train = opened(tmp_path, validation=0.2, test=0.2)
    seen = numbers_of(texts(Loader(opened(given, validation=0.2, test=0.2), 1, len(train)), 0, 1))
    assert sorted(f"gray {n}" for n in seen) == sorted(train.caption(i) for i in range(len(train)))
    assert len(opened(given, "validation", validation=0.2, kept=3)) == 3
    held_out = opened(given, "validation", validation=0.2)
    assert not [value for value in vars(held_out._records).values() if isinstance(value, bytes)]
    again = pickle.loads(pickle.dumps(held_out))  # as a worker gets it
    assert torch.equal(again.read(0, numpy_rng(0)).pixels, held_out.read(0, numpy_rng(0)).pixels)
    assert "validating on training data" in opened(given, "validation").note
    assert opened(given).caption(0).startswith("gray") and opened(given).list_missing_captions() == []


def test_a_pipe_that_dies_is_reported_with_command_and_code(tmp_path: Path) -> None:
    given = pipes(tmp_path, (6, 6))
    size = (tmp_path / "00000.tar").stat().st_size
    command = f"head -c {size // 3} {tmp_path}/00000.tar; echo disk on fire >&2; exit 7"
    source = opened([f"pipe:{command}", given[1]], max_unreadable=0.6)
    loader = Loader(source, 1, 4)
    seen = set(numbers_of(texts(loader, 0, 6)))
    assert set(range(6, 12)) <= seen and {0, 1} <= seen and 5 not in seen  # what came before is used
    reason = loader.skipped["00000.tar"]
    assert "exit code 7 of: head -c" in reason and "disk on fire" in reason and "samples before that are used" in reason


def test_a_pipe_that_fails_after_a_whole_tar_is_reported_too(tmp_path: Path) -> None:
    given = pipes(tmp_path, (2,))
    source = opened([f"{given[0]}; exit 3"], max_unreadable=1)
    assert "exit code 3" in source.skipped["00000.tar"]


def test_nothing_that_works(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no sample in the 1 shards .*exit code 127 of: no-such-program"):
        opened("pipe:no-such-program 0.tar")
    given = pipes(tmp_path, (3, 3))
    source = opened(given)
    (tmp_path / "00000.tar").unlink()
    (tmp_path / "00001.tar").write_bytes(b"")
    with pytest.raises(RunFailed, match=r"shards could not be read to their end"):
        texts(Loader(source, 1, 4), 0, 5)


def test_shards_at_a_dead_address_are_given_up_after_the_first_few(tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    shards = [f"pipe:echo {number:05}.tar >> {tried}; echo denied >&2; exit 7" for number in range(50)]
    with pytest.raises(InputError, match=r"cannot be read: exit code 7 of: .*\(denied\); check the address and your"):
        opened(shards)
    assert len(tried.read_text().split()) == 4


def test_a_url_is_printed_or_refused_in_one_line(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "0.tar").write_bytes(b"a tar")
    assert print_url.main(f"file://{tmp_path}/0.tar") == 0
    assert capfdbinary.readouterr().out == b"a tar"
    assert print_url.main(f"file://{tmp_path}/1.tar") == 1
    assert capfdbinary.readouterr().err.startswith(b"FileNotFoundError: ")
    assert print_url.main("memory://gone.tar") == 1


def test_a_silent_pipe_is_given_up_and_its_processes_end(tmp_path: Path) -> None:
    given = pipes(tmp_path, (3,))
    mark = tmp_path / "pid"
    source_keys = {"pipe_timeout": 2, "max_unreadable": 1}  # so long may a busy machine take to start the other pipe
    began = time.monotonic()
    source = opened([given[0], f"pipe:echo $$ > {mark}; sleep 60; cat x/00009.tar"], **source_keys)
    assert time.monotonic() - began < 30
    assert "no byte for 2 s" in source.skipped["00009.tar"]
    assert not os.path.exists(f"/proc/{mark.read_text().strip()}")
    assert len(texts(Loader(source, 1, 2), 0, 3)) == 3


@pytest.mark.timeout(20)
def test_output_without_end_is_damage(tmp_path: Path) -> None:
    given = pipes(tmp_path, (3,))
    source = opened([given[0], "pipe:cat /dev/zero x/00009.tar"], max_unreadable=1)
    assert "bytes behind its end" in source.skipped["00009.tar"]


@pytest.mark.timeout(20)
def test_a_url_that_drips_is_given_up() -> None:
    """A byte now and then would take days for a sample; a command of one's own may take its time."""
    for rate, given_up in ((1000, True), (0, False)):
        reader, writer = os.pipe()
        stop = threading.Event()

        def drip(writer: int = writer, stop: threading.Event = stop) -> None:
            while not stop.wait(0.02):
                os.write(writer, b"x")
            os.close(writer)

        thread = threading.Thread(target=drip)
        thread.start()
        with open(reader, "rb") as pipe:
            stream = tar._TimeoutReader(pipe, "curl", 0.3, rate)
            if given_up:
                with pytest.raises(TimeoutError, match=r"\d+ bytes in 0 s \(data.pipe_timeout\) from: curl"):
                    stream.read(10_000)
            else:
                assert stream.read(40) == b"x" * 40
            stop.set()
            thread.join()


def test_a_pipe_that_breaks_and_does_not_end_is_not_waited_for(tmp_path: Path) -> None:
    given = pipes(tmp_path, (3,))
    began = time.monotonic()
    broken = "pipe:head -c 20000 /dev/zero | tr '\\0' x; exec >&-; sleep 60; cat x/00009.tar"
    source = opened([given[0], broken], pipe_timeout=2, max_unreadable=1)
    assert time.monotonic() - began < 30
    assert "did not exit" in source.skipped["00009.tar"]


def test_compressed_tars_are_streamed(tmp_path: Path) -> None:
    path = write(tmp_path / "0.tar", [file for n in range(4) for file in item(n)])
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    source = opened(tmp_path)
    assert isinstance(source, Stream)
    assert sorted(numbers_of(texts(Loader(source, 1, 4), 0, 1))) == [0, 1, 2, 3]


def test_bad_samples_in_a_stream_are_counted(tmp_path: Path) -> None:
    files = [file for n in range(8) for file in item(n)] + item(8, caption=False)
    files[4] = (files[4][0], b"no picture")
    write(tmp_path / "0.tar", files)
    loader = Loader(opened(f"pipe:cat {tmp_path}/0.tar"), 1, 7)
    assert sorted(numbers_of(texts(loader, 0, 1))) == [0, 1, 3, 4, 5, 6, 7]
    assert set(loader.skipped) == {"0.tar:000000002", "0.tar:000000008"}


def test_embeddings_in_streams(tmp_path: Path) -> None:
    given = pipes(tmp_path, (3, 2), img_emb__npy=npy(1, 2, 3))
    folder = tmp_path / "text"
    folder.mkdir()
    for shard in range(2):
        np.save(folder / f"text_{shard:04}.npy", np.arange(1, 4)[:, None] + 10.0 * shard)
    source = opened(given, image_embed="img_emb.npy", text_embeddings_folder=str(folder))
    (batch,) = next(iter(Loader(source, 1, 5).steps(0, 1)))
    assert batch.extra["image_embed"].tolist() == [[1, 2, 3]] * 5
    assert sorted(batch.extra["text_embed"][:, 0].tolist()) == [1, 2, 3, 11, 12]


def test_a_file_named_like_a_pipe_is_read_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "pipe:touch ran;.tar"
    (tmp_path / name).write_bytes(b"")
    for text in ("*.tar", f"file://{name}"):
        (shard,) = find_shards(text)
        assert shard.command is None
        assert shard.url == f"./{name}"


def test_a_small_file_that_unpacks_to_hours_of_zeros_is_given_up(tmp_path):
    """A member of 64 GB, of which nothing is wanted: skipping it would unpack it all."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    header = tarfile.TarInfo("0.png")
    header.size = len(picture.getvalue())
    content = header.tobuf() + picture.getvalue().ljust(-(-header.size // 512) * 512, b"\0")
    bomb = tarfile.TarInfo("1.bin")
    bomb.size = 64 * 2**30
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(content + bomb.tobuf() + bytes(64 * 2**20)))
    shard = Shard(str(tmp_path / "0.tar.gz"), "0.tar.gz")
    found = []
    with pytest.raises(Unreadable, match=r"more than 0.01 s to unpack \(data.limits.seconds\)"):
        for key, _ in stream_samples(shard, 1.0, lambda suffix: suffix == "png", MediaLimits(seconds=0.01)):
            found.append(key)
    assert len(found) <= 1
