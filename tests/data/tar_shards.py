"""Small tar shards for the tests that read them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from kineograph.data.open_source import open_source, parse_data_config
from kineograph.data.webdataset import WebDataset


def picture(gray: int, form: str = "PNG", size: tuple[int, int] = (12, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (gray,) * 3).save(buffer, form)
    return buffer.getvalue()


def npy(*values: float) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, np.float32))
    return buffer.getvalue()


def write(path: Path, files: list[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def item(number: int, shard: int = 0, caption: bool = True, **more: bytes) -> list[tuple[str, bytes]]:
    """Item `number` is a flat gray of that value."""
    key = f"{shard:05}{number % 10000:04}"
    files = [(f"{key}.png", picture(number))]
    files += [(f"{key}.txt", f"gray {number}".encode())] if caption else []
    return files + [(f"{key}.{ending.replace('__', '.')}", content) for ending, content in more.items()]


def three_shards(root: Path, sizes: tuple[int, ...] = (5, 1, 4), **more: bytes) -> Path:
    number = 0
    for shard, count in enumerate(sizes):
        files = []
        for row in range(count):
            files += [(name[:5] + f"{row:04}" + name[9:], data) for name, data in item(number, shard, **more)]
            number += 1
        write(root / f"{shard:05}.tar", files)
    return root


def opened(shards: str | Path | list[str], split: str = "train", **keys) -> WebDataset:
    tree = {"source": "webdataset", "shards": shards if isinstance(shards, list) else str(shards), "size": 8}
    return open_source(parse_data_config(tree | {"validation": 0} | keys), split, 0)  # type: ignore[return-value,arg-type]


def read(source: WebDataset, index: int):
    return source.read(index, np.random.default_rng(0))
