"""From what a person typed to one config tree: presets, files and overrides, merged left to right.

Within one layer the specific beats the general (`stages.x.train.lr` beats `train.lr`); a later layer beats an earlier
one, so `train.lr=…` on the command line reaches every stage, whatever the preset says for one of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, flatten, load_file, merge, nest, parse_override
from kineograph.core.errors import ConfigError
from kineograph.data.config import DataConfig

PRESETS = Path(__file__).parent.parent / "presets"
SHARED_SECTIONS = ("train", "data")  # sections that stand at the top and again inside a stage


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_file(name: str) -> Path:
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        close = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(preset_names())}"
        raise ConfigError(f"{name!r} is neither a preset nor a file: {hint} (overrides look like train.steps=100)")
    return path


def layer(tree: Tree, over: Tree) -> Tree:
    """Lay `over` onto `tree`."""
    tree = dict(tree)
    tree["stages"] = {name: dict(stage or {}) for name, stage in (tree.get("stages") or {}).items()}
    for section in SHARED_SECTIONS:
        wanted = over.get(section)
        if not isinstance(wanted, dict):
            continue
        if section == "data":
            tree["data"] = _without_strangers(tree.get("data") or {}, wanted)
        for stage in tree["stages"].values():
            if isinstance(stage.get(section), dict):
                inner = _without_strangers(stage[section], wanted) if section == "data" else stage[section]
                stage[section] = _without(inner, wanted)
            if section == "train" and isinstance(stage.get("players"), dict):
                stage["players"] = {name: _without(player or {}, wanted) for name, player in stage["players"].items()}
    for name, stage in (over.get("stages") or {}).items():
        if isinstance(stage, dict) and isinstance(stage.get("data"), dict) and "data" in tree["stages"].get(name, {}):
            tree["stages"][name]["data"] = _without_strangers(tree["stages"][name]["data"], stage["data"])
    return merge(tree, over)


def _without(tree: Tree, over: Tree) -> Tree:
    """`tree` less every leaf that `over` sets."""
    left: Tree = {}
    for key, value in tree.items():
        if key not in over:
            left[key] = value
        elif isinstance(value, dict) and isinstance(over[key], dict):
            left[key] = _without(value, over[key])
    return left


def _without_strangers(data: Tree, over: Tree) -> Tree:
    """When a layer changes `data.source`, the old source's own keys go with it; the shared ones stay."""
    if "source" not in over or over["source"] == data.get("source", DataConfig.model_fields["source"].default):
        return data
    return {key: value for key, value in data.items() if key in DataConfig.model_fields}


def read_layers(path: Path, seen: tuple[Path, ...] = ()) -> Tree:
    """A file and the preset that it extends, as one tree."""
    if path in seen:
        raise ConfigError(f"{path} extends itself: {' → '.join(str(p) for p in (*seen, path))}")
    tree = load_file(path)
    base = tree.get("preset")
    if base is None or (path.parent == PRESETS and base == path.stem):
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: preset={base!r} must be the name of a preset")
    if is_resolved(tree):  # a run's own config.yaml says everything itself; `preset` only tells where it came from
        return tree
    return layer(read_layers(preset_file(base), (*seen, path)), tree)


def is_resolved(tree: Tree) -> bool:
    return tree.get("resolved") is True


def is_override(text: str) -> bool:
    """`key=value`; a path that exists is a file even when it holds a '='."""
    return "=" in text and not Path(text).exists()


def source_of(argument: str) -> Path:
    """The file behind a preset's name or a path."""
    path = Path(argument)
    return path if path.suffix.lower() in (".yaml", ".yml", ".json") or path.is_file() else preset_file(argument)


def read(arguments: Sequence[str], extra: Tree | None = None, base: Tree | None = None) -> Tree:
    """Presets, files and overrides, in the order given (overrides last), then `extra` (dotted keys from Python)."""
    tree: Tree = base or {}
    files = [argument for argument in arguments if not is_override(argument)]
    for argument in files:
        path = source_of(argument)
        loaded = read_layers(path)
        if not loaded.get("name"):
            loaded["name"] = path.stem
        if path.parent == PRESETS:
            loaded["preset"] = path.stem
        tree = layer(tree, loaded)
    settings: list[tuple[str, Any]] = [parse_override(argument) for argument in arguments if is_override(argument)]
    for path_, value in [*settings, *(extra or {}).items()]:
        _check_section(path_, value)
        tree = layer(tree, nest(path_, value))
    return tree


def _check_section(path: str, value: Any) -> None:
    if path in ("train", "data", "stages") and not isinstance(value, dict):
        raise ConfigError(f"{path}={value!r}: {path} is a section; set one of its keys, such as {path}.{'steps' if path == 'train' else 'folder'}=…")


def changed_keys(before: Tree, after: Tree) -> list[str]:
    """Dotted keys whose values differ."""
    one, two = flatten(before), flatten(after)
    return sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
