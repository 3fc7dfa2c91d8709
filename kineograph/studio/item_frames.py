"""Pictures of the items of a dataset: of files, of members of tar shards, of arrays. Without torch."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from PIL import Image

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.tar_reader import DAMAGED, TarDamaged, TarReader, decompress
from kineograph.studio.clips import FRAMES, LIMITS, SIDE, Sheet, arrange_sheet, decode_frames, scale_down
from kineograph.studio.dataset import DatasetItem
from kineograph.studio.run_files import find_file, open_file

if TYPE_CHECKING:
    import numpy as np

UNPACKED = 2**26  # bytes of a compressed shard or array, to show one item


def make_item_sheet(folder: Path, item: DatasetItem) -> Sheet:
    """Raises OutsideRun, or Unreadable with the reason."""
    if item.is_array:
        stored = read_array_item(folder, item, FRAMES)
        frames = [Image.fromarray(frame.squeeze(-1) if frame.shape[-1] == 1 else frame) for frame in stored]
        fps = item.frames / item.seconds if item.seconds else 8.0
        return arrange_sheet(
            [scale_down(frame.convert("RGB"), SIDE) for frame in frames], fps * len(frames) / item.frames
        )
    span = None if item.start is None else (item.start, item.end)
    return arrange_sheet(*decode_frames(read_item(folder, item), item.name, span=span))


def read_item(folder: Path, item: DatasetItem) -> bytes:
    """The encoded picture or clip: a file, or a member of a tar. Raises OutsideRun, or Unreadable with the reason."""
    place = item.place or {"file": item.name, "offset": 0, "size": LIMITS.bytes + 1}
    with open_file(folder, place["file"]) as file:
        if place["offset"] is None:
            return _unpack_member(file, place["member"])
        data = os.pread(file.fileno(), min(place["size"], LIMITS.bytes + 1), place["offset"])
    if len(data) > LIMITS.bytes:
        raise Unreadable(item.name, f"larger than {LIMITS.bytes // 2**20} MiB: not shown here")
    return data


def _unpack_member(file: IO[bytes], name: str) -> bytes:
    """A member of a compressed tar, which is read from its beginning."""
    tar = TarReader(_Unpacked(decompress(file)))
    try:
        for member in tar:
            if member.name.lower() == name.lower():
                return tar.read(member)
    except (TarDamaged, OSError, *DAMAGED) as error:
        raise Unreadable(name, f"its shard is cut off ({error})") from None
    raise Unreadable(name, "it is no longer in its shard: read the files again")


class _Unpacked:
    """Reads what a file decompresses to, up to a limit."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, UNPACKED

    def read(self, count: int) -> bytes:
        data: bytes = self._file.read(count)
        self._left -= len(data)
        if self._left < 0:
            raise Unreadable("", f"behind the first {UNPACKED // 2**20} MiB of a compressed shard: unpack it to see it")
        return data


def read_array_item(folder: Path, item: DatasetItem, most: int = 2**31) -> np.ndarray:
    """The frames of an array's item, of many an even share: T H W C, uint8. Raises OutsideRun, or Unreadable with the reason."""
    from kineograph.data.array_layout import read_frames, to_uint8

    assert item.place is not None
    values = _open_array(find_file(folder, item.file), item.place["array"])
    window = slice(0, None, -(-item.frames // most))
    try:
        frames = read_frames(values, item.place["layout"], item.place["item"], window)
    except (IndexError, ValueError):
        raise Unreadable(item.name, "the array has changed: read the files again") from None
    return to_uint8(frames, item.name)


def _open_array(path: Path, name: str | None) -> np.ndarray:
    from kineograph.data.arrays import Array

    try:
        if name is None:
            return Array.npy(path).values
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(f"{name}.npy")
        if entry.compress_type != zipfile.ZIP_STORED and entry.file_size > UNPACKED:
            limit = f"a compressed array of more than {UNPACKED // 2**20} MiB"
            raise Unreadable(name, f"{limit}: save it with numpy.save to see it")
        return Array.npz(path, name).values
    except (InputError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise Unreadable(path.name, f"the array cannot be read ({error})") from None
