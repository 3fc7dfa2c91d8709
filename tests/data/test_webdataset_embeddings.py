"""Embeddings beside tar shards and inside them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.remote_files import download
from kineograph.data import remote_arrays
from kineograph.data.loader import Loader
from kineograph.data.remote_arrays import RemoteFolder
from tests.data.tar_shards import item, npy, opened, read, three_shards, write


def aligned(
    root: Path, name: str = "img_emb", shards: tuple[int, ...] = (0, 1, 2), width: int = 4, rows: int = 5
) -> str:
    folder = root / name
    folder.mkdir()
    for shard in shards:
        values = np.arange(1, rows + 1)[:, None] + 10.0 * shard + np.zeros((rows, 3))
        np.save(folder / f"{name}_{shard:0{width}}.npy", values.astype(np.float16))
    return str(folder)


def test_aligned_embeddings_by_shard_number_and_key(tmp_path: Path) -> None:
    three_shards(tmp_path)
    folders = {"img_embeddings_folder": aligned(tmp_path), "text_embeddings_folder": aligned(tmp_path, "text_emb")}
    source = opened(tmp_path, **folders)
    assert source.fields == {"pixels", "image_embed", "text_embed"}
    assert len(source) == 10
    for index in range(10):
        shard, row = int(source.identity(index)[:5]), int(source.identity(index)[-4:])
        sample = read(source, index)
        assert sample.extra["image_embed"].tolist() == [row + 1 + 10 * shard] * 3
        assert torch.equal(sample.extra["image_embed"], sample.extra["text_embed"])
    batch = next(iter(Loader(source, 0, 4).steps(0, 1)))[0]
    assert batch.extra["image_embed"].shape == (4, 3)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A server on this machine that lists `tmp_path`, and the files that it was asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path.rpartition("/")[2])
            super().do_GET()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    served = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    thread = Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}", asked
    served.shutdown()
    served.server_close()


def test_aligned_embeddings_at_a_url(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    pytest.importorskip("aiohttp")
    url, asked = server
    shards = tmp_path / "shards"
    shards.mkdir()
    three_shards(shards)
    aligned(tmp_path)
    source = opened(shards, img_embeddings_folder=f"{url}/img_emb/")
    assert len(source) == 10
    before = {name for name in asked if name.endswith(".npy")}
    for index in range(10):
        shard, row = int(source.identity(index)[:5]), int(source.identity(index)[-4:])
        assert read(source, index).extra["image_embed"].tolist() == [row + 1 + 10 * shard] * 3
    assert before == {f"img_emb_{shard:04}.npy" for shard in range(3)}  # their headers
    asked.clear()
    again = pickle.loads(pickle.dumps(source))  # as a worker gets it
    assert read(again, 0).extra["image_embed"].tolist() == read(source, 0).extra["image_embed"].tolist()
    assert asked == []  # downloaded once, for later processes too


def test_two_threads_may_need_the_same_file_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    fsspec.filesystem("memory").put(aligned(tmp_path), "/twice/", recursive=True)
    folder = RemoteFolder("memory://twice/img_emb", "data.img_embeddings_folder")
    both = Barrier(2, timeout=10)

    def download_beside_another(*args: Any) -> None:
        download(*args)
        both.wait()

    monkeypatch.setattr(remote_arrays, "download", download_beside_another)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(folder.fetch, ["img_emb_0000.npy"] * 2)
    assert first == second and first.exists()


def test_a_url_that_does_not_answer_is_refused(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    pytest.importorskip("aiohttp")
    url, _ = server
    three_shards(tmp_path)
    with pytest.raises(InputError, match=r"data\.img_embeddings_folder: .*/gone/ was not found: check the address"):
        opened(tmp_path, img_embeddings_folder=f"{url}/gone/")
    with pytest.raises(InputError, match=r"nowhere://x: addresses of this kind are not opened"):
        opened(tmp_path, img_embeddings_folder="nowhere://x")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"holds no \.npy files"):
        opened(tmp_path, img_embeddings_folder=f"{url}/none/")


def test_embeddings_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    three_shards(tmp_path)
    fsspec.filesystem("memory").put(aligned(tmp_path), "/store/", recursive=True)
    source = opened(tmp_path, img_embeddings_folder="memory://store/img_emb")
    assert read(source, 0).extra["image_embed"].tolist() == [1.0] * 3


def test_states_follow_the_embeddings_of_their_shard(tmp_path: Path) -> None:
    three_shards(tmp_path)
    folder = aligned(tmp_path)
    before = opened(tmp_path, img_embeddings_folder=folder).item_states()
    np.save(f"{folder}/img_emb_0002.npy", np.ones((7, 3), np.float16))
    after = opened(tmp_path, img_embeddings_folder=folder).item_states()
    assert [old == new for old, new in zip(before, after, strict=True)] == [True] * 6 + [False] * 4


def test_missing_embeddings_are_skipped_and_counted_or_kept_with_a_flag(tmp_path: Path) -> None:
    three_shards(tmp_path)
    folder = aligned(tmp_path, shards=(0, 2), rows=3)  # none of shard 1, and rows 3 and 4 are not there
    zero = np.load(f"{folder}/img_emb_0000.npy")
    zero[1] = 0
    np.save(f"{folder}/img_emb_0000.npy", zero)
    with pytest.raises(InputError, match=r"4 of 10 samples .*most often: no embedding: row 3"):
        opened(tmp_path, img_embeddings_folder=folder)
    source = opened(tmp_path, img_embeddings_folder=folder, max_unreadable=0.5)
    assert len(source) == 6
    assert source.skipped["00001.tar:000010000"] == "no embedding file for 00001.tar"
    with pytest.raises(Unreadable, match=r"no embedding: row 1 of img_emb_0000.npy is zero"):
        read(source, 1)
    loader = Loader(source, 0, 6)
    batch = next(iter(loader.steps(0, 1)))[0]
    assert list(loader.skipped) == ["00000.tar:000000001"] and (batch.extra["image_embed"] != 0).all()
    kept = opened(tmp_path, img_embeddings_folder=folder, missing_embeddings="keep")
    assert len(kept) == 10
    flags = [bool(read(kept, index).extra["has_image_embed"]) for index in range(10)]
    assert flags == [True, False, True, False, False, False, True, True, True, False]
    assert read(kept, 3).extra["image_embed"].tolist() == [0, 0, 0]


def test_embeddings_inside_the_tar(tmp_path: Path) -> None:
    files = (
        [file for n in range(8) for file in item(n, img_emb__npy=npy(n + 1, 2))]
        + item(8)
        + item(9, img_emb__npy=npy(0, 0))
    )
    path = write(tmp_path / "0.tar", files)
    source = opened(path, image_embed="img_emb.npy")
    assert source.skipped == {"0.tar:000000008": "no embedding (img_emb.npy)"}
    assert read(source, 4).extra["image_embed"].tolist() == [5, 2]
    with pytest.raises(Unreadable, match="it is zero"):
        read(source, 8)
    kept = opened(path, image_embed="img_emb.npy", missing_embeddings="keep")
    assert [read(kept, n).extra["image_embed"].tolist() for n in (8, 9)] == [[0, 0]] * 2
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}]), allow_pickle=True)
    path = write(tmp_path / "1.tar", item(0, img_emb__npy=pickled.getvalue()) + item(1, img_emb__npy=b"none"))
    broken = opened(path, image_embed="img_emb.npy")
    for index in range(2):
        with pytest.raises(Unreadable, match=r"not a .npy array"):
            read(broken, index)


def test_an_embedding_that_fits_no_batch_is_counted_and_replaced(tmp_path: Path) -> None:
    odd = {3: npy(1, 2, 3), 5: npy(1, np.nan)}
    files = [file for n in range(8) for file in item(n, img_emb__npy=odd.get(n, npy(n + 1, 2)))]
    loader = Loader(opened(write(tmp_path / "0.tar", files), image_embed="img_emb.npy"), 0, 8)
    (batch,) = next(iter(loader.steps(0, 1)))
    assert batch.extra["image_embed"].shape == (8, 2) and batch.extra["image_embed"].isfinite().all()
    assert {path[-1]: reason for path, reason in loader.skipped.items()} == {
        "3": "an embedding of shape (3,) among those of (2,)",
        "5": "its embedding is not finite",
    }


def test_text_encodings_have_a_mask(tmp_path: Path) -> None:
    three_shards(tmp_path, (3,))
    folder = tmp_path / "enc"
    folder.mkdir()
    values = np.zeros((3, 4, 2), np.float32)
    for row in range(3):
        values[row, : row + 1] = row + 1
    np.save(folder / "enc_00.npy", values)
    sample = read(opened(tmp_path / "00000.tar", text_encodings_folder=str(folder)), 1)
    assert sample.text_embeds.shape == (4, 2) and sample.text_mask.tolist() == [True, True, False, False]
    longer = read(opened(tmp_path / "00000.tar", text_encodings_folder=str(folder), text_length=6), 1)
    assert longer.text_embeds.shape == (6, 2) and longer.text_mask.sum() == 2
    files = [file for n in range(3) for file in item(n, txt_enc__npy=_encodings(n + 1))]
    source = opened(write(tmp_path / "in/0.tar", files), text_encoding="txt_enc.npy", text_length=2)
    batch = next(iter(Loader(source, 0, 3).steps(0, 1)))[0]
    assert batch.text_embeds.shape == (3, 2, 5) and sorted(batch.text_mask.sum(1).tolist()) == [1, 2, 2]


def _encodings(tokens: int) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((tokens, 5), np.float32))
    return buffer.getvalue()


def test_without_pixels_nothing_is_decoded(tmp_path: Path) -> None:
    path = write(
        tmp_path / "0.tar", [("000000000.png", b"broken"), ("000000000.txt", b"a"), ("000000000.e.npy", npy(1))]
    )
    source = opened(path, pixels=False, text_embed="e.npy")
    sample = read(source, 0)
    assert sample.pixels is None and sample.caption == "a" and sample.extra["text_embed"].tolist() == [1]
    assert source.fields == {"text_embed"}


def test_embedding_folders_that_cannot_fit(tmp_path: Path) -> None:
    three_shards(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        opened(tmp_path, img_embeddings_folder=str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"no file for any shard: 1 numbered .*00000.tar"):
        opened(tmp_path, img_embeddings_folder=aligned(tmp_path, shards=(7,)))
    np.save(tmp_path / "img_emb" / "img_emb_00.npy", np.zeros((5, 3)))
    np.save(tmp_path / "img_emb" / "img_emb_01.npy", np.zeros((5, 4)))
    with pytest.raises(InputError, match="different shapes"):
        opened(tmp_path, img_embeddings_folder=str(tmp_path / "img_emb"))
    with pytest.raises(InputError, match=r"does not end with 12 digits|no row number"):
        opened(tmp_path, img_embeddings_folder=aligned(tmp_path, "e"), index_width=12)
