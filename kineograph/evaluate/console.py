"""Where tables are printed: as wide as the terminal, and never squeezed into 80 columns in a pipe or a log."""

from __future__ import annotations

import sys
from typing import Any

WIDE = 160


def open_console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE)
