"""Where torch keeps what it compiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from kineograph.core.weight_cache import cache_folder
from kineograph.train.compile import compile_task, keep_compile_cache
from tests.train.toy_tasks import Toy, ToyConfig


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that what the code sets is taken back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def test_it_is_a_folder_of_this_user_alone() -> None:
    compile_task(Toy(4, ToyConfig(task="toy")), graphs=False)
    assert cache_dir() == str(cache_folder() / "compile")
    assert (cache_folder() / "compile").stat().st_mode & 0o077 == 0


def test_a_folder_that_the_user_names_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    keep_compile_cache()
    assert cache_dir() == str(tmp_path / "mine")


def test_without_a_home_torch_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "file"))
    keep_compile_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_folder_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_compile_cache()
    assert os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(os, "getuid", lambda: -1)
    keep_compile_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_folder_that_others_may_write_to_is_not_read() -> None:
    folder = cache_folder() / "compile"
    folder.mkdir(parents=True, exist_ok=True)
    mode = folder.stat().st_mode
    folder.chmod(0o777)
    try:
        keep_compile_cache()
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    finally:
        folder.chmod(mode)
