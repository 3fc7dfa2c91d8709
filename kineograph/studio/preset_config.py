"""A preset with all its defaults, to compare a run's config with. Resolving one imports torch, so it runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from typing import Any

from kineograph.core.config import Tree
from kineograph.core.text_file import parse_json
from kineograph.run.layers import preset_names

SECONDS = 120


@lru_cache(maxsize=64)
def resolve_preset(name: str) -> Tree | None:
    """The complete config of a preset; None if there is none of this name, or it cannot be resolved."""
    if name not in preset_names():
        return None
    # -P: no module of the current folder, which may be a stranger's, is imported.
    command = [sys.executable, "-P", "-m", "kineograph.studio.preset_config", name]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
        tree = parse_json(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def print_preset(name: str) -> None:
    """Print the complete config of a preset as JSON."""
    from kineograph.run.layers import read_config
    from kineograph.run.plan import make_plan

    tree: dict[str, Any] = make_plan(read_config([name])).tree()
    json.dump(tree, sys.stdout)


if __name__ == "__main__":
    print_preset(sys.argv[1])
