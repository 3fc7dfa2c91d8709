"""Finds a Task, a data source or a metric by name, by importing its module when it is needed. There is no list to keep."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from importlib.abc import InspectLoader
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from kineograph.core.errors import ConfigError

TASK_PACKAGES = ("kineograph.family", "kineograph.codec", "kineograph.text")
SOURCE_PACKAGES = ("kineograph.data",)
TASK_ENTRY_POINTS = "kineograph.tasks"
METRIC_PACKAGES = ("kineograph.evaluate.metric",)
_KINDS = {
    "task": (TASK_PACKAGES, "TASK"),
    "source": (SOURCE_PACKAGES, "SOURCE"),
    "metric": (METRIC_PACKAGES, "METRIC"),
}
SOURCES_ELSEWHERE = {"cache": "kineograph.cache.source"}


def find_task(name: str, key: str = "task") -> Any:
    """`muse` or `muse.critic` of this package, an entry point of the group kineograph.tasks, or a dotted path of yours.

    A dotted path names a class (`my.module.Class`) or a module that holds TASK (`my.module`).
    """
    from kineograph.core.task import Task

    found = _find(name, key, TASK_PACKAGES, "TASK", entry_point_group=TASK_ENTRY_POINTS)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(
            f"{key}={name} is {found!r}: give the dotted path of a class that extends kineograph.core.task.Task"
        )
    return found


def find_source(name: str, key: str = "data.source") -> Any:
    """`folder` or `moving_digits` of this package, or a dotted path to a class, or to a module that holds SOURCE."""
    from torch.utils.data import Dataset

    from kineograph.core.protocols import Source

    if not isinstance(name, str):
        raise ConfigError(f"{key}={name!r} is not the name of a source")
    name = name.replace("-", "_")
    found = _find(SOURCES_ELSEWHERE.get(name, name), key, SOURCE_PACKAGES, "SOURCE")
    if isinstance(found, Dataset) or (isinstance(found, type) and issubclass(found, Source | Dataset)):
        return found
    raise ConfigError(f"{key}={name} is {found!r}: give the dotted path of a torch.utils.data.Dataset class")


def find_metric(name: str, key: str = "metrics") -> Any:
    """`caption_accuracy` or `loss` of this package, or a dotted path to a class, or to a module that holds METRIC."""
    return _find(name.replace("-", "_"), key, METRIC_PACKAGES, "METRIC")


def is_known(kind: str, name: str) -> bool:
    """Whether this package or an installed entry point has the task, source or metric `name`. Imports nothing else."""
    packages, attribute = _KINDS[kind]
    path = name.replace("-", "_").replace(":", ".")
    if path.startswith("kineograph.") or (kind == "source" and path in SOURCES_ELSEWHERE):
        return True
    if kind == "task" and read_entry_points(TASK_ENTRY_POINTS).select(name=name):
        return True
    # A module without the attribute is not found: `find_task` would go on to a module of that name elsewhere.
    return any(attribute in _import_names(f"{package}.{path}", name) for package in packages)


def source_names() -> list[str]:
    """All sources of this package."""
    return [*_list_names(SOURCE_PACKAGES, "SOURCE"), *SOURCES_ELSEWHERE]


def read_entry_points(group: str) -> EntryPoints:
    """The entry points of a group. They are read once, since that takes tens of milliseconds: a file per package."""
    return _read_entry_points(group, tuple(sys.path))


@functools.cache
def _read_entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=group)


def metric_names() -> list[str]:
    """All metrics of this package."""
    return _list_names(METRIC_PACKAGES, "METRIC")


def _find(name: str, key: str, packages: tuple[str, ...], attribute: str, entry_point_group: str | None = None) -> Any:
    path = name.replace(":", ".")
    for package in packages:
        names = _import_names(f"{package}.{path}", f"{key}={name}")
        if attribute in names:
            return names[attribute]
    for entry in read_entry_points(entry_point_group).select(name=name) if entry_point_group else ():
        target = entry.load()
        return vars(target)[attribute] if inspect.ismodule(target) else target
    parent, _, class_name = path.rpartition(".")
    for module, wanted in ((path, attribute), (parent, class_name)):
        names = _import_names(module, f"{key}={name}")
        if wanted in names:
            return names[wanted]
    known = source_names() if attribute == "SOURCE" else _list_names(packages, attribute)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    reason = _explain_path(path, attribute)
    raise ConfigError(f"{key}={name} is not known: {hint} (or the dotted path to a class or module of yours{reason})")


def _explain_path(path: str, attribute: str) -> str:
    """Why a dotted path, or the name of a module of the user, leads nowhere."""
    parts = path.split(".")
    depth = next((n for n in range(len(parts), 0, -1) if _has_module(".".join(parts[:n]))), 0)
    found = ".".join(parts[:depth])
    if depth == len(parts):
        return f"; the module {found} sets no {attribute}"
    if depth == 0 and len(parts) == 1:
        return ""
    if depth == 0:
        return f"; Python finds no module {parts[0]}: install it, or add the folder that holds it to PYTHONPATH"
    return f"; the module {found} has no {parts[depth]}"


def _has_module(path: str) -> bool:
    try:
        return bool(path) and importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):  # a parent of the path does not exist, or it is no name of a module
        return False


def _import_names(path: str, key: str) -> dict[str, Any]:
    """The names in a module; none where there is no such module."""
    if not _has_module(path):
        return {}
    try:
        return vars(importlib.import_module(path))
    except Exception as error:
        if path.startswith("kineograph."):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({frame.filename}, line {frame.lineno})"
        raise ConfigError(
            f"{key}: {path} cannot be imported: {type(error).__name__}: {error}{where}; repair the module, or install what it needs"
        ) from error


def _list_names(packages: tuple[str, ...], attribute: str) -> list[str]:
    """Modules of the packages that assign `attribute`, found without importing them."""
    names = []
    for package in packages:
        module = importlib.import_module(package)
        for info in pkgutil.walk_packages(module.__path__, f"{package}."):
            spec = importlib.util.find_spec(info.name)
            loader = spec.loader if spec is not None else None
            source = loader.get_source(info.name) if isinstance(loader, InspectLoader) else None
            if source and f"\n{attribute} = " in source:
                names.append(info.name.removeprefix(f"{package}."))
    return names
