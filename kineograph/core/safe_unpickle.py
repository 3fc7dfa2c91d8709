"""Reads pickled weights as data: only arrays and tensors are unpickled, and no code of the file runs."""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kineograph.core.errors import InputError


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, sha256: str) -> None:
    found = sha256_of(path)
    if found != sha256:
        raise InputError(f"{path} has SHA-256 {found}, not {sha256}: it is another file, or damaged")


# Pickles of numpy arrays ---------------------------------------------------------------------------------------------


def read_arrays(path: Path, sha256: str) -> dict[str, Any]:
    """Read a pickle of dictionaries of numpy arrays, after a hash check."""
    check_hash(path, sha256)
    with path.open("rb") as file:
        return _unpickle(_ArraysOnly(file), path)


class _ArraysOnly(pickle.Unpickler):
    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED:
            # numpy 2 moved numpy.core to numpy._core
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise InputError(f"the file asks for {module}.{name}: only numpy arrays are read")


# TorchScript archives ------------------------------------------------------------------------------------------------


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a TorchScript archive by dotted name, in its order, without running its program."""
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise InputError(f"{path} is not a TorchScript archive: it is not a zip file") from None
    with archive:
        data = next((name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")), None)
        if data is None:
            raise InputError(f"{path} is not a TorchScript archive: it has no data.pkl")
        root = data.removesuffix("data.pkl")
        reader = _TensorsOnly(io.BytesIO(archive.read(data)), lambda key: archive.read(f"{root}data/{key}"))
        return OrderedDict(_iterate_tensors(_unpickle(reader, path)))


class _Part:
    """Stands for any class of the archive: holds its attributes and does nothing."""


_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _TensorsOnly(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storage: Callable[[str], bytes]) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__."):
            return _Part
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch.jit._pickle", "build_intlist"): list,
        }
        if (module, name) in known:
            return known[module, name]
        raise InputError(f"the file asks for {module}.{name}: only tensors are read")

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not str(key).isalnum():
            raise InputError(f"the file stores a {kind} of {dtype}: only tensors are read")
        return torch.frombuffer(bytearray(self._storage(str(key))), dtype=dtype)


def _rebuild_tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any) -> Tensor:
    return storage.as_strided(size, stride, offset).clone()  # torch refuses to read outside of the storage


def _iterate_tensors(part: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(part).items() if isinstance(part, _Part) else ():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, _Part):
            yield from _iterate_tensors(value, f"{prefix}{name}.")


def _unpickle(reader: pickle.Unpickler, path: Path) -> Any:
    try:
        return reader.load()
    except InputError as error:
        raise InputError(f"{path} is refused: {error}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
