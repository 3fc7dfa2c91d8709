"""The console that prints tables."""

from __future__ import annotations

import sys
from typing import Any

PIPE_WIDTH = 160  # rich would squeeze tables into 80 columns in a pipe or a log


def open_console() -> Any:
    from rich.console import Console

    # Names of runs and labels of files may hold [brackets], which are no markup.
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False)
