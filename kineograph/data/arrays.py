"""Memory-mapped arrays of .npy, .npz and raw files. Worker processes map the file again instead of copying it."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from kineograph.core.errors import ConfigError, InputError, NoData
from kineograph.core.text_file import parse_json, read_text, split_lines
from kineograph.data.captions import find_values, strip_captions

_MAX_UNPACKED = 2**30  # bytes of a compressed array: every process unpacks it
_NOT_ARRAYS = {".txt", ".jsonl", ".json", ".csv", ".md", ".yaml", ".yml"}


def load_npy(path: Path, mmap: bool = True) -> np.ndarray:
    """Read or map a .npy file. Raises an OSError or a ValueError: numpy's parser of damaged headers raises almost anything."""
    _check_regular(path)
    try:
        values = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"not a .npy array: {error}") from None
    if not isinstance(values, np.ndarray):
        raise ValueError("not a .npy array")
    return values


def _check_regular(path: Path) -> None:
    """A pipe would block."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")


def list_npz(path: Path) -> list[str]:
    """Names of the arrays in a .npz file. Raises an OSError or a ValueError."""
    _check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except zipfile.BadZipFile as error:
        raise ValueError(f"not a .npz file: {error}") from None


def load_npz(path: Path, name: str) -> np.ndarray:
    """Map an array of a .npz file, or unpack it if it is compressed. Raises an OSError or a ValueError."""
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            entry = archive.getinfo(f"{name}.npy")
            if entry.compress_type != zipfile.ZIP_STORED:
                with archive.open(entry) as stream:
                    return _unpack_npy(stream)
            file.seek(entry.header_offset)
            header = file.read(30)  # the local header, then the name and extra fields, whose lengths it gives
            file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), os.SEEK_CUR)
            shape, order, dtype = read_npy_header(file)
            return np.memmap(path, dtype, mode="r", offset=file.tell(), shape=shape, order=order)
    except (OSError, ValueError):
        raise
    except Exception as error:  # damaged archives and headers raise almost anything
        raise ValueError(f"not a .npz file: {error}") from None


def _unpack_npy(stream: IO[bytes]) -> np.ndarray:
    shape, order, dtype = read_npy_header(stream)
    size = math.prod(shape) * dtype.itemsize
    if size > _MAX_UNPACKED:
        raise ValueError(
            f"a compressed array of {size:,} bytes, and no more than {_MAX_UNPACKED:,} are unpacked: save it with numpy.save"
        )
    data = stream.read(size)
    if len(data) < size:
        raise ValueError(f"{len(data):,} bytes where {size:,} are stated")
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], Any, np.dtype]:
    """→ shape, order (C or F), dtype. Raises a ValueError."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except Exception as error:  # numpy's parser of damaged headers raises almost anything
        raise ValueError(f"not a .npy array: {error}") from None
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    if min(shape, default=0) < 0:  # would read on without a limit
        raise ValueError(f"a shape of {shape}")
    return shape, "F" if is_fortran else "C", dtype


