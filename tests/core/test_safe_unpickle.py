from __future__ import annotations

import hashlib
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import read_arrays, read_torchscript


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def digest(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_pickles_are_hash_checked_and_hold_arrays_only(tmp_path):
    path = tmp_path / "weights.ckpt"
    content = {"a": {"b": np.arange(6, dtype=np.float32).reshape(2, 3)}}
    path.write_bytes(pickle.dumps(content, protocol=3))
    assert np.array_equal(read_arrays(path, digest(path))["a"]["b"], content["a"]["b"])
    with pytest.raises(InputError, match="SHA-256"):
        read_arrays(path, "0" * 64)
    path.write_bytes(pickle.dumps({"a": Evil()}, protocol=3))
    with pytest.raises(InputError, match=r"weights.ckpt is refused: .*builtins.exec"):
        read_arrays(path, digest(path))


@pytest.mark.parametrize("name", ["numpy.testing build_err_msg", "numpyfake.core.multiarray _reconstruct", "os system"])
def test_nothing_else_of_numpy_is_reached(tmp_path, name):
    path = tmp_path / "weights.ckpt"
    path.write_bytes(b"c" + name.replace(" ", "\n").encode() + b"\n.")
    with pytest.raises(InputError, match="only numpy arrays are read"):
        read_arrays(path, digest(path))


def test_a_damaged_pickle_is_named(tmp_path):
    path = tmp_path / "weights.ckpt"
    path.write_bytes(pickle.dumps({"a": np.zeros(3)}, protocol=3)[:-5])
    with pytest.raises(InputError, match=r"weights.ckpt cannot be read"):
        read_arrays(path, digest(path))


def test_tensors_of_torchscript_by_name_without_running_it(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())).eval()
    torch.jit.save(torch.jit.script(network), tmp_path / "net.pt")
    found = read_torchscript(tmp_path / "net.pt")
    expected = network.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_evil_archive_is_refused(tmp_path):
    path = tmp_path / "net.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/data.pkl", pickle.dumps(Evil(), protocol=2))
    with pytest.raises(InputError, match=r"asks for (__builtin__|builtins).exec: only tensors are read"):
        read_torchscript(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/other", "")
    with pytest.raises(InputError, match=r"no data.pkl"):
        read_torchscript(path)
    path.write_bytes(b"no zip")
    with pytest.raises(InputError, match="not a zip"):
        read_torchscript(path)


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path):
    module = torch.jit.script(nn.Linear(2, 2, bias=False))
    torch.jit.save(module, tmp_path / "net.pt")
    with zipfile.ZipFile(tmp_path / "net.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    storage = next(name for name in members if name.endswith("data/0"))
    members[storage] = members[storage][:8]  # two numbers of four
    with zipfile.ZipFile(tmp_path / "short.pt", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(InputError, match=r"short.pt cannot be read"):
        read_torchscript(tmp_path / "short.pt")
