"""Weights that many runs use (extractors of metrics, perceptual losses): safetensors in a cache folder, found by name.

`kineo weights get NAME` puts them there. Beside each lies a JSON file that says where it came from and what its hash is.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.run_folder import sync_folder, write_json
from kineograph.core.safe_unpickle import sha256_of


@dataclass(frozen=True)
class Found:
    path: Path
    sha256: str

    @property
    def short(self) -> str:
        return self.sha256[:12]


class NotThere(InputError):
    """Weights that have not been fetched; the message says how."""


def cache_folder() -> Path:
    """$KINEO_CACHE, or kineograph in $XDG_CACHE_HOME, or ~/.cache/kineograph."""
    own = os.environ.get("KINEO_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kineograph"


def place_of(name: str) -> Path:
    return cache_folder() / "weights" / f"{name}.safetensors"


def is_name(value: str | Path) -> bool:
    """Whether this can only be a name: a bare word, and no file."""
    text = str(value)
    return "/" not in text and "." not in text and not Path(text).exists()


def find(name: str) -> Found:
    """Fetched weights, their hash checked against the one noted when they were written."""
    path = place_of(name)
    if not path.is_file():
        raise NotThere(f"the weights {name} are not on this machine: run kineo weights get {name}")
    try:
        noted = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        noted = None
    found = sha256_of(path)
    if found != noted:
        raise InputError(
            f"{path} is damaged: its SHA-256 is {found}, and {noted or 'none'} was noted; run kineo weights get {name} again"
        )
    return Found(path, found)


def store(name: str, tensors: dict[str, Tensor], **told: str) -> Found:
    """Write weights for `find`, whole or not at all. The file's hash depends on nothing but the tensors and their names."""
    from safetensors.torch import save_file

    path = place_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({key: tensors[key].contiguous() for key in sorted(tensors)}, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        sha256 = sha256_of(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    # Until this line the old note does not fit the new file, which `find` reports: get it again.
    write_json(path.with_suffix(".json"), {"sha256": sha256, **told})
    return Found(path, sha256)


def load(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        with unset_fake_temporarily():  # in a stage of tensors without numbers too
            return load_file(path)
    except Exception as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from None
