"""Tar shards with an index: the same samples as webdataset reads, whatever is wrong with some of them."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.data.loader import Loader
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.data.shards import Shard, expand_braces, find_shards
from kineograph.data.startup_scan import scan
from kineograph.data.tar import TarIndex, load_or_build_index, split_name
from kineograph.data.webdataset import WebDataset
from tests.data.tar_shards import item, opened, picture, read, three_shards, write


def contents(source: WebDataset) -> dict[str, tuple[float, str | None]]:
    found = {}
    for index in range(len(source)):
        sample = read(source, index)
        found[source.identity(index)] = (float(sample.pixels.float().mean()), sample.caption)
    return found


# Reading ---------------------------------------------------------------------------------------------------------


def test_the_webdataset_package_reads_the_same(tmp_path: Path) -> None:
    three_shards(tmp_path)
    ours = contents(opened(tmp_path))
    theirs = {}
    urls = sorted(str(path) for path in tmp_path.glob("*.tar"))
    for sample in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode("pil"):
        name = f"{Path(sample['__url__']).name}:{sample['__key__']}"
        theirs[name] = (float(np.asarray(sample["png"]).mean()), sample["txt"])
    assert ours == theirs
    assert len(ours) == 10


def test_what_webdataset_writes_is_read(tmp_path: Path) -> None:
    with webdataset.ShardWriter(str(tmp_path / "%05d.tar"), maxcount=3, verbose=0) as writer:
        for number in range(7):
            embedding = np.full(4, number + 1, np.float16)
            pixels = np.full((8, 12, 3), number, np.uint8)
            writer.write(
                {
                    "__key__": f"sub/{number:09}",
                    "png": pixels,
                    "json": {"caption": f" gray\n{number}"},
                    "img_emb.npy": embedding,
                }
            )
    source = opened(str(tmp_path / "{00000..00002}.tar"), image_embed="img_emb.npy")
    assert len(source) == 7
    for index in range(7):
        sample = read(source, index)
        assert sample.caption == source.caption(index) == f"gray {index}"
        assert (sample.pixels == index).all()
        assert sample.extra["image_embed"].tolist() == [index + 1.0] * 4
        assert sample.extra["image_embed"].dtype == torch.float32
    assert source.fields == {"pixels", "image_embed"}


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_of_every_kind(tmp_path: Path, form: int) -> None:
    long = "d" * 90 + "/" + "k" * (60 if form == tarfile.USTAR_FORMAT else 160)
    files = [
        (f"{long}.txt", b"x" * 700),
        ("bä/ü.cls.json", b"{}"),
        ("empty.txt", b""),
        ("plain", b"1"),
        (".hid.txt", b"2"),
    ]
    path = write(tmp_path / "a.tar", files, form)
    with tarfile.open(path) as tar:
        expected = {member.name: (member.offset_data, member.size) for member in tar}
    index = TarIndex.build(str(path))
    found = {
        f"{index.keys[row]}.{index.suffixes[kind]}": (offset, size)
        for row, kind, offset, size in index.members.T.tolist()
    }
    assert found == {name: place for name, place in expected.items() if name not in ("plain", ".hid.txt")}
    assert index.problem == ""


def test_names() -> None:
    assert split_name("a.b/c.Img_Emb.NPY") == ("a.b/c", "img_emb.npy")
    assert split_name("a/.hidden") is None
    assert split_name("__index__") is None
    assert split_name("noending") is None


def test_clips_and_pictures_side_by_side(tmp_path: Path, make_video, counting, numbers) -> None:
    film = make_video(tmp_path / "film.mp4", counting(12)).read_bytes()
    frames = [Image.new("L", (48, 32), 20 * number) for number in range(4)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=100)
    files = [("a.mp4", film), ("b.gif", buffer.getvalue()), ("c.webp", picture(9, "WEBP"))]
    source = opened(write(tmp_path / "t/0.tar", files), frames=6, size=16)
    samples = {source.identity(index): read(source, index) for index in range(3)}
    shown = numbers(samples["0.tar:a"].pixels)
    assert np.diff(shown).tolist() == [1] * 5
    assert samples["0.tar:b"].frame_mask.tolist() == [True] * 4 + [False] * 2
    assert samples["0.tar:b"].fps == 10
    assert samples["0.tar:c"].frame_mask.sum() == 1


def test_the_first_ending_wins_and_captions_stand_in_json_keys(tmp_path: Path) -> None:
    files = [
        ("k.jpg", picture(200, "JPEG")),
        ("k.png", picture(3)),
        ("k.json", json.dumps({"alt": "x", "text": "y"}).encode()),
    ]
    path = write(tmp_path / "0.tar", files)
    assert (read(opened(path, media=["png", "jpg"]), 0).pixels == 3).all()
    assert (read(opened(path, media=[".JPG"]), 0).pixels > 150).all()
    assert opened(path).caption(0) == "y"
    assert opened(path, caption_key="alt").caption(0) == "x"
    assert opened(path, captions=["txt"]).list_missing_captions() == ["0.tar:k"]


# Where shards are -------------------------------------------------------------------------------------------------


def test_ranges_lists_folders_and_numbers(tmp_path: Path) -> None:
    assert expand_braces("a{08..11}/{x,y}.tar") == [f"a{n}/{c}.tar" for n in ("08", "09", "10", "11") for c in "xy"]
    assert expand_braces("{0..4..2}") == ["0", "2", "4"]
    three_shards(tmp_path)
    folder = [shard.name for shard in find_shards(str(tmp_path))]
    assert folder == ["00000.tar", "00001.tar", "00002.tar"]
    assert [s.name for s in find_shards(f"{tmp_path}/{{}}.tar", 1, 2, 5)] == folder[1:]
    assert [s.name for s in find_shards([f"{tmp_path}/00001.tar", f"{tmp_path}/0000[02].tar"])] == [
        folder[1],
        folder[0],
        folder[2],
    ]
    with pytest.raises(ConfigError, match=r"set data.end_shard"):
        opened(f"{tmp_path}/{{}}.tar")
    with pytest.raises(ConfigError, match=r"has no \{\} for the number"):
        opened(tmp_path, end_shard=3)
    with pytest.raises(ConfigError, match=r"below data.start_shard=4"):
        opened(f"{tmp_path}/{{}}.tar", start_shard=4, end_shard=3)
    with pytest.raises(InputError, match="no tar files"):
        (tmp_path / "empty").mkdir()
        opened(tmp_path / "empty")
    with pytest.raises(InputError, match="twice"):
        opened([str(tmp_path / "00000.tar")] * 2)


def test_a_pipe_has_the_name_of_the_file_it_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.data.shards._is_installed", lambda tool: True)
    names = ["pipe:aws s3 cp s3://b/x/00007.tar - | cat", "https://h/x/00008.tar?sig=1", "s3://b/00009.tar"]
    shards = find_shards(names)
    assert [shard.name for shard in shards] == ["00007.tar", "00008.tar", "00009.tar"]
    assert [shard.number for shard in shards] == [7, 8, 9]
    assert shards[0].command == ["sh", "-c", "aws s3 cp s3://b/x/00007.tar - | cat"]
    assert shards[2].command[:4] == ["aws", "s3", "cp", "s3://b/00009.tar"]  # type: ignore[index]
    assert shards[1].command[0] == "curl"  # type: ignore[index]
    assert Shard("gs://b/1.tar", "1.tar").command == ["gsutil", "-q", "cat", "gs://b/1.tar"]
    for scheme in ("nowhere", "sftp", "reference"):  # fsspec knows the last two
        with pytest.raises(ConfigError, match=f"{scheme}:// is not opened: use s3://"):
            find_shards(f"{scheme}://h/1.tar")


def test_shards_at_urls_need_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.data.shards._is_installed", lambda tool: False)
    for url in ("s3://b/00009.tar", "hf://datasets/me/set/00009.tar"):
        command = find_shards(url)[0].command
        assert command is not None and command[-2:] == ["kineograph.data.print_url", url]


def test_links_that_lead_in_circles(tmp_path: Path) -> None:
    """Two of them double the paths at every level."""
    write(tmp_path / "a" / "b" / "0.tar", item(0))
    for number in range(3):
        (tmp_path / "a" / "b" / f"up{number}").symlink_to(tmp_path, target_is_directory=True)
    assert [shard.name for shard in find_shards(str(tmp_path))] == ["0.tar"]


def test_shards_of_one_name_in_several_folders(tmp_path: Path) -> None:
    for folder in "ab":
        write(tmp_path / folder / "0.tar", item(ord(folder)))
    source = opened(tmp_path)
    assert sorted(source.identity(index) for index in range(2)) == ["a/0.tar:000000097", "b/0.tar:000000098"]


# Splits, order ------------------------------------------------------------------------------------------------------


def test_splits_are_disjoint_whole_and_by_the_key(tmp_path: Path) -> None:
    three_shards(tmp_path, (40, 2, 30))
    parts = {split: opened(tmp_path, split, validation=0.2, test=0.2) for split in ("train", "validation", "test")}
    names = {split: {part.identity(index) for index in range(len(part))} for split, part in parts.items()}
    assert sum(map(len, names.values())) == 72 == len(set().union(*names.values()))
    assert all(len(found) > 3 for found in names.values())
    alone = opened(tmp_path / "00000.tar", "validation", validation=0.2, test=0.2)  # others gone: nobody changes sides
    assert {alone.identity(i) for i in range(len(alone))} == {n for n in names["validation"] if n.startswith("00000")}


@pytest.mark.parametrize("workers", [0, 2])
def test_exact_epochs_over_unequal_shards_and_ranks(tmp_path: Path, workers: int) -> None:
    source = opened(three_shards(tmp_path, (9, 1, 2)))
    ranks = [list(Loader(source, 1, 4, rank=rank, world=2, workers=workers).steps(0, 6)) for rank in range(2)]
    steps = [[text for rank in ranks for batch in rank[step] for text in batch.captions] for step in range(6)]
    for epoch in (0, 3):
        assert sorted(text for step in steps[epoch : epoch + 3] for text in step) == sorted(
            f"gray {n}" for n in range(12)
        )
    resumed = [b.captions for step in Loader(source, 1, 4).steps(4, 6) for b in step]
    assert [sorted(texts) for texts in resumed] == [sorted(texts) for texts in steps[4:]]


def test_resampling_draws_with_replacement(tmp_path: Path) -> None:
    three_shards(tmp_path)
    texts = [
        t for step in Loader(opened(tmp_path, resample=True), 1, 10).steps(0, 20) for b in step for t in b.captions
    ]
    counts = np.array([texts.count(f"gray {n}") for n in range(10)])
    assert len(set(texts[:10])) < 10  # an epoch would hold each once
    assert (counts > 5).all() and counts.sum() == 200
    assert not opened(tmp_path, "validation", resample=True).resample


def test_a_source_travels_to_workers(tmp_path: Path) -> None:
    source = opened(three_shards(tmp_path))
    read(source, 0)
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(read(again, 3).pixels, read(source, 3).pixels)


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("kineograph.data.webdataset._OPEN_FILES", 2)
    source = opened(three_shards(tmp_path, (1,) * 6))
    before = len(os.listdir("/proc/self/fd"))
    assert [read(source, index).caption for index in (0, 1, 2, 3, 4, 5, 0)] == [
        f"gray {n}" for n in (0, 1, 2, 3, 4, 5, 0)
    ]
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# What is wrong ------------------------------------------------------------------------------------------------------


def test_a_truncated_tar_gives_what_is_whole(tmp_path: Path) -> None:
    three_shards(tmp_path)
    path = tmp_path / "00000.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        text = tar.getmember("000000003.txt")
    path.write_bytes(whole[: text.offset_data + 2])  # its picture is there, its caption is not
    source = opened(tmp_path)
    assert len(source) == 3 + 1 + 4
    assert "ends inside a member after 7 whole files" in source.skipped["00000.tar"]
    assert "1 × the shard ends inside" in str(source.note)
    path.write_bytes(whole[: text.offset - 100])  # inside the padding
    assert len(opened(tmp_path)) == 9 - 1
    path.write_bytes(b"no tar at all" * 100)
    source = opened(tmp_path, max_unreadable=0.5)
    assert "no tar header" in source.skipped["00000.tar"]
    assert len(source) == 5


def test_a_compressed_shard_under_another_name_is_named(tmp_path: Path) -> None:
    """As in DALLE2-pytorch's own test data, whose .tar files are gzip files."""
    shard = write(tmp_path / "0.tar", item(7))
    shard.write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(
        InputError, match=r"holds no samples: a shard is compressed: unpack it, or let its name end in \.tar\.gz"
    ):
        opened(shards=str(shard))


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    three_shards(tmp_path)
    with pytest.raises(InputError, match=r"2 of the 5 shards .*00003.tar: .*No such file"):
        opened(f"{tmp_path}/{{00000..00004}}.tar")
    source = opened(f"{tmp_path}/{{00000..00004}}.tar", max_unreadable=0.5)
    assert set(source.skipped) == {"00003.tar", "00004.tar"} and len(source) == 10


