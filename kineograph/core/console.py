"""The console that prints tables."""

from __future__ import annotations

import sys
from typing import Any

from kineograph.core.text_file import escape_controls

PIPE_WIDTH = 160  # rich would squeeze tables into 80 columns in a pipe or a log


def open_console() -> Any:
    from rich.console import Console
    from rich.text import Text

    class SafeConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(escape_controls(text), **options)

    # Names of runs and labels of files may hold [brackets], which are no markup.
    return SafeConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False)
