"""What a person sees while a cache is made."""

from __future__ import annotations

import sys

from kineograph.core import distributed


class EncodingProgress:
    """A line that is written over on a terminal, one in ten per cent elsewhere."""

    def __init__(self, stage: str, count: int) -> None:
        self.stage, self.count, self.told = stage, count, -1

    def show(self, done: int) -> None:
        if not distributed.is_first():
            return
        percent = 100 * done // self.count
        terminal = sys.stderr.isatty()
        if percent == self.told or (not terminal and percent // 10 == self.told // 10):
            return
        self.told = percent
        end = "\r" if terminal and done < self.count else "\n"
        print(f"{self.stage}  encoding {done}/{self.count} ({percent} %)", end=end, file=sys.stderr, flush=True)
