"""What the processes of a world do in test_commands.py: the commands, as a person would type them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kineograph.cache import fill
from kineograph.cache.source import Cache
from kineograph.run.cache import cache_run


def commands(*lines: list[str]) -> list[int]:
    """Exit codes of several commands, one after the other, in one group."""
    from kineograph.cli import main
    from kineograph.run.launch import process_group

    codes = []
    with process_group():
        for words in lines:
            print(f"--- {words[0]}")
            try:
                main(words)
                codes.append(0)
            except SystemExit as end:
                codes.append(end.code if isinstance(end.code, int) else 1)
    return codes


def cache(run: str, stop_after: int | None = None) -> int:
    """Encode a run's data; with `stop_after`, as if a signal came when this process has encoded so many items."""
    from kineograph.core.errors import KineoError
    from kineograph.run.launch import process_group

    fill.BATCH = 4
    show = fill.CacheFiller._show_progress

    def stopping(self: fill.CacheFiller) -> None:
        show(self)
        if stop_after is not None and self.encoded >= stop_after:
            self.stop.signal_name = "SIGTERM"

    fill.CacheFiller._show_progress = stopping  # type: ignore[method-assign]
    try:
        with process_group():
            cache_run([run])
    except KineoError as error:  # of this process, or the echo of another's
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def cached_rows(path: Path) -> list[tuple]:
    """All rows of a set, in the order of the data."""
    source = Cache.open(Cache.Config.model_validate({"folder": str(path)}), "train", 0)
    samples = [source.read(index, np.random.default_rng(0)) for index in range(len(source))]
    names = [source.identity(index) for index in range(len(source))]
    return [(name, sample.caption, sample.tokens.tolist()) for name, sample in zip(names, samples, strict=True)]
