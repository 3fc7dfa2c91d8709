"""What the processes of a world do in test_commands.py: the commands, as a person would type them."""

from __future__ import annotations

import sys
from pathlib import Path

from kineograph.run import cache_filling, token_cache


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


def cache(run: str, items_a_shard: int, stop_after: int | None = None) -> int:
    """Encode a run's data; with `stop_after`, as if a signal came when this process has encoded so many items."""
    from kineograph.core.errors import KineoError
    from kineograph.run.launch import process_group

    cache_filling.MOST = items_a_shard
    cache_filling.BATCH = 4
    checked = cache_filling.Filling._check_room

    def stopping(self: cache_filling.Filling, *arguments: object) -> None:
        checked(self, *arguments)  # type: ignore[arg-type]
        if stop_after is not None and self.made + 4 >= stop_after:
            self.stop.signal_name = "SIGTERM"

    cache_filling.Filling._check_room = stopping  # type: ignore[method-assign]
    try:
        with process_group():
            token_cache.cache_run([run])
    except KineoError as error:  # of this process, or the echo of another's
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def cached_by(run: Path) -> dict[str, bytes]:
    """Every file of a run's caches, but locks."""
    found = sorted(path for path in run.glob("*/cache/**/*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(run)): path.read_bytes() for path in found}
