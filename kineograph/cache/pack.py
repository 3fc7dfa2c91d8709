"""A pack: rows of one shape, appended by one process. The header counts them and is committed last, so a killed writer leaves a valid prefix.

A pack is a folder: cache.json (the header), one array a field (tokens.npy, latents.npy, text_embeds.npy, fps.npy …), keys.npy (the item
keys), sums.npy (a CRC-32 a row), and captions.jsonl ({identity, caption} a line, and `captions` where there are several).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from kineograph.core.config import Axis, Config
from kineograph.core.errors import InputError, Unreadable
from kineograph.core.run_folder import write_atomic
from kineograph.core.text_file import parse_json, read_regular
from kineograph.data.arrays import Array, ArrayWriter, load_npy
from kineograph.data.open_source import Split

HEADER = "cache.json"
KINDS = ("tokens", "latents", "pixels", "image_embed")
"""Fields that stand in for the pixels of the data; a pack has the first of these that a task gives."""
SIDE_FIELDS = ("image_embed", "text_embed", "text_embeds", "text_mask", "first_frame", "low_res_tokens")
"""Fields that `Task.precompute` may give beside it."""
KEY_BYTES = 16
_KEYS, _SUMS = "keys.npy", "sums.npy"
_CAPTIONS = "captions.jsonl"
_PREFIX = "pack-"
_BF16 = "bfloat16"  # stored as uint16: NumPy has no such type
_FLOATS = {"fp16": "float16", "bf16": _BF16, "fp32": "float32"}  # cache_precision → dtype on disk


class Header(Config):
    """The content of cache.json."""

    kind: Literal["tokens", "latents", "pixels", "image_embed"]
    count: int = Field(ge=1)
    """Rows that the arrays have room for."""
    done: int = Field(0, ge=0)
    """Rows that are written."""
    shape: tuple[Axis, ...]
    """Of one row of `kind`: tokens t h w, latents, or an embedding."""
    vocabulary: int | None = Field(None, ge=1)
    """Codes of the codec; null unless `kind` is tokens."""
    key: str = ""
    """Of the recipe: encoder weights and options, preprocessing, precision."""
    codec: str = ""
    """Digest of the weights of the codec that made the tokens or latents."""
    split: Split | None = None
    """null: items of all splits, divided by their identities."""
    arrays: dict[str, str] = Field(default_factory=dict)
    """Fields and their dtypes."""


def read_header(folder: Path) -> Header | None:
    """The header of a pack; None without one."""
    try:
        tree = parse_json(read_regular(folder / HEADER))
        return Header.model_validate({name: value for name, value in tree.items() if name != "complete"})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder / HEADER} is not a cache header: {error}; remove {folder} and encode again"
        ) from None


def pack_folders(folder: Path) -> list[Path]:
    """The folders of the packs of a cache, by number."""
    return sorted(folder.glob(f"{_PREFIX}*"))


@dataclass
class Pack:
    """A pack, opened for reading. Arrays are memory-mapped on first use."""

    folder: Path
    header: Header
    arrays: dict[str, Array]
    sums: Array | None = None  # CRC-32 of each row; packs of earlier versions have none

    @staticmethod
    def open(folder: Path) -> Pack:
        header = read_header(folder)
        if header is None:
            raise InputError(f"{folder} holds no {HEADER}: run kineo cache again")
        arrays = {name: Array.npy(folder / f"{name}.npy") for name in header.arrays}
        sums = Array.npy(folder / _SUMS) if (folder / _SUMS).is_file() else None
        for array in (*arrays.values(), *([sums] if sums is not None else [])):
            if not array.shape or array.shape[0] < header.done:
                raise InputError(
                    f"{array.path} has the shape {array.shape}, and {folder / HEADER} counts {header.done} rows: remove {folder} and encode again"
                )
        main = arrays.get(header.kind)
        if main is None or math.prod(main.shape[1:]) != math.prod(header.shape):
            found = (
                f"rows of {header.kind} have the shape {main.shape[1:]}"
                if main is not None
                else f"there are no {header.kind}"
            )
            raise InputError(
                f"{folder / HEADER} describes rows of the shape {header.shape}, and {found}: remove {folder} and encode again"
            )
        return Pack(folder, header, arrays, sums)

    def keys(self) -> np.ndarray:
        """The item key of each row, in a dtype that sorts."""
        try:
            keys = load_npy(self.folder / _KEYS, mmap=False)[: self.header.done]
            return np.ascontiguousarray(keys.reshape(-1, KEY_BYTES)).view(f"S{KEY_BYTES}").reshape(-1)
        except (OSError, EOFError, ValueError) as error:
            raise InputError(f"{self.folder / _KEYS} cannot be read: {error}; remove {self.folder}") from None

    def captions(self) -> list[tuple[str, tuple[str, ...]]]:
        """The identity and captions of each row."""
        path = self.folder / _CAPTIONS
        try:
            lines = read_regular(path).splitlines()[: self.header.done]
            rows = [(row["identity"], _find_texts(row)) for row in map(parse_json, lines)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} cannot be read: {error}; remove {self.folder} and encode again") from None
        if len(rows) < self.header.done:
            raise InputError(
                f"{path} has {len(rows)} lines, and {self.folder / HEADER} counts {self.header.done} rows: remove {self.folder} and encode again"
            )
        return rows

    def read(self, row: int, identity: str) -> dict[str, Tensor]:
        """The fields of one row. Raises Unreadable for ids outside the vocabulary."""
        fields = {}
        values = {name: np.array(array.values[row]) for name, array in self.arrays.items()}
        if self.sums is not None and _checksum(values.values()) != self.sums.values[row]:
            raise Unreadable(identity, f"row {row} of {self.folder} does not match its checksum: remove the folder")
        for name, value in values.items():
            if name == "tokens":
                value = value.reshape(self.header.shape).astype(np.int64)
                if fault := _id_fault(value, self.header.vocabulary):
                    raise Unreadable(identity, fault)
            elif self.header.arrays[name] == _BF16:
                fields[name] = torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).float()
                continue
            elif np.issubdtype(value.dtype, np.floating):
                value = value.astype(np.float32)
            fields[name] = torch.from_numpy(value)
        return fields

    def close(self) -> None:
        """Unmap the arrays; the next read maps them again."""
        for array in (*self.arrays.values(), *([self.sums] if self.sums is not None else [])):
            array.close()


class PackWriter:
    """Appends batches to a new pack of up to `count` rows, of the fields, shapes and dtypes of `fields`."""

    def __init__(
        self,
        folder: Path,
        count: int,
        fields: dict[str, Tensor],
        vocabulary: int | None = None,
        precision: str = "fp16",
        key: str = "",
        codec: str = "",
    ) -> None:
        kind = next(kind for kind in KINDS if kind in fields)
        if kind == "tokens" and not vocabulary:
            raise InputError("a cache of tokens needs the codec's vocabulary")
        arrays = {name: _stored_dtype(name, value, vocabulary, precision) for name, value in fields.items()}
        self.folder = folder
        self.header = Header.model_validate({
            "kind": kind, "count": count, "shape": fields[kind].shape[1:], "vocabulary": vocabulary, "key": key, "codec": codec,
            "split": "train", "arrays": arrays,
        })  # fmt: skip
        self._arrays = {
            name: ArrayWriter(folder / f"{name}.npy", "uint16" if dtype == _BF16 else dtype, (count, *fields[name].shape[1:]))
            for name, dtype in arrays.items()
        }  # fmt: skip
        self._keys = ArrayWriter(folder / _KEYS, "uint8", (count, KEY_BYTES))
        self._sums = ArrayWriter(folder / _SUMS, "uint32", (count,))
        self._captions = open(folder / _CAPTIONS, "wb")  # noqa: SIM115 (closed by close)

    @staticmethod
    def create_folder(folder: Path) -> Path:
        """Create the folder of the next pack. mkdir is atomic, so no two processes get the same one."""
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name.removeprefix(_PREFIX)) for path in pack_folders(folder)), default=-1)
        while True:
            path = folder / f"{_PREFIX}{number:05d}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1

    def append(
        self,
        fields: dict[str, Tensor],
        keys: Sequence[bytes],
        identities: Sequence[str],
        captions: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Write one batch; an item may have several captions. It is on disk and counted when this returns."""
        start, stop = self.header.done, self.header.done + len(keys)
        assert stop <= self.header.count
        values = {name: self._to_numpy(name, fields[name].detach().cpu()) for name in self._arrays}
        for name, array in self._arrays.items():
            values[name] = np.ascontiguousarray(values[name], array.dtype)
            assert len(values[name]) == len(keys)
            array.write(start, values[name])
        self._sums.write(start, np.array([_checksum(row) for row in zip(*values.values(), strict=True)], np.uint32))
        self._keys.write(start, np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES))
        for array in (*self._arrays.values(), self._keys, self._sums):
            array.sync()
        for identity, texts in zip(identities, captions or [()] * len(keys), strict=True):
            row = {"identity": identity, "caption": texts[0] if texts else None}
            self._captions.write((json.dumps(row | ({"captions": texts} if len(texts) > 1 else {})) + "\n").encode())
        self._captions.flush()
        os.fsync(self._captions.fileno())
        self.header = self.header.model_copy(update={"done": stop})
        write_atomic(self.folder / HEADER, self.header.model_dump_json(indent=1))

    def _to_numpy(self, name: str, value: Tensor) -> np.ndarray:
        if name == "tokens" and (fault := _id_fault(value.numpy(), self.header.vocabulary)):
            raise InputError(f"{self.folder}: {fault}")
        if self.header.arrays[name] == _BF16:
            return value.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return (value.float() if value.is_floating_point() else value).numpy()

    def close(self) -> None:
        for array in (*self._arrays.values(), self._keys, self._sums):
            array.close()
        self._captions.close()


def _find_texts(row: dict[str, Any]) -> tuple[str, ...]:
    texts = row.get("captions") or [row.get("caption")]
    return tuple(str(text) for text in texts if text)


def _checksum(row: Iterable[np.ndarray]) -> int:
    """Of the fields of one row, in the order of the header."""
    total = 0
    for value in row:
        total = zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data, total)
    return total


def smallest_integer(vocabulary: int) -> str:
    """The smallest unsigned dtype that holds 0 … vocabulary − 1."""
    return next(name for name in ("uint8", "uint16", "uint32", "uint64") if vocabulary <= np.iinfo(name).max + 1)


def _stored_dtype(name: str, value: Tensor, vocabulary: int | None, precision: str) -> str:
    if name == "tokens":
        return smallest_integer(vocabulary or 0)
    if name == "fps":
        return "float32"
    return _FLOATS[precision] if value.is_floating_point() else str(value.dtype).removeprefix("torch.")


def _id_fault(ids: np.ndarray, vocabulary: int | None) -> str | None:
    low, high = int(ids.min()), int(ids.max())
    return f"ids from {low} to {high} in a vocabulary of {vocabulary}" if low < 0 or high >= (vocabulary or 0) else None
