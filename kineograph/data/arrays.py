"""Memory-mapped arrays. Worker processes map the file again instead of copying it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from kineograph.core.errors import ConfigError, InputError, NoData
from kineograph.core.text_file import parse_json, replace_surrogates, split_lines

_NOT_ARRAYS = {".txt", ".jsonl", ".json", ".csv", ".md", ".yaml", ".yml"}


def load_npy(path: Path, mmap: bool = True) -> np.ndarray:
    """Read or map a .npy file. Raises an OSError or a ValueError: numpy's parser of damaged headers raises almost anything."""
    try:
        values = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"not a .npy array: {error}") from None
    if not isinstance(values, np.ndarray):
        raise ValueError("not a .npy array")
    return values


class Array:
    """A .npy or raw file; `values` is its memory map, opened on first use."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype
        self._values: np.ndarray | None = None

    @property
    def values(self) -> np.ndarray:
        if self._values is None:
            if self.path.suffix == ".npy":
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


def find_array(folder: str, names: tuple[str, ...], shape: tuple[int, ...] | None, dtype: str) -> Array:
    """The array at `folder`, which may be the file itself or hold it: one of `names`, or the only array there."""
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
    if path.suffix == ".npy":
        return Array.npy(path)
    if shape is None:
        raise InputError(f"{path} is a raw file: set data.array_shape and data.array_dtype")
    return Array.raw(path, shape, dtype)


def read_captions_beside(path: Path) -> list[str] | None:
    """Captions from captions.txt (a line an item) or captions.jsonl ({"caption" or "text"}) in the same folder."""
    plain, rows = path.parent / "captions.txt", path.parent / "captions.jsonl"
    try:
        if plain.is_file():
            return [line.strip() for line in split_lines(plain.read_text(encoding="utf-8-sig"))]
        if rows.is_file():
            parsed = [parse_json(line) for line in split_lines(rows.read_text(encoding="utf-8-sig")) if line.strip()]
            texts = [row.get("caption") or row.get("text") or "" for row in parsed]
            return [replace_surrogates(text) for text in texts]
    except (OSError, UnicodeDecodeError, ValueError, AttributeError) as error:
        raise InputError(f"the captions beside {path} cannot be read: {error}") from None
    return None
