"""A disk that fills up while a cache is written is an error with a remedy, and what was written stays."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from kineograph.cache.pack import Pack, PackWriter
from kineograph.data.arrays import Array, ArrayWriter
from tests.small_disk import on_small_disk

_FILL = """
import numpy as np
from pathlib import Path
from kineograph.data.arrays import ArrayWriter
writer = ArrayWriter(Path({folder!r}) / "a.npy", "uint8", (64, 1 << 20))
try:
    for row in range(64):
        writer.write(row, np.full((1, 1 << 20), row, np.uint8))
except OSError as error:
    print(error.errno, row)
"""


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path):
    result = on_small_disk(tmp_path, "8m", _FILL.format(folder=str(tmp_path)))
    assert result.returncode == 0, result
    number, row = map(int, result.stdout.split())
    assert number == errno.ENOSPC
    assert 5 <= row <= 8


def test_rows_are_read_back_as_numpy_reads_them(tmp_path):
    values = np.arange(4 * 6, dtype=np.uint16).reshape(4, 2, 3)
    writer = ArrayWriter(tmp_path / "a.npy", "uint16", (6, 2, 3))
    writer.write(2, values[2:])
    writer.write(0, values[:2])
    writer.close()
    assert np.array_equal(np.load(tmp_path / "a.npy")[:4], values)
    assert Array.npy(tmp_path / "a.npy").shape == (6, 2, 3)


def test_a_batch_that_does_not_fit_is_not_counted(tmp_path, monkeypatch):
    fields = {"tokens": torch.zeros(2, 1, 2, 2, dtype=torch.int64)}
    writer = PackWriter(tmp_path, 6, fields, vocabulary=4)
    writer.append(fields, [b"a" * 16, b"b" * 16], ["a", "b"])

    def refuse(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArrayWriter, "sync", refuse)
    with pytest.raises(OSError, match="No space"):
        writer.append(fields, [b"c" * 16, b"d" * 16], ["c", "d"])
    assert Pack.open(tmp_path).header.done == 2
