"""Files of configs: YAML 1.2 and JSON, from anywhere, as trees of words, numbers and lists of a reasonable size."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from kineograph.core.errors import ConfigError

Tree = dict[str, Any]
_MAX_BYTES = 2**26  # of a file
MAX_DEPTH, _MAX_KEYS = 50, 10_000
_MAX_VALUES = 1_000_000  # aliases can name a few lines billions of times


class _Refused(ValueError):
    """Valid YAML or JSON that no config holds."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: `1e-4` is a number; `on`, `no`, `010`, `1:30` and `2026-11-15` are words."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice: YAML would silently keep the last."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise _Refused(f"the key {key.value} is given twice, again in line {key.start_mark.line + 1}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_KEYS:  # merges of merges
            raise _Refused(f"a mapping has more than {_MAX_KEYS:,} keys")


_OURS = ("float", "bool", "int", "timestamp")
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _OURS]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf)|\.(?:nan|NaN))$"
for _tag, _pattern, _first in (
    ("float", _FLOAT, "-+0123456789."),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("bool", r"^(?:true|True|false|False)$", "tTfF"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


class _Dumper(yaml.SafeDumper):
    """Quotes the word `1e-4`, so that it comes back as one."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML. Raises a yaml.YAMLError, or a ConfigError for what no config holds."""
    return deepcopy(_parse_yaml(text, where))


@functools.lru_cache(maxsize=16)  # a command reads its run's config many times
def _parse_yaml(text: str, where: str) -> Any:
    try:
        tree = yaml.load(text, Loader=_Loader)  # a SafeLoader
        _check_tree(tree)
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply: no config is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # also of numbers and dates that Python cannot hold
        raise ConfigError(f"{where}: {error}") from None
    return tree


def parse_json_tree(text: str) -> Any:
    """Parse JSON from anywhere. Raises a ValueError, also for what no config holds: a key that is given twice, half a character."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> Tree:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _Refused(f"the key {twice} is given twice")
        return tree

    try:
        tree = json.loads(text, object_pairs_hook=refuse_duplicates)
    except RecursionError:
        raise _Refused(f"nested too deeply: no config is nested deeper than {MAX_DEPTH} levels") from None
    _check_tree(tree)
    return tree


def _check_tree(tree: Any) -> None:
    """Raise a ValueError unless this is a tree of words, numbers and lists as a config holds. Never follows an endless alias."""
    count = 0
    pending = [(tree, "", 0)]
    while pending:
        value, key, depth = pending.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise _Refused(f"{key} is nested deeper than {MAX_DEPTH} levels")
        if count > _MAX_VALUES:
            raise _Refused(f"it holds more than {_MAX_VALUES:,} values")
        if isinstance(value, dict):
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise _Refused(f"{name!r} is not the name of a key{f' of {key}' if key else ''}: quote it")
                pending += [(name, f"{key}.{name}".strip("."), depth), (inner, f"{key}.{name}".strip("."), depth + 1)]
        elif isinstance(value, list):
            pending += [(inner, key, depth + 1) for inner in value]
        elif isinstance(value, str):
            if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise _Refused(f"{key}={value!r} holds half a character or a zero byte: give whole Unicode text")
        elif not isinstance(value, int | float | None):
            raise _Refused(f"{key}={value!r} is a {type(value).__name__}: give a word, a number or a list")


def load_file(path: Path) -> Tree:
    """One YAML or JSON file as a tree."""
    is_json = path.suffix.lower() == ".json"  # JSON with tabs or escaped surrogates is not YAML
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _Refused(f"more than {_MAX_BYTES:,} bytes are no config")
        text = data.decode("utf-8-sig")
        tree = parse_json_tree(text) if is_json else read_yaml(text, str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except _Refused as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # also for text that is not UTF-8 or JSON
        raise ConfigError(f"{path} is not readable {'JSON' if is_json else 'YAML'}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not {type(tree).__name__}")
    return tree


def dump_yaml(tree: Mapping[str, Any]) -> str:
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
