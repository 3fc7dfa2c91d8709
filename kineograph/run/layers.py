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
from kineograph.data.source import drop_other_source_keys, source_name

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
    _check_sections(over)
    tree = dict(tree)
    tree["stages"] = {name: dict(stage or {}) for name, stage in (tree.get("stages") or {}).items()}
    before = source_name(tree.get("data") or {})
    for section in SHARED_SECTIONS:
        wanted = over.get(section)
        if not wanted:
            continue
        if section == "data":
            tree["data"] = drop_other_source_keys(tree.get("data") or {}, wanted, before)
        for stage in tree["stages"].values():
            if stage.get(section):
                inner = drop_other_source_keys(stage[section], wanted, before) if section == "data" else stage[section]
                # What a stage has of a source that it names itself stays there: at the top it would be a stranger's.
                own_source = section == "data" and inner.get("source")
                stage[section] = _replaced(inner, wanted) if own_source else _without(inner, wanted)
            if section == "train":
                _free_players(stage, wanted)
    for name, wanted in (over.get("stages") or {}).items():
        stage = tree["stages"].get(name)
        if stage and wanted:
            if stage.get("data") and wanted.get("data"):
                stage["data"] = drop_other_source_keys(stage["data"], wanted["data"], before)
            _free_players(stage, wanted.get("train") or {})
    return merge(tree, over)


def _free_players(stage: Tree, train: Tree) -> None:
    """A later `train.K` reaches the players of a stage, whatever an earlier layer says for one of them."""
    if stage.get("players"):
        stage["players"] = {name: _without(player or {}, train) for name, player in stage["players"].items()}


def _without(tree: Tree, over: Tree) -> Tree:
    """`tree` less every leaf that `over` sets."""
    left: Tree = {}
    for key, value in tree.items():
        if key not in over:
            left[key] = value
        elif isinstance(value, dict) and isinstance(over[key], dict):
            left[key] = _without(value, over[key])
    return left


def _replaced(tree: Tree, over: Tree) -> Tree:
    """`tree` with the value that `over` has for each of its leaves."""
    return merge(tree, {key: value for key, value in over.items() if key in tree})


def _check_sections(tree: Tree) -> None:
    """Sections are mappings; what stands inside them is checked when the plan is made."""
    _check_section("stages", tree.get("stages"))
    places = [(section, tree.get(section)) for section in SHARED_SECTIONS]
    for name, stage in (tree.get("stages") or {}).items():
        where = f"stages.{name}"
        _check_section(where, stage)
        places += [(f"{where}.{section}", (stage or {}).get(section)) for section in (*SHARED_SECTIONS, "players")]
        players = (stage or {}).get("players")
        if isinstance(players, dict):
            places += [(f"{where}.players.{player}", value) for player, value in players.items()]
    for where, section in places:
        _check_section(where, section)


def _check_section(where: str, section: Any) -> None:
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{where}={section!r}: {where} is a section with keys of its own, not a value")


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
        loaded["name"] = load_file(path).get("name") or path.stem  # not that of the preset it extends
        if path.parent == PRESETS:
            loaded["preset"] = path.stem
        tree = layer(tree, loaded)
    settings: list[tuple[str, Any]] = [parse_override(argument) for argument in arguments if is_override(argument)]
    settings += (extra or {}).items()
    for path_, value in _choices_first(settings):
        tree = layer(tree, nest(path_, value))
    return tree


def _choices_first(settings: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """A new `source` or `kind` goes before its siblings, so that they are not taken for the old one's, in whatever order they
    were typed; everything else stays left to right."""

    def place(item: tuple[int, tuple[str, Any]]) -> tuple[int, int]:
        index, (path, _) = item
        section, _, last = path.rpartition(".")
        if last not in ("source", "kind"):
            return index, 1
        return min(number for number, (other, _) in enumerate(settings) if other.startswith(f"{section}.")), 0

    return [setting for _, setting in sorted(enumerate(settings), key=place)]


def changed_keys(before: Tree, after: Tree) -> list[str]:
    """Dotted keys whose values differ."""
    one, two = flatten(before), flatten(after)
    return sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