def test_bad_pictures_and_captions_are_replaced_and_listed(tmp_path: Path) -> None:
    files = [file for number in range(20) for file in item(number)]
    files[0] = (files[0][0], b"no picture")
    files[3] = (files[3][0], b" \n")
    files[5] = (files[5][0], b"\xff\xfe\xfa")
    source = opened(write(tmp_path / "0.tar", files))
    reasons = {path.rpartition(":")[2]: reason for path, reason in scan(source, 0.5)}
    assert reasons == {
        "000000000": "not a PNG, JPEG, WebP, AVIF, JPEG 2000, BMP, TIFF or GIF image",
        "000000001": "an empty caption",
        "000000002": "its .txt is not UTF-8 text",
    }
    loader = Loader(source, 1, 20)
    (batch,), *_ = list(loader.steps(0, 1))
    assert set(loader.skipped) == {f"0.tar:00000000{n}" for n in range(3)}
    assert len(batch.captions) == 20


def test_samples_that_lack_something(tmp_path: Path) -> None:
    files = (
        [file for number in range(8) for file in item(number)] + item(8, caption=False) + [("000000009.txt", b"lonely")]
    )
    path = write(tmp_path / "0.tar", files)
    source = opened(path)
    assert len(source) == 8
    assert source.skipped["0.tar:000000008"].startswith("no caption")
    assert source.skipped["0.tar:000000009"].startswith("no image or clip")
    assert "2 of 10 samples are left out" in str(source.note)
    kept = opened(path, uncaptioned="keep")
    assert len(kept) == 9 and kept.list_missing_captions() == ["0.tar:000000008"]
    assert read(kept, 8).caption == ""
    with pytest.raises(InputError, match=r"2 of 10 samples .*max_unreadable=0.1.*png, txt"):
        opened(path, max_unreadable=0.1)
    bare = write(tmp_path / "1.tar", [*item(0), *item(1, caption=False)])
    with pytest.raises(InputError, match=r"1 of 2 samples .*a higher data.max_unreadable leaves them out"):
        opened(bare)
    with pytest.raises(InputError, match=r"10 of 10 samples.*no image or clip \(jpg"):
        opened(path, media=["jpg"], max_unreadable=1)


