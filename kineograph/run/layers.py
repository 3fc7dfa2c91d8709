"""Merge presets, files and overrides, left to right, into one config tree.

Within one layer the specific beats the general (`stages.x.train.lr` beats `train.lr`). A later layer beats an earlier
one, so `train.lr=…` on the command line reaches every stage, whatever the preset sets for one of them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, flatten, merge, nest, parse_override, shorten
from kineograph.core.config_file import load_file
from kineograph.core.errors import ConfigError
from kineograph.core.registry import read_entry_points
from kineograph.core.trust import accept, require_trust

PRESETS = Path(__file__).parent.parent / "presets"
SHARED_SECTIONS = ("train", "data")  # sections at the top that a stage may have too


def preset_folders() -> list[Path]:
    """Ours, those of the path variable KINEO_PRESETS, and packages that entry points of the group kineograph.presets name."""
    own = [Path(folder) for folder in os.environ.get("KINEO_PRESETS", "").split(os.pathsep) if folder]
    packages = [entry.load() for entry in read_entry_points("kineograph.presets")]
    return [PRESETS, *own, *(Path(folder) for package in packages for folder in package.__path__)]


def preset_names() -> list[str]:
    return sorted({path.stem for folder in preset_folders() for path in folder.glob("*.yaml")})


def find_preset(name: str) -> Path:
    for folder in preset_folders():
        if os.path.isfile(folder / f"{name}.yaml"):
            return folder / f"{name}.yaml"
    if os.path.isfile(os.path.join(name, "config.yaml")):
        path = shorten(name)
        raise ConfigError(f"{path} is a run folder: name {path}/config.yaml, or continue it: kineo train --run {path}")
    if os.path.isdir(name):
        path = shorten(name)
        raise ConfigError(
            f"{path} is a folder, neither a preset nor a config: for pictures or clips, give data.source=folder data.folder={path}"
        )
    if "/" in name:
        raise ConfigError(f"{shorten(name)} is neither a file nor a run folder (kineo runs lists the runs)")
    close = difflib.get_close_matches(name, preset_names(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"the presets are {', '.join(preset_names())}"
    raise ConfigError(f"{shorten(name)!r} is neither a preset nor a file: {hint} (overrides look like train.steps=100)")


def read_config(arguments: Sequence[str], extra: Tree | None = None, base: Tree | None = None) -> Tree:
    """Merge presets and files in the order given, then overrides, then `extra` (dotted keys from Python)."""
    tree: Tree = base or {}
    if "=" in arguments:
        at = list(arguments).index("=")
        key, value = "".join(arguments[max(at - 1, 0) : at]), "".join(arguments[at + 1 : at + 2])
        raise ConfigError(f"`=` stands alone: write {shorten(f'{key}={value}')} without spaces")
    for argument in arguments:
        if is_override(argument):
            continue
        path = _find_file(argument)
        over = read_file(path)
        over["name"] = load_file(path).get("name") or path.stem  # not the name of the preset that it extends
        if path.parent in preset_folders():
            over["preset"] = path.stem
        tree = lay_over(tree, over)
    settings: list[tuple[str, Any]] = [parse_override(argument) for argument in arguments if is_override(argument)]
    settings += (extra or {}).items()
    for key, value in _sort_choices_first(settings):
        tree = lay_over(tree, nest(key, value))
    accept(tree)
    return tree


def is_override(text: str) -> bool:
    """`key=value`; an existing path is a file even if it contains '='."""
    return "=" in text and not os.path.exists(text)  # Path.exists raises for a long text


def _find_file(argument: str) -> Path:
    path = Path(argument)
    is_file = path.suffix.lower() in (".yaml", ".yml", ".json") or os.path.isfile(path)
    return path if is_file else find_preset(argument)


def read_file(path: Path, extended_by: tuple[Path, ...] = ()) -> Tree:
    """Read a file laid over the preset that it extends."""
    if path in extended_by:
        raise ConfigError(f"{path} extends itself: {' → '.join(str(p) for p in (*extended_by, path))}")
    tree = load_file(path)
    if tree.get("resolved") is True:  # a run's own config.yaml is complete; `preset` only records its origin
        require_trust(tree, str(path))
        return tree
    base = tree.get("preset")
    if base is None or (path.parent in preset_folders() and base == path.stem):
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: preset={base!r} must be the name of a preset")
    return lay_over(read_file(find_preset(base), (*extended_by, path)), tree)


def _sort_choices_first(settings: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Put a new `source` or `kind` before its sibling keys, which belong to it in whatever order they were typed."""

    def order(item: tuple[int, tuple[str, Any]]) -> tuple[int, int]:
        index, (key, _) = item
        section, _, last = key.rpartition(".")
        if last not in ("source", "kind"):
            return index, 1
        return min(number for number, (other, _) in enumerate(settings) if other.startswith(f"{section}.")), 0

    return [setting for _, setting in sorted(enumerate(settings), key=order)]


