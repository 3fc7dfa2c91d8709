"""Which programs a config may name: those that someone typed on this machine.

A config can name code: a Task, Dataset or metric by its dotted path, and a command in `data.shards` (pipe:COMMAND). What
stands on the command line, in a named YAML file or in a Python call is typed here. A run folder and a checkpoint may come
from elsewhere, so theirs runs only if the same text was typed or trusted here before, or with --trust.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kineograph.core.config import flatten
from kineograph.core.errors import InputError
from kineograph.core.registry import is_known

_KINDS = {"task": "task", "source": "source", "metrics": "metric"}  # the last part of a key → what it names
_accepted: set[str] = set()  # digests of code that this process was given by hand
_all_trusted = False


def trust_all() -> None:
    """What --trust does: run what any config names, for the rest of this process."""
    global _all_trusted
    _all_trusted = True


def require_trust(tree: Mapping[str, Any], origin: str) -> None:
    """Refuse a config from elsewhere that names code nobody typed here. `origin` is where it was read."""
    unknown = {key: code for key, code in find_code(tree) if _digest(key, code) not in _accepted}
    if unknown and not _all_trusted:
        remembered = _load_typed_code()
        unknown = {key: code for key, code in unknown.items() if _digest(key, code) not in remembered}
        if unknown:
            lines = "\n".join(f"  {key}: {code}" for key, code in unknown.items())
            raise InputError(
                f"{origin} would run code that was never typed on this machine:\n{lines}\n"
                "add --trust to run it if you trust whoever made it, or set these keys to something else"
            )


def require_trusted_program(what: str) -> None:
    """Refuse a file that is a program."""
    if not _all_trusted:
        raise InputError(f"{what}, a program that can write files: add --trust to run it if you trust whoever made it")


def accept(tree: Mapping[str, Any]) -> None:
    """Let this process run what a config names, also when it is read back from the run folder."""
    _accepted.update(_digest(key, code) for key, code in find_code(tree))


def remember(tree: Mapping[str, Any]) -> None:
    """Let later processes run what a config names. Where the state cannot be written, they need --trust."""
    new = {_digest(key, code) for key, code in find_code(tree)} - _load_typed_code()
    if new:
        with suppress(OSError):
            _state_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(_state_file(), "a", encoding="ascii") as file:
                file.write("".join(f"{digest}\n" for digest in sorted(new)))


def find_code(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and text of everything outside this package that a config would import or execute."""
    for key, value in flatten(tree).items():
        last = key.rpartition(".")[2]
        for text in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(text, str):
                continue
            # Braces can hide the beginning of a command, so it counts wherever it stands.
            is_command = last == "shards" and "pipe:" in text
            if is_command or (last in _KINDS and not is_known(_KINDS[last], text)):
                yield key, text


def _digest(key: str, code: str) -> str:
    """Commands may hold passwords: only their hashes are kept."""
    return hashlib.sha256(f"{key.rpartition('.')[2]} {code}".encode("utf-8", "surrogatepass")).hexdigest()


def _state_file() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(home) / "kineograph" / "typed_code"


def _load_typed_code() -> set[str]:
    try:
        return set(_state_file().read_text(encoding="ascii").split())
    except (OSError, ValueError, RuntimeError):  # no home
        return set()
