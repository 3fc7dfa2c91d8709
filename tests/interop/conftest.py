"""Tiny random pipelines in the form of diffusers, made once a session and copied by the tests that change them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.interop.tiny import tiny_pipeline


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is released, its transformer in several shards. Read only."""
    folder = tmp_path_factory.mktemp("released") / "tiny"
    pipeline = tiny_pipeline()
    pipeline.save_pretrained(folder)
    shutil.rmtree(folder / "transformer")
    pipeline.transformer.save_pretrained(folder / "transformer", max_shard_size="40KB")
    return folder


@pytest.fixture
def folder(released: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(released, tmp_path / "folder"))