@pytest.mark.parametrize("blank", [[("000000003.png", picture(3)), ("000000003.txt", b" \n")], item(3, caption=False)])
def test_a_kept_sample_without_caption_leaves_the_others_theirs(tmp_path: Path, blank: list[tuple[str, bytes]]) -> None:
    path = write(tmp_path / "0.tar", [file for number in range(3) for file in item(number)] + blank)
    source = opened(path, uncaptioned="keep")
    batch = next(iter(Loader(source, seed=0, batch_size=4).fixed_batches(4, 4)))
    assert sorted(batch.captions) == ["", "gray 0", "gray 1", "gray 2"]
    none = opened(write(tmp_path / "none.tar", item(0, caption=False)), uncaptioned="keep")
    assert none.list_missing_captions() and read(none, 0).caption is None


def test_a_folder_of_shards_is_named_to_who_asks_for_a_folder(tmp_path: Path) -> None:
    three_shards(tmp_path)
    with pytest.raises(InputError, match=r"data.source=webdataset"):
        open_source(parse_data_config({"source": "folder", "folder": str(tmp_path)}), "train", 0)


# The index ----------------------------------------------------------------------------------------------------------


def test_states_tell_which_shards_changed(tmp_path: Path) -> None:
    three_shards(tmp_path)
    before = opened(tmp_path).item_states()
    assert len(set(before)) == 10
    write(tmp_path / "00001.tar", item(77, 1) + item(78, 1))
    write(tmp_path / "00003.tar", item(79, 3) + item(80, 3) + item(79, 3))  # one key twice
    after = opened(tmp_path).item_states()
    assert len(set(after)) == len(after) == 5 + 2 + 4 + 3
    assert len(set(after) & set(before)) == 5 + 4
    assert set(opened([str(tmp_path / "00000.tar")]).item_states()) < set(before)


