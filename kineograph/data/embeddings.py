"""Precomputed embeddings beside tar shards: one `*_NNNN.npy` file a shard, or .npy members inside the tars."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from kineograph.core.errors import InputError, NoData, Unreadable
from kineograph.core.remote_files import is_url
from kineograph.data.arrays import Array
from kineograph.data.remote_arrays import RemoteArray, RemoteFolder
from kineograph.data.shards import Shard, last_number


class Row(NamedTuple):
    """The row of an embedding file that belongs to a sample."""

    number: int
    reason: str = ""  # why there is none


class AlignedEmbeddings:
    """A folder of img_emb_0000.npy, img_emb_0001.npy …, N D (or N L D). File NNNN belongs to the shard of that number; the digits
    at the end of a sample's key are its row. A row of zeros means no embedding."""

    def __init__(self, folder: str, key: str, shards: Sequence[Shard], index_width: int) -> None:
        files = _list_numbered(folder, key)
        numbers = [shard.number for shard in shards]
        if None in numbers:
            unnumbered = shards[numbers.index(None)].name
            raise InputError(f"{key}: the shard {unnumbered} has no number in its name to match an embedding file")
        if len(set(numbers)) < len(numbers):
            raise InputError(f"{key}: several shards have the same number; put their embeddings inside the tars")
        self.index_width = index_width
        self._arrays = _open_arrays([files.get(number) if number is not None else None for number in numbers])
        self._shards = [shard.name for shard in shards]
        shapes = {array.shape[1:] for array in self._arrays if array is not None}
        if not shapes:
            raise InputError(
                f"{key}={folder} has no file for any shard: {len(files)} numbered .npy files there, and the first shard is {shards[0].name} "
                f"(number {numbers[0]})"
            )
        if len(shapes) > 1:
            raise InputError(
                f"{key}={folder} holds embeddings of different shapes: {', '.join(map(str, sorted(shapes)))}"
            )
        self.shape: tuple[int, ...] = next(iter(shapes))

    def row(self, shard: int, key: str) -> Row:
        """The row of a sample, by its key alone; values are checked when they are read."""
        array = self._arrays[shard]
        if array is None:
            return Row(-1, f"no embedding file for {self._shards[shard]}")
        digits = key[-self.index_width :]
        if not digits.isdecimal() or len(digits) < self.index_width:
            return Row(-1, f"no row number: the key does not end with {self.index_width} digits (data.index_width)")
        if int(digits) >= array.shape[0]:
            return Row(-1, f"no embedding: row {int(digits)}, and {array.path.name} has {array.shape[0]}")
        return Row(int(digits))

    def stamp(self, shard: int | None = None) -> str:
        """Sizes and times of the files, or of the file of one shard."""
        arrays = self._arrays if shard is None else [self._arrays[shard]]
        return "\n".join(_stamp(array) for array in arrays if array is not None)

    def read(self, shard: int, number: int, name: str) -> np.ndarray:
        array = self._arrays[shard]
        assert array is not None
        values = np.array(array.values[number], np.float32)
        if not values.any():
            raise Unreadable(name, f"no embedding: row {number} of {array.path.name} is zero")
        return values


def find_numbered_arrays(folder: str, key: str) -> dict[int, Array | RemoteArray]:
    """The numbered .npy files of a folder, here or at a URL."""
    files = _list_numbered(folder, key)
    return {number: array for number, array in zip(files, _open_arrays(list(files.values()))) if array is not None}


def _list_numbered(folder: str, key: str) -> dict[int, Path | tuple[RemoteFolder, str]]:
    """The .npy files of a folder, here or at a URL, by the last number in their names."""
    found: list[tuple[str, Path | tuple[RemoteFolder, str]]]
    if is_url(folder):
        remote = RemoteFolder(folder, key)
        found = [(name, (remote, name)) for name in sorted(remote.files)]
    else:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise (InputError if root.exists() else NoData)(f"{key}={folder} is not a folder")
        found = [(path.name, path) for path in sorted(root.glob("*.npy"))]
    files: dict[int, Path | tuple[RemoteFolder, str]] = {}
    names: dict[int, str] = {}
    for name, file in found:
        number = last_number(name.removesuffix(".npy"))
        if number is None:
            continue
        if number in files:
            raise InputError(f"{key}={folder} has two files of number {number}: {names[number]}, {name}")
        files[number], names[number] = file, name
    return files


def _open_arrays(files: Sequence[Path | tuple[RemoteFolder, str] | None]) -> list[Array | RemoteArray | None]:
    remote = [file for file in files if isinstance(file, tuple)]
    if remote:
        opened = iter(remote[0][0].open_arrays([name for _, name in remote]))
        return [next(opened) if file is not None else None for file in files]
    return [Array.npy(file) if isinstance(file, Path) else None for file in files]


def _stamp(array: Array | RemoteArray) -> str:
    if isinstance(array, RemoteArray):
        return array.stamp()
    stat = array.path.stat()
    return f"{array.path}\0{stat.st_size}\0{stat.st_mtime_ns}"


def read_npy(data: bytes, name: str) -> np.ndarray:
    """Parse a .npy file in memory, as float32. Equal headers are parsed once."""
    try:
        length = (
            10 + int.from_bytes(data[8:10], "little") if data[6] == 1 else 12 + int.from_bytes(data[8:12], "little")
        )
        shape, order, dtype = _parse_header(data[:length])
        values = np.frombuffer(data, dtype, offset=length).reshape(shape, order=order).astype(np.float32)
    except Exception as error:  # numpy's parser of damaged headers raises almost anything
        raise Unreadable(name, f"not a .npy array of numbers: {error}") from None
    if not values.any():
        raise Unreadable(name, "no embedding: it is zero")
    return values


@lru_cache(maxsize=64)
def _parse_header(data: bytes) -> tuple[tuple[int, ...], Literal["F", "C"], np.dtype]:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return shape, "F" if fortran else "C", dtype


def pad_encodings(encodings: np.ndarray, length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """L E → `length` E, and the mask of real tokens; rows of zeros are padding."""
    if encodings.ndim != 2:
        raise ValueError(f"text encodings have the shape {encodings.shape}, not tokens × width")
    if length is not None and len(encodings) != length:
        cut = encodings[:length]
        encodings = np.zeros((length, encodings.shape[1]), np.float32)
        encodings[: len(cut)] = cut
    return encodings, np.any(encodings != 0, axis=1)
