"""Embeddings with captions in Parquet: a row is one item in every folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.data.clip_retrieval import ClipRetrieval, ClipRetrievalConfig
from kineograph.data.remote_arrays import RemoteFolder
from kineograph.train.remote_checkpoint import check_reachable
from tests.run.calling import kineo

COUNTS = {0: 6, 1: 5, 12: 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Item r of file n: image (n, r + 1, …), text (−n, r + 1, …), caption "n r"."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    for name in ("img_emb", "text_emb", "metadata"):
        (tmp_path / name).mkdir()
    for number, count in COUNTS.items():
        rows = np.arange(1, count + 1)
        for name, sign in (("img_emb", 1), ("text_emb", -1)):
            values = np.stack([np.full(count, sign * number), rows, rows**2, np.ones(count)], 1)
            np.save(tmp_path / name / f"{name}_{number}.npy", values.astype(np.float16))
        table = pyarrow.table({"url": ["u"] * count, "caption": [f"{number}  {row}" for row in range(count)]})
        parquet.write_table(table, tmp_path / "metadata" / f"metadata_{number}.parquet")
    return tmp_path


def opened(folder: Path, split: Any = "train", **keys: Any) -> ClipRetrieval:
    given = {
        "image_embeddings": str(folder / "img_emb"),
        "text_embeddings": str(folder / "text_emb"),
        "metadata": str(folder / "metadata"),
    }
    return ClipRetrieval.open(ClipRetrievalConfig(**(given | keys)), split, 0)  # type: ignore[arg-type]


def test_a_row_is_one_item_in_every_folder(folder: Path) -> None:
    train, held_out = opened(folder, validation=0.2), opened(folder, "validation", validation=0.2)
    names = [source.identity(index) for source in (train, held_out) for index in range(len(source))]
    assert sorted(names) == sorted(f"{number}:{row}" for number, count in COUNTS.items() for row in range(count))
    assert train.fields == {"image_embed", "text_embed"} and len(held_out) > 0
    for source in (train, held_out):
        for index in range(len(source)):
            number, row = map(int, source.identity(index).split(":"))
            sample = source.read(index, numpy_rng(0))
            assert sample.extra["image_embed"].tolist() == [number, row + 1, (row + 1) ** 2, 1]
            assert sample.extra["text_embed"].tolist() == [-number, row + 1, (row + 1) ** 2, 1]
            assert sample.caption == f"{number} {row}"


def test_all_of_it_may_lie_in_an_object_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))
    names = {"image_embeddings": "img_emb", "text_embeddings": "text_emb", "metadata": "metadata"}
    for name in names.values():
        fsspec.filesystem("memory").put(str(folder / name), "/retrieval/", recursive=True)
    source = opened(folder, **{key: f"memory://retrieval/{name}" for key, name in names.items()})
    assert source.caption(0) == opened(folder).caption(0)
    with pytest.raises(InputError, match=r"data\.metadata: memory://gone was not found"):
        opened(folder, metadata="memory://gone")


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    np.save(folder / "text_emb" / "text_emb_1.npy", np.ones((4, 4)))
    with pytest.raises(InputError, match="file 1 has 4 rows for 5 image embeddings"):
        opened(folder)
    (folder / "text_emb" / "text_emb_1.npy").unlink()
    with pytest.raises(InputError, match="file 1 has no rows for 5"):
        opened(folder)
    with pytest.raises(InputError, match=r"columns url, caption: set data\.caption_column"):
        opened(folder, text_embeddings=None, caption_column="title")
    (folder / "metadata" / "metadata_12.parquet").unlink()
    with pytest.raises(InputError, match=r"has no \.parquet file of number 12"):
        opened(folder, text_embeddings=None)
    np.save(folder / "img_emb" / "img_emb_1.npy", np.ones((5, 3)))
    with pytest.raises(InputError, match="of one width"):
        opened(folder, text_embeddings=None, metadata=None)


@pytest.mark.parametrize(
    "url",
    ["reference::http://127.0.0.1:9/x.json", "reference://x", "simplecache::file:///tmp", "dask://h", "sftp://h/x"],
)
def test_unusual_addresses_are_not_opened(folder: Path, url: str) -> None:
    with pytest.raises(InputError, match="addresses of this kind are not opened"):
        RemoteFolder(url, "data.image_embeddings")
    with pytest.raises(InputError, match="addresses of this kind are not opened"):
        check_reachable(url)


def test_a_row_of_zeros_is_no_embedding(folder: Path) -> None:
    np.save(folder / "img_emb" / "img_emb_0.npy", np.zeros((6, 4)))
    source = opened(folder, validation=0)
    assert source.identity(0) == "0:0"
    with pytest.raises(Unreadable, match="its image_embed is zero"):
        source.read(0, numpy_rng(0))


def test_a_prior_trains_from_them(folder: Path) -> None:
    config = folder / "prior.yaml"
    config.write_text(
        f"""
        data: {{source: clip_retrieval, image_embeddings: {folder}/img_emb, text_embeddings: {folder}/text_emb, validation: 0.2}}
        train: {{steps: 2, batch_size: 4, validate_every: 2, validation_samples: 4, sample_every: 0, workers: 0, device: cpu, trackers: []}}
        stages:
          prior: {{task: dalle2.prior, clip: {{kind: given, width: 4}}, text_encodings: false, width: 32, depth: 1, heads: 2,
                  sample: {{guidance: 1.0}}}}
        """
    )
    assert kineo("train", config, "--run", folder / "run") == 0
    assert (folder / "run" / "prior" / "checkpoints" / "step-00000002").is_dir()
