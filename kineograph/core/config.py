"""Typed, strict config: a base class, layers that merge, dotted overrides, and errors that name the right key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from kineograph.core.errors import ConfigError

Tree = dict[str, Any]
C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """Base of every config class: unknown keys are errors, defaults are checked too."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, protected_namespaces=())


class StageConfig(Config):
    """Keys that every stage has. A Task's own `Config` adds its own beside them."""

    references: ClassVar[tuple[str, ...]] = ()
    """Which of the keys name another stage (`codec`)."""
    task: str
    """Which Task trains here: a module of family, codec or text (`muse`), or a dotted path to a class of yours."""
    skip: bool = False
    """Leave this stage out of training (and unloaded)."""
    init: str | None = None
    """Warm start: another stage, `runs/x/stage`, or a safetensors file, whose weights are copied where names and shapes fit."""


# Parsing ---------------------------------------------------------------------------------------------------------


def parse(cls: type[C], tree: Mapping[str, Any], where: str = "") -> C:
    """Build a config class from a mapping, or raise a ConfigError that names the key, the value and the closest right key."""
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(cls, problem, where) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _explain(cls: type[Config], problem: Any, where: str) -> str:
    path = [str(part) for part in problem["loc"]]
    key = ".".join([where, *path] if where else path)
    if problem["type"] == "extra_forbidden":
        return unknown_key(key, known_keys(cls, path[:-1]))
    if problem["type"] == "missing":
        return f"{key} is required and not set"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key}={problem['input']!r}: {message[0].lower()}{message[1:]}"


def unknown_key(key: str, known: list[str]) -> str:
    """The message for a key that nothing reads."""
    parent, _, last = key.rpartition(".")
    close = difflib.get_close_matches(last, known, n=1, cutoff=0.5)
    hint = f"did you mean {parent + '.' if parent else ''}{close[0]}?" if close else f"known here: {', '.join(sorted(known)) or 'none'}"
    return f"unknown key {key}: {hint}"


def known_keys(cls: type[BaseModel], path: list[str]) -> list[str]:
    """Field names at a path inside a config class."""
    for part in path:
        field = cls.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return []
        cls = inner
    return list(cls.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found:
            return found
    return None


# Layers ----------------------------------------------------------------------------------------------------------


def merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """A new tree: mappings join key by key, anything else in `over` replaces."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merge(result[key], value)
        else:
            result[key] = deepcopy(dict(value) if isinstance(value, Mapping) else value)
    return result


def nest(path: str, value: Any) -> Tree:
    """`a.b.c`, v → {a: {b: {c: v}}}"""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """{a: {b: v}} → {'a.b': v}; empty mappings and lists are values."""
    flat: Tree = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def parse_override(text: str) -> tuple[str, Any]:
    """`train.steps=100` → ('train.steps', 100). The value is YAML, so lists and null work too."""
    path, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", path):
        raise ConfigError(f"{text!r} is neither a preset, a file nor an override: overrides look like train.steps=100")
    try:
        return path, read_yaml(value, path)
    except yaml.YAMLError:
        return path, value


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-4` is a number, `on` and `no` are words."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf)|\.(?:nan|NaN))$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))


def read_yaml(text: str, where: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506: a SafeLoader


def load_file(path: Path) -> Tree:
    """One YAML or JSON file as a tree (JSON is YAML)."""
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not {type(tree).__name__}")
    return tree


def dump_yaml(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=120)
