"""What a benchmark is: a name, its sizes, and how to build our side and the peer's. Everything that differs lives in one `Case`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kineograph.core.config import unknown_key
from kineograph.core.errors import InputError

Sizes = Mapping[str, Any]


@dataclass
class Work:
    """Something ready to be timed: one call is one optimizer step, one sampling call or one pass over some data."""

    call: Callable[[], object]
    samples: int  # a call
    parameters: int | None = None
    flops: float | None = None  # a call
    precision: str = ""
    notes: list[str] = field(default_factory=list)
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Peer:
    """The public implementation that a case is compared with."""

    package: str
    version: str
    module: str
    build: Callable[[Sizes, torch.device], Work]
    needs: tuple[str, ...] = ("torchvision",)
    precisions: tuple[str, ...] = ("fp32", "bf16")
    """Each is tried; the fastest that runs is compared with."""

    def check(self) -> None:
        """Say what to install, before anything is spent."""
        missing = [name for name in (self.module, *self.needs) if importlib.util.find_spec(name) is None]
        if missing:
            wanted = [f"{self.package}=={self.version}", *self.needs]
            raise InputError(
                f"--peer needs {', '.join(missing)}, which cannot be imported here: "
                f"pip install {' '.join(wanted)}, or leave --peer out to time our side alone"
            )

    def installed_version(self) -> str:
        return importlib.metadata.version(self.package)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    about: str
    sizes: Sizes
    small: Sizes
    """What `--small` changes, so that the case runs on a CPU in seconds."""
    ours: Callable[[Sizes, torch.device], Work]
    peer: Peer | None = None
    warmup: int = 5
    repeat: int = 20

    def sized(self, small: bool) -> dict[str, Any]:
        return {**self.sizes, **(self.small if small else {})}


def all_cases() -> dict[str, Case]:
    """Every case of every module in benchmarks/cases, by name."""
    package = importlib.import_module("benchmarks.cases")
    found: dict[str, Case] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        for case in importlib.import_module(f"benchmarks.cases.{info.name}").CASES:
            found[case.name] = case
    return found


def find_cases(names: list[str]) -> list[Case]:
    """The named cases, or all of them."""
    known = all_cases()
    for name in names:
        if name not in known:
            raise InputError(unknown_key(name, list(known)).replace("unknown key", "unknown case"))
    return [known[name] for name in names] if names else list(known.values())
