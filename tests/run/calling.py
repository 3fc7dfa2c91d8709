"""The public command inside a test, and a config file to give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kineograph.cli import main
from kineograph.core.config import merge


def kineo(*words: object) -> int:
    """The exit code of a call of the command line."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def written(folder: Path, tree: dict[str, Any], *changes: dict[str, Any]) -> Path:
    """`tree` with `changes` over it, as a file."""
    for change in changes:
        tree = merge(tree, change)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path
