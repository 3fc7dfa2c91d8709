"""Runs Python with a small tmpfs mounted on a folder, where the system lets a test do so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def on_small_disk(folder: str | Path, size: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a mount namespace of its own; skips the test where that needs rights that it does not have."""
    mount = f"mount -t tmpfs -o size={size} tmpfs '{folder}'"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
