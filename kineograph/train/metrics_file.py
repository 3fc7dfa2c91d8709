"""metrics.jsonl: one JSON object per line, with `stage`, `split`, `step` and numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kineograph.core import distributed
from kineograph.core.errors import RunFailed
from kineograph.core.run_folder import open_nofollow, sync_folder
from kineograph.core.text_file import iterate_lines, parse_json
from kineograph.train.checkpoint import DISK_REMEDY
from kineograph.train.checkpoint_folder import Phase
from kineograph.train.phases import Cursor

Record = dict[str, Any]


class MetricsFile:
    """Every rank may call; rank 0 writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, record: Record) -> None:
        """Append a line: stage, split and step first; non-finite numbers become null."""
        if not distributed.is_first():
            return
        first = {key: record[key] for key in ("stage", "split", "step") if key in record}
        values = {key: _to_json(value) for key, value in (first | record).items()}
        line = json.dumps(values, ensure_ascii=False, allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Reopened each time: `truncate` replaces the file.
            with open(self.path, "ab", opener=open_nofollow) as file:
                file.write((b"" if self._ends_in_newline() else b"\n") + line.encode() + b"\n")
        except OSError as error:
            raise RunFailed(
                f"cannot write {self.path}: {error}; {DISK_REMEDY} and run the same command to go on from the last checkpoint"
            ) from error

    def read(self) -> list[Record]:
        """All complete records."""
        return [record for _, record in self._lines()]

    def truncate(
        self, stage: str, step: int, stages: Collection[str] | None = None, phase: Phase = "train"
    ) -> list[Record]:
        """Drop what lies beyond a checkpoint: later lines of `stage`, stages the run does not have, and torn lines.

        Of `step` itself drop what `phase` and later phases wrote, since they will write it again. Other stages keep
        their lines until their turn comes. → the records of `step` that stay.
        """
        kept: list[Record] = []
        if not distributed.is_first() or not self.path.exists():
            return kept
        cursor = Cursor(step, phase)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            for line, record in self._lines():
                name = record["stage"]
                if cursor.covers(record) if name == stage else stages is None or name in stages:
                    file.write(line)
                    if name == stage and record["step"] == step:
                        kept.append(record)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        sync_folder(self.path.parent)
        return kept

    def _lines(self) -> Iterator[tuple[bytes, Record]]:
        """Complete lines and their records."""
        if not self.path.is_file():  # a pipe would block
            return
        with open(self.path, "rb") as file:
            for line in iterate_lines(file):
                try:
                    record = parse_json(line)
                except ValueError:
                    continue
                if not isinstance(record, dict) or not line.endswith(b"\n"):
                    continue
                if isinstance(record.get("stage"), str) and isinstance(record.get("step"), int):
                    yield line, record

    def _ends_in_newline(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def _to_json(value: Any) -> Any:
    """Turn torch and numpy scalars into numbers, and non-finite numbers into None."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(inner) for inner in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return value if isinstance(value, float) else value.item()