class Array:
    """A .npy or raw file, or an array of a .npz file; `values` is its memory map, opened on first use."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype, member: str | None = None) -> None:
        self.path, self.shape, self.dtype, self.member = path, shape, dtype, member
        self._values: np.ndarray | None = None

    @property
    def values(self) -> np.ndarray:
        if self._values is None:
            if self.member is not None:
                self._values = load_npz(self.path, self.member)
            elif self.path.suffix == ".npy":
                self._values = load_npy(self.path)
            else:
                self._values = np.memmap(self.path, self.dtype, mode="r", shape=self.shape)
        return self._values

    def close(self) -> None:
        """Unmap the file; the next use maps it again."""
        self._values = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_values": None}  # a pickled memory map would hold the whole file

    @staticmethod
    def npy(path: Path) -> Array:
        try:
            values = load_npy(path)
        except FileNotFoundError:
            raise NoData(f"{path} does not exist") from None
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path} is not a readable .npy array: {error}") from None
        return Array(path, values.shape, values.dtype)

    @staticmethod
    def npz(path: Path, member: str) -> Array:
        try:
            values = load_npz(path, member)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} holds no readable array {member!r}: {error}") from None
        return Array(path, values.shape, values.dtype, member)

    @staticmethod
    def raw(path: Path, shape: tuple[int, ...], dtype: str) -> Array:
        parsed = parse_dtype(dtype, "data.array_dtype")
        expected, size = int(np.prod(shape, dtype=np.int64)) * parsed.itemsize, path.stat().st_size
        if expected != size:
            raise InputError(
                f"{path} has {size} bytes, and data.array_shape={list(shape)} with data.array_dtype={dtype} needs {expected}"
            )
        return Array(path, tuple(shape), parsed)


class ArrayWriter:
    """Writes the rows of a .npy file. Plainly: on a full disk, writing to a mapped file ends the process with SIGBUS."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close)
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._start, self._row = self._file.tell(), math.prod(shape[1:]) * self.dtype.itemsize
        self._file.truncate(self._start + shape[0] * self._row)  # readers map the whole array

    def write(self, row: int, values: np.ndarray) -> None:
        """Write rows `row` and following, to the disk."""
        assert values.shape[1:] == self.shape[1:]
        assert row + len(values) <= self.shape[0]
        self._file.seek(self._start + row * self._row)
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def parse_dtype(name: str, key: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        raise ConfigError(f"{key}={name} is not a dtype: use uint8, int64, float32 …") from None


def choose_member(path: Path, names: Sequence[str], chosen: str | None = None) -> str:
    """The array of a .npz file that holds the items: `chosen`, one of `names`, or the only one besides labels."""
    try:
        members = list_npz(path)
    except FileNotFoundError:
        raise NoData(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable .npz file: {error}") from None
    listed = ", ".join(members[:12]) or "none"
    if chosen is not None:
        if chosen not in members:
            raise InputError(f"data.array_name={chosen} is not in {path}: it holds {listed}")
        return chosen
    candidates = [name for name in members if name in names] or [name for name in members if name != "labels"]
    if len(candidates) != 1:
        raise InputError(f"{path} holds the arrays {listed}: set data.array_name to the one to train on")
    return candidates[0]


def find_array(
    folder: str, names: tuple[str, ...], shape: tuple[int, ...] | None, dtype: str, member: str | None = None
) -> Array:
    """The array at `folder`, which may be the file itself or hold it: one of `names`, or the only array there.

    `member` is the name of an array within a .npz file.
    """
    path = Path(folder).expanduser()
    if path.is_dir():
        files = sorted(
            file
            for file in path.iterdir()
            if file.is_file() and not file.name.startswith(".") and file.suffix not in _NOT_ARRAYS
        )
        candidates = [file for file in files if file.stem in names] or [file for file in files if file.stem != "labels"]
        if len(candidates) != 1:
            listed = ", ".join(file.name for file in candidates[:6]) or "none"
            raise InputError(
                f"data.folder={folder} should hold one array file ({names[0]}.npy), found {listed}: name the file itself"
            )
        path = candidates[0]
    if not path.exists():
        raise NoData(f"data.folder={folder} does not exist")
    if member is not None and path.suffix != ".npz":
        raise ConfigError(f"data.array_name={member} names an array of a .npz file, but {path} is not one: remove it")
    if path.suffix == ".npy":
        return Array.npy(path)
    if path.suffix == ".npz":
        return Array.npz(path, choose_member(path, names, member))
    if shape is None:
        raise InputError(f"{path} is a raw file: set data.array_shape and data.array_dtype")
    return Array.raw(path, shape, dtype)


def read_captions_beside(path: Path) -> list[tuple[str, ...]] | None:
    """The captions of each item, from captions.txt (a line an item) or captions.jsonl ({"caption" or "text"}, a text or a list) in its folder."""
    plain, rows = path.parent / "captions.txt", path.parent / "captions.jsonl"
    try:
        if plain.is_file():
            return [strip_captions([line]) for line in split_lines(read_text(plain))]
        if rows.is_file():
            parsed = [parse_json(line) for line in split_lines(read_text(rows)) if line.strip()]
            if unfit := next((row for row in parsed if not isinstance(row, dict)), None):
                raise ValueError(f"{str(unfit)[:40]} is not an object")
            return [strip_captions(find_values(row, ("caption", "text", "captions", "texts"))) for row in parsed]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"the captions beside {path} cannot be read: {error}") from None
    return None
