"""Rows of .parquet files, within a limit on what they unpack to: a kilobyte may hold gigabytes of one repeated text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError

MAX_BYTES = 2**30  # of the values that are read from one file
_ROWS = 1024  # at a time


def read_rows(path: Path, choose: Callable[[list[str]], Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yield the rows. `choose` gets the columns of the file, and returns those to read."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f"reading {path} needs pyarrow: pip install 'kineograph[parquet]'") from None
    try:
        with open(path, "rb") as file:
            footer = ParquetFile(file).metadata.schema
            texts = [
                footer.column(i).path for i in range(len(footer)) if footer.column(i).physical_type == "BYTE_ARRAY"
            ]
            opened = ParquetFile(file, read_dictionary=texts)  # repeated texts stay in memory once
            columns, size = choose(opened.schema_arrow.names), 0
            for batch in opened.iter_batches(_ROWS, columns=list(columns)):
                size += sum(_unpacked_bytes(column) for column in batch.columns)
                if size > MAX_BYTES:
                    raise InputError(
                        f"{path} unpacks to more than {MAX_BYTES:,} bytes of {', '.join(columns)}: split it into several files"
                    )
                yield from batch.to_pylist()
    except (ArrowException, OSError, ValueError) as error:  # also text that is not UTF-8
        raise InputError(f"{path} is not a readable Parquet file: {' '.join(str(error).split())[:200]}") from None


def _unpacked_bytes(column: Any) -> int:
    """What the values take as separate objects."""
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        if not len(column.dictionary):
            return 0
        lengths = compute.binary_length(column.dictionary)
        return int(compute.sum(compute.take(lengths, column.indices)).as_py() or 0)
    if types.is_list(column.type) or types.is_large_list(column.type):
        return int(column.nbytes) // 2 + _unpacked_bytes(column.flatten())
    if types.is_struct(column.type):
        return sum(map(_unpacked_bytes, column.flatten()))
    return int(column.nbytes)