def lay_over(tree: Tree, over: Tree) -> Tree:
    """Merge a later layer into a tree; its shared sections reach into every stage."""
    from kineograph.data.open_source import (
        drop_digit_channels,
        drop_other_source_keys,
        source_name,
    )  # with torch: `kineo presets` needs neither

    _check_sections(over)
    over = _choose_length(over) | {
        "stages": {name: _choose_length(stage or {}) for name, stage in (over.get("stages") or {}).items()}
    }
    tree = dict(tree)
    tree["stages"] = {name: dict(stage or {}) for name, stage in (tree.get("stages") or {}).items()}
    old_source = source_name(tree.get("data") or {})
    train, data = over.get("train") or {}, over.get("data") or {}
    if data:
        kept = drop_digit_channels(tree.get("data") or {}, data)
        tree["data"] = drop_other_source_keys(kept, data, old_source)
    for name, stage in tree["stages"].items():
        if stage.get("train"):
            stage["train"] = _remove_keys(stage["train"], train)
        if stage.get("data") and data:
            own = drop_other_source_keys(stage["data"], data, old_source)
            # Keys of a source that the stage names itself stay with it: at the top they would belong to another source.
            overridden = merge(own, {key: value for key, value in data.items() if key in own})
            stage["data"] = overridden if own.get("source") else _remove_keys(own, data)
        stage_over = (over.get("stages") or {}).get(name) or {}
        if stage.get("data") and stage_over.get("data"):
            stage["data"] = drop_other_source_keys(stage["data"], stage_over["data"], old_source)
        if stage.get("players"):
            # A later `train.K` reaches the players too, whatever an earlier layer sets for one of them.
            for reaching in (train, stage_over.get("train") or {}):
                players = {key: _remove_keys(player or {}, reaching) for key, player in stage["players"].items()}
                stage["players"] = players
    return merge(tree, over)


def _choose_length(section: Tree) -> Tree:
    """A layer, or a stage of it, whose train.steps replaces the train.epochs of earlier layers."""
    train = section.get("train") or {}
    return section | {"train": {**train, "epochs": None}} if "steps" in train and "epochs" not in train else section


def _remove_keys(tree: Tree, over: Tree) -> Tree:
    """`tree` without the values that `over` sets."""
    kept: Tree = {}
    for key, value in tree.items():
        if key not in over:
            kept[key] = value
        elif isinstance(value, dict) and isinstance(over[key], dict):
            kept[key] = _remove_keys(value, over[key])
    return kept


def _check_sections(tree: Tree) -> None:
    """Refuse a value in place of a section; the keys inside are checked when the plan is made."""
    sections = {"stages": tree.get("stages"), **{section: tree.get(section) for section in SHARED_SECTIONS}}
    if isinstance(tree.get("stages"), dict):
        for name, stage in tree["stages"].items():
            where = f"stages.{name}"
            sections[where] = stage
            inside = stage if isinstance(stage, dict) else {}
            sections |= {f"{where}.{section}": inside.get(section) for section in (*SHARED_SECTIONS, "players")}
            players = inside.get("players")
            if isinstance(players, dict):
                sections |= {f"{where}.players.{key}": value for key, value in players.items()}
    for where, section in sections.items():
        if section is not None and not isinstance(section, dict):
            raise ConfigError(f"{where}={section!r}: {where} is a section with keys of its own, not a value")


def changed_keys(before: Tree, after: Tree) -> list[str]:
    """Dotted keys whose values differ."""
    one, two = flatten(before), flatten(after)
    return sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
