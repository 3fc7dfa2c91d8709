"""A benchmark case: its name, its sizes, and how to build our side and the peer's."""

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
class Workload:
    """A call to time: one optimizer step, one sampling call or some batches of data."""

    call: Callable[[], object]
    samples: int  # per call
    parameters: int | None = None
    flops: float | None = None  # per call
    precision: str = ""
    notes: list[str] = field(default_factory=list)
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Peer:
    """A public implementation to compare a case with."""

    package: str
    version: str
    module: str
    build: Callable[[Sizes, torch.device], Workload]
    needs: tuple[str, ...] = ("torchvision",)
    precisions: tuple[str, ...] = ("fp32", "bf16")
    """All are timed; the fastest is compared with ours."""

    def check(self) -> None:
        """Raise an error that names the packages to install, before anything is timed."""
        missing = [name for name in (self.module, *self.needs) if importlib.util.find_spec(name) is None]
        if missing:
            packages = [f"{self.package}=={self.version}", *self.needs]
            raise InputError(
                f"--peer needs {', '.join(missing)}, which cannot be imported: "
                f"pip install {' '.join(packages)}, or run without --peer to time only our side"
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
    """Changes of `--small`, so that the case runs on a CPU in seconds."""
    ours: Callable[[Sizes, torch.device], Workload]
    peer: Peer | None = None
    warmup: int = 5
    repeat: int = 20

    def resolve_sizes(self, small: bool) -> dict[str, Any]:
        return {**self.sizes, **(self.small if small else {})}


def load_cases() -> dict[str, Case]:
    """All cases of the modules in benchmarks/cases, by name."""
    package = importlib.import_module("benchmarks.cases")
    cases: dict[str, Case] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        for case in importlib.import_module(f"benchmarks.cases.{info.name}").CASES:
            cases[case.name] = case
    return cases


def find_cases(names: list[str]) -> list[Case]:
    """The named cases, or all of them."""
    known = load_cases()
    for name in names:
        if name not in known:
            raise InputError(unknown_key(name, list(known)).replace("unknown key", "unknown case"))
    return [known[name] for name in names] if names else list(known.values())
