"""The machine's main memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class MainMemory(NamedTuple):
    """Bytes."""

    total: int
    available: int  # to a new process


def main_memory() -> MainMemory:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        return MainMemory(sizes["MemTotal"], sizes["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MainMemory(total, total)