def test_the_index_is_built_once_and_anew_when_the_file_changes(tmp_path: Path, monkeypatch) -> None:
    three_shards(tmp_path)
    built = []
    build = TarIndex.build
    monkeypatch.setattr(TarIndex, "build", staticmethod(lambda path: built.append(path) or build(path)))
    first = opened(tmp_path)
    assert len(built) == 3
    again = opened(tmp_path)
    assert len(built) == 3
    assert contents(again) == contents(first)
    assert again.fingerprint() == first.fingerprint()
    write(tmp_path / "00001.tar", item(77, 1) + item(78, 1))
    assert opened(tmp_path).fingerprint() != first.fingerprint()
    assert [Path(path).name for path in built[3:]] == ["00001.tar"]
    next((tmp_path / ".kineo-index").glob("00000*")).write_bytes(b"torn")
    assert len(opened(tmp_path)) == 11


def test_read_only_data_is_indexed_elsewhere(tmp_path: Path, monkeypatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    path = three_shards(tmp_path / "data") / "00000.tar"
    (tmp_path / "data" / ".kineo-index").write_bytes(b"in the way")  # as unwritable as a read-only folder, for root too
    assert load_or_build_index(str(path)).keys == [f"00000{row:04}" for row in range(5)]
    assert len(list((home / "kineograph" / "index").glob("*.npz"))) == 1
    monkeypatch.setattr(TarIndex, "build", None)  # from the cache now
    assert len(load_or_build_index(str(path)).keys) == 5
    monkeypatch.undo()
    monkeypatch.setattr(TarIndex, "save", lambda self, path: (_ for _ in ()).throw(PermissionError()))
    assert len(load_or_build_index(str(path)).keys) == 5  # nowhere at all: no failure


def test_only_headers_are_read_for_an_index(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "0.tar", [(f"{n}.bin", b"x" * 100_000) for n in range(5)])
    taken = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, count, at: taken.append(count) or pread(handle, count, at))
    TarIndex.build(str(path))
    assert sum(taken) < 30_000  # of 500,000


