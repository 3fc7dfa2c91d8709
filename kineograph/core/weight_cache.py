"""Weights that many runs share (metric extractors, perceptual losses): safetensors in a cache folder, by name.

`kineo weights get NAME` puts them there. A JSON file beside each records its source and hash.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.run_folder import sync_folder, write_json
from kineograph.core.safe_unpickle import sha256_of
from kineograph.core.text_file import parse_json


@dataclass(frozen=True)
class StoredWeights:
    path: Path
    sha256: str

    @property
    def short(self) -> str:
        return self.sha256[:12]


class WeightsNotFetched(InputError):
    """Weights are not in the cache; the message names the command that fetches them."""


def cache_folder() -> Path:
    """$KINEO_CACHE, or kineograph in $XDG_CACHE_HOME, or ~/.cache/kineograph."""
    own = os.environ.get("KINEO_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kineograph"


def path_of(name: str) -> Path:
    return cache_folder() / "weights" / f"{name}.safetensors"


def is_name(value: str | Path) -> bool:
    """Whether a value is the name of weights and not a file."""
    text = str(value)
    return "/" not in text and "." not in text and not Path(text).exists()


def find(name: str) -> StoredWeights:
    """Weights in the cache, with their hash checked against the recorded one."""
    path = path_of(name)
    if not path.is_file():
        raise WeightsNotFetched(f"the weights {name} are not on this machine: run kineo weights get {name}")
    try:
        recorded = parse_json(path.with_suffix(".json").read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        recorded = None
    actual = sha256_of(path)
    if actual != recorded:
        raise InputError(
            f"{path} is damaged: its SHA-256 is {actual}, not {recorded or 'recorded'}; run kineo weights get {name} again"
        )
    return StoredWeights(path, actual)


def store(name: str, tensors: dict[str, Tensor], **record: str) -> StoredWeights:
    """Write weights for `find`, whole or not at all, with `record` in the JSON file. The hash depends on tensors and names only."""
    from safetensors.torch import save_file

    path = path_of(name)
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
    # Killed before this line, `find` reports a damaged file: the old record does not fit it.
    write_json(path.with_suffix(".json"), {"sha256": sha256, **record})
    return StoredWeights(path, sha256)


def load(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        with unset_fake_temporarily():  # fake tensors have no data to compare or copy
            return load_file(path)
    except Exception as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from None
