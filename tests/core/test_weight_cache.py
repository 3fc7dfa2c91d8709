from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kineograph.core import weight_cache
from kineograph.core.errors import InputError


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "cache"))


def test_what_is_stored_is_found_and_its_hash_is_of_the_tensors(tmp_path, monkeypatch):
    tensors = {"b": torch.ones(2), "a": torch.arange(3.0)}
    stored = weight_cache.store("net", tensors, source="here")
    assert weight_cache.find("net") == stored
    assert torch.equal(weight_cache.load(stored.path)["a"], tensors["a"])
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "elsewhere"))
    assert weight_cache.store("net", dict(reversed(tensors.items())), source="there").sha256 == stored.sha256
    assert weight_cache.store("net", tensors | {"a": torch.zeros(3)}).sha256 != stored.sha256


def test_missing_ones_name_the_command():
    with pytest.raises(weight_cache.WeightsNotFetched, match="kineo weights get inception-v3"):
        weight_cache.find("inception-v3")


def test_damage_is_seen():
    path = weight_cache.store("net", {"a": torch.zeros(8)}).path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is damaged.*kineo weights get net again"):
        weight_cache.find("net")
    path.with_suffix(".json").unlink()
    with pytest.raises(InputError, match="damaged"):
        weight_cache.find("net")


def test_a_failed_write_leaves_the_old_ones(monkeypatch):
    before = weight_cache.store("net", {"a": torch.zeros(8)})
    monkeypatch.setattr(weight_cache, "sha256_of", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        weight_cache.store("net", {"a": torch.ones(8)})
    monkeypatch.undo()
    monkeypatch.setenv("KINEO_CACHE", str(before.path.parent.parent))
    assert weight_cache.find("net") == before
    assert {path.name for path in before.path.parent.iterdir()} == {"net.safetensors", "net.json"}


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("KINEO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert weight_cache.cache_folder() == tmp_path / "xdg" / "kineograph"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weight_cache.cache_folder() == Path.home() / ".cache" / "kineograph"


def test_names_and_files_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lpips-own").touch()
    assert weight_cache.is_name("lpips-vgg16")
    assert not any(map(weight_cache.is_name, ("lpips-own", "weights/lpips-vgg16", "lpips.safetensors")))
