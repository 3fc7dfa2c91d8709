"""Finding a Task or a data source by name: by importing its module when it is needed. There is no list to keep."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from typing import Any

from kineograph.core.errors import ConfigError

TASK_PACKAGES = ("kineograph.family", "kineograph.codec", "kineograph.text")
SOURCE_PACKAGES = ("kineograph.data",)
SOURCES_ELSEWHERE = {"cache": "kineograph.cache.source.SOURCE"}
METRIC_PACKAGES = ("kineograph.evaluate.metric",)


def find_task(name: str, key: str = "task") -> Any:
    """`muse`, `muse.critic` (modules of ours that hold TASK), or `my.module.Class`."""
    return _find(name, key, TASK_PACKAGES, "TASK")


def find_source(name: str, key: str = "data.source") -> Any:
    """`folder`, `moving_digits` (modules of ours that hold SOURCE), or `my.module.Class`."""
    return _find(name.replace("-", "_"), key, SOURCE_PACKAGES, "SOURCE", SOURCES_ELSEWHERE)


def find_metric(name: str, key: str = "metrics") -> Any:
    """`caption_accuracy`, `loss` (modules of ours that hold METRIC), or `my.module.Class`."""
    return _find(name.replace("-", "_"), key, METRIC_PACKAGES, "METRIC")


def metric_names() -> list[str]:
    """All metrics of ours."""
    return _names(METRIC_PACKAGES, "METRIC")


def _find(name: str, key: str, packages: tuple[str, ...], attribute: str, elsewhere: Mapping[str, str] = {}) -> Any:
    for package in packages:
        found = _module(f"{package}.{name}")
        if found is not None and hasattr(found, attribute):
            return getattr(found, attribute)
    module_name, _, class_name = elsewhere.get(name, name).replace(":", ".").rpartition(".")
    if module_name:
        module = _module(module_name)
        if module is not None and hasattr(module, class_name):
            return getattr(module, class_name)
    known = [*_names(packages, attribute), *elsewhere]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    raise ConfigError(f"{key}={name} is not known: {hint} (or give the dotted path to a class of yours)")


def _module(path: str) -> Any:
    try:
        if importlib.util.find_spec(path) is None:
            return None
    except (ImportError, ValueError):  # a parent of the path does not exist, or it is no module's name at all
        return None
    try:
        return importlib.import_module(path)
    except Exception as error:
        if path.startswith("kineograph."):
            raise
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


def _names(packages: tuple[str, ...], attribute: str) -> list[str]:
    names = []
    for package in packages:
        module = importlib.import_module(package)
        for info in pkgutil.walk_packages(module.__path__, f"{package}."):
            spec = importlib.util.find_spec(info.name)
            source = spec.loader.get_source(info.name) if spec and spec.loader else ""  # type: ignore[attr-defined]
            if source and f"\n{attribute} = " in source:
                names.append(info.name.removeprefix(f"{package}."))
    return names
