"""Processes that work for the page in the background, and end with it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()


@contextmanager
def run_worker(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output is read; it has ended when the block ends."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        with _lock:
            _running.add(process)
        try:
            yield process
        finally:
            with _lock:
                _running.discard(process)


def stop_workers() -> None:
    """End what still works."""
    with _lock:
        for process in _running:
            process.kill()
