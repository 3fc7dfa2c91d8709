"""RUN/data.json: which items a stage was trained on, to recognise them when the run continues or is evaluated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kineograph.core.config import flatten, merge, nest, parse_override
from kineograph.core.errors import ConfigError, InputError, NoData
from kineograph.core.notes import Note
from kineograph.core.protocols import Source
from kineograph.core.run_folder import RunFolder, read_json, write_json
from kineograph.data.open_source import LOCATION_KEYS, DataConfig, Split, is_location, parse_data_config

Record = dict[str, Any]


def describe_items(config: DataConfig, sources: dict[Split, Source]) -> Record:
    """Where a stage's items lie, how many there are, and their digests."""
    record: Record = {"location": _locate(config)}
    for split, source in sources.items():
        digest = source.items_digest()
        if digest is not None:  # an empty split of generated items has no length
            record[split] = {"items": len(source), "digest": digest}
    return record


def write_records(folder: RunFolder, records: dict[str, Record]) -> None:
    write_json(folder.data_file, records)


def explain_moved_data(error: NoData, command: str) -> InputError:
    """The error of data that are not where a run has read them, with the key that says where they lie now."""
    part, key = re.match(r"(?:(data\.mix\.[\w-]+): )?(?:.*?\bdata\.(\w+))?", str(error)).groups()  # type: ignore[union-attr]
    where = f"{part or 'data'}.{key or 'folder'}=NEW"
    return InputError(f"{error}; if the data were moved, say where: {command} {where}")


def check_items(folder: RunFolder, stage: str, config: DataConfig, split: Split, source: Source, note: Note) -> None:
    """Refuse another place that holds other items than the stage was trained on; note items that changed in their place."""
    record = read_json(folder.data_file).get(stage) if folder.data_file.is_file() else None
    trained = record.get(split) if isinstance(record, dict) else None
    digest = source.items_digest()
    if not isinstance(trained, dict) or None in (digest, trained.get("digest")) or digest == trained["digest"]:
        return
    assert isinstance(record, dict)
    location, before = _locate(config), record.get("location")
    counts = f"{trained.get('items')} {split} items then, {len(source)} now"
    if location != before:
        places = ", ".join(f"data.{key}={value}" for key, value in location.items())
        raise InputError(
            f"{places} holds other items than stage {stage} was trained on, which lay in {', '.join(map(str, (before or {}).values()))} "
            f"({counts}; names and sizes are compared): give the place where the same files lie now, or train a new run"
        )
    note(f"{stage}: the data have changed since training ({counts}; names and sizes are compared)")


def move_data(config: DataConfig, settings: Sequence[str]) -> DataConfig:
    """The config with its items at another place: `settings` such as data.folder=NEW."""
    if not settings:
        return config
    changes, tree = dict(map(parse_override, settings)), config.model_dump(mode="json")
    for key, value in changes.items():
        name = key.removeprefix("data.")
        if not key.startswith("data.") or not is_location(name):
            places = ", ".join(f"data.{name}" for name in LOCATION_KEYS)
            raise ConfigError(f"{key}={value}: only where the data lie can change here: {places}")
        if name not in flatten(tree):
            raise ConfigError(f"{key}={value}: data.source={config.source} has no {name}")
        tree = merge(tree, nest(name, value))
    return parse_data_config(tree)


def _locate(config: DataConfig) -> dict[str, Any]:
    tree = flatten(config.model_dump(mode="json"))
    return {key: value for key, value in tree.items() if is_location(key) and value is not None}
