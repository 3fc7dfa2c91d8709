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
    """Of the machine, or of the container or job that this process is limited to."""
    machine = _read_machine()
    limit, used = _read_cgroup()
    if limit is None:
        return machine
    return MainMemory(min(machine.total, limit), max(0, min(machine.available, limit - used)))


def _read_cgroup(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int | None, int]:
    """The tightest limit of memory of this process's control groups (version 2), and what is used of it. None: no limit."""
    try:
        group = own.read_text(encoding="utf-8").strip().rpartition("::")[2].lstrip("/")
    except OSError:  # not Linux
        return None, 0
    best: tuple[int | None, int] = (None, 0)
    for folder in (root / group, *(root / group).parents):
        if not folder.is_relative_to(root):
            break
        try:
            limit = int((folder / "memory.max").read_text(encoding="ascii"))  # "max": none
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            used = int((folder / "memory.current").read_text(encoding="ascii")) - int(stat.get("inactive_file", 0))
        except (OSError, ValueError):
            continue
        if best[0] is None or limit - used < best[0] - best[1]:
            best = limit, max(0, used)
    return best


def _read_machine() -> MainMemory:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        return MainMemory(sizes["MemTotal"], sizes["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MainMemory(total, total)
