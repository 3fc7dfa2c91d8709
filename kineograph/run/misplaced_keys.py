"""Keys that stand in the wrong section (`steps=100`, `generator.depth=6`): find the section that has them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from kineograph.core.config import Tree
from kineograph.core.registry import find_source, find_task, source_names
from kineograph.data.open_source import source_name
from kineograph.train.config import TrainConfig


def explain_misplaced_key(key: str, tree: Tree) -> str | None:
    """The error for an unknown key that exists elsewhere in the config; None if nothing there has its name."""
    *path, last = key.split(".")
    stages = tree.get("stages") or {}
    if not path and last in stages:
        inside = next(iter(tree[last]), "") if isinstance(tree[last], dict) else ""
        return f"unknown key {key}: did you mean stages.{last}{'.' * bool(inside)}{inside}?"
    in_stage = path[:1] == ["stages"] and len(path) > 1
    names = [path[1]] if in_stage else list(stages)
    places = [] if in_stage else [f"train.{last}"] * (last in TrainConfig.model_fields)
    if not places:
        places = [f"stages.{name}.{place}" for name in names for place in _find_in_stage(stages[name], last)]
    if path == ["train"] and last == "prompts":
        return f"unknown key {key}: did you mean prompts? It stands beside train, not in it"
    if places:
        one_stage = f" (or stages.STAGE.{places[0]}, for one stage)" if places[0].startswith("train.") else ""
        return f"unknown key {key}: did you mean {' or '.join(places)}{one_stage}?"
    return _explain_source_key(key, tree)


def _find_in_stage(stage: Tree, last: str) -> Iterator[str]:
    if not isinstance(stage, dict) or not isinstance(stage.get("task"), str):  # named when the stage is read
        return
    config = find_task(stage["task"]).Config
    if last in config.model_fields:
        yield last
    if last in TrainConfig.model_fields:
        yield f"train.{last}"
    for name, field in config.model_fields.items():
        if isinstance(field.default, BaseModel) and last in type(field.default).model_fields:
            yield f"{name}.{last}"


def _explain_source_key(key: str, tree: Tree) -> str | None:
    """The error for a key that belongs to data, perhaps of another source."""
    place, _, last = key.rpartition(".")
    data, default = tree.get("data") or {}, "moving_digits"
    if place.startswith("data.mix."):  # a part of a mix is a source of its own
        data = data["mix"][place.removeprefix("data.mix.")]
        default = "webdataset" if "shards" in data and "folder" not in data else "folder"
    else:
        place = "data"
    own = source_name(data, default)
    having = [name for name in source_names() if last in find_source(name).Config.model_fields]
    if not having:
        return None
    if own in having:
        return f"unknown key {key}: did you mean {place}.{last}?"
    first, *others = having
    or_others = f" (or {', '.join(others)})" if others else ""
    return f"unknown key {key}: {place}.source={own} has no {last}; set {place}.{last} and {place}.source={first}{or_others}"
