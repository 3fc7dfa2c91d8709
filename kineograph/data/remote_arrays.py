""".npy files of a folder at a URL (s3://, gs://, https:// …), through fsspec: headers are read at once, a file is downloaded when it is first used."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kineograph.core.errors import InputError
from kineograph.core.remote_files import await_answer, describe_failure, download, open_filesystem
from kineograph.data.arrays import load_npy, read_npy_header

_READERS = 16  # requests at a time for headers
T = TypeVar("T")


def cache_folder() -> Path:
    """Where downloaded files are kept, for later runs too."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kineograph" / "embeddings"


class RemoteFolder:
    """The files of a folder at a URL."""

    def __init__(self, url: str, key: str, suffix: str = ".npy") -> None:
        self.url, self.key = url, key
        self._fs, root = self._ask(lambda: open_filesystem(url))
        rows = self._ask(lambda: await_answer(lambda: self._fs.ls(root, detail=True)))
        self.files: dict[str, dict[str, Any]] = {}
        for row in rows:
            name = str(row["name"]).rstrip("/").rpartition("/")[2]
            if name.endswith(suffix):
                self.files[name] = row
        if not self.files:
            raise InputError(f"{key}={url} holds no {suffix} files: name their folder")

    def open_arrays(self, names: list[str]) -> list[RemoteArray]:
        """Read the headers of these files, several at a time."""
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(lambda name: RemoteArray(self, name), names))

    def read_header(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        def read() -> tuple[tuple[int, ...], np.dtype]:
            with self._fs.open(self.files[name]["name"], "rb") as file:
                shape, _, dtype = read_npy_header(file)
            return shape, dtype

        return self._ask(lambda: await_answer(read), name)

    def stamp(self, name: str) -> str:
        """Changes when the file does."""
        row = self.files[name]
        times = [str(row[field]) for field in ("ETag", "etag", "mtime", "LastModified", "updated") if field in row]
        return "\0".join([self.url, name, str(row.get("size")), *times])

    def fetch(self, name: str) -> Path:
        """Download a file, unless it was downloaded before. Several processes and threads may do so at once."""
        digest = hashlib.sha256(self.stamp(name).encode()).hexdigest()[:16]
        target = cache_folder() / f"{digest}-{name}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.part")
            try:
                self._ask(lambda: download(self._fs, self.files[name]["name"], str(part)), name)
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)
        return target

    def _ask(self, action: Callable[[], T], name: str = "") -> T:
        try:
            return action()
        except InputError:
            raise
        except Exception as error:  # each filesystem has its own errors
            where = f"{self.url.rstrip('/')}/{name}" if name else self.url
            raise InputError(f"{self.key}: {describe_failure(where, error)}") from None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fs, _ = open_filesystem(self.url)


class RemoteArray:
    """Stands for an Array whose file lies elsewhere; `values` downloads it."""

    def __init__(self, folder: RemoteFolder, name: str) -> None:
        self.folder, self.path = folder, Path(name)
        self.shape, self.dtype = folder.read_header(name)
        self._values: np.ndarray | None = None

    @property
    def values(self) -> np.ndarray:
        if self._values is None:
            try:
                self._values = load_npy(self.folder.fetch(self.path.name))
            except (OSError, ValueError) as error:
                raise InputError(f"{self.folder.url}/{self.path.name} is not a readable .npy array: {error}") from None
        return self._values

    def stamp(self) -> str:
        return self.folder.stamp(self.path.name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_values": None}  # a pickled memory map would hold the whole file