# Shards that fight back -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_a_hostile_tail_leaves_the_samples_before_it(tmp_path, kind):
    """A negative size, which sends tarfile back to the beginning, for ever."""
    good = write(tmp_path / "a.tar", item(1) + item(2)).read_bytes()[: 8 * 512]
    hostile = bytearray(write(tmp_path / "b.tar", item(3)).read_bytes())
    hostile[124:136] = b"\xff" * 12
    data = good + bytes(hostile)
    (tmp_path / "b.tar").unlink()
    (tmp_path / "a.tar").unlink()
    (tmp_path / f"x.{kind}").write_bytes(gzip.compress(data) if kind == "tar.gz" else data)
    source = opened(tmp_path, max_unreadable=0.9)
    assert any("impossible size" in reason for reason in source.skipped.values())
    if kind == "tar":
        assert {source.caption(index) for index in range(2)} == {"gray 1", "gray 2"}


def test_a_large_member_and_a_pipe_are_unreadable(tmp_path):
    write(tmp_path / "a.tar", item(1) + item(2))
    os.mkfifo(tmp_path / "pipe.tar")
    source = opened(tmp_path, max_unreadable=0.9, limits={"bytes": 20})
    assert source.skipped["pipe.tar"] == "the shard cannot be read: not a regular file"
    with pytest.raises(Unreadable, match=r"data\.limits\.bytes"):
        source.read(0, np.random.default_rng(0))


@pytest.mark.parametrize("member", [[0, 0, 10**15, 9], [9, 0, 0, 9], [0, 9, 0, 9], [0, 0, 0, -1], None])
def test_a_planted_index_is_built_again(tmp_path, member):
    path = write(tmp_path / "a.tar", item(1))
    index = TarIndex.build(str(path))
    forged = replace(index, members=np.array([member], np.int64).T if member else np.zeros((2, 1)))
    forged.save(tmp_path / ".kineo-index" / "a.tar.npz")
    assert load_or_build_index(str(path)).members.tolist() == index.members.tolist()
    (tmp_path / ".kineo-index" / "a.tar.npz").write_bytes(b"PK\x03\x04 not a zip")
    assert load_or_build_index(str(path)).members.tolist() == index.members.tolist()
