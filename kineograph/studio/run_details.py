"""What a run's page shows besides curves and pictures: its config and how it differs, evaluations, skipped items, the log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, flatten
from kineograph.core.config_file import load_file
from kineograph.core.errors import KineoError
from kineograph.core.run_folder import RunFolder
from kineograph.core.text_file import parse_json
from kineograph.evaluate import results_file
from kineograph.studio.run_files import find_odd_file, read_text
from kineograph.studio.runs import is_number

SKIPPED = 200  # items listed
_ORIGIN = ("name", "preset", "resolved")  # what two copies of one config may differ in


def read_config(run: Path) -> Tree:
    """The saved config; empty if it cannot be read. It is only shown: no code that it names is run."""
    if find_odd_file(run, "config.yaml") is not None:
        return {}
    try:
        tree = load_file(RunFolder(run).config_file)
    except (KineoError, OSError, ValueError):
        return {}
    return tree if isinstance(tree.get("stages"), dict) else {}


def stage_names(tree: Mapping[str, Any]) -> list[str]:
    stages = tree.get("stages")
    return [str(name) for name in stages] if isinstance(stages, dict) else []


def stage_task(tree: Mapping[str, Any], stage: str) -> str:
    """The task of a stage; empty if there is none."""
    keys = (tree.get("stages") or {}).get(stage)
    return str(keys.get("task", "")) if isinstance(keys, dict) else ""


# Config ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A key of a config and its value in each of several configs; None where a config has no such key."""

    key: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def list_settings(*trees: Mapping[str, Any]) -> list[Setting]:
    """All keys of some configs in the order of the first, with their values as text."""
    flat = [{key: format_yaml(value) for key, value in flatten(tree).items()} for tree in trees]
    keys = dict.fromkeys(key for tree in flat for key in tree if key not in _ORIGIN)
    return [Setting(key, tuple(tree.get(key) for tree in flat)) for key in keys]


def format_yaml(value: Any) -> str:
    """A value as it is written in YAML, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_yaml(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


# Evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One metric of a checkpoint."""

    split: str
    stage: str
    step: int
    metric: str
    values: dict[str, float | None]
    labels: dict[str, str]
    samples: int | None
    date: str


def read_evaluation(run: Path) -> list[Result]:
    """The results in evaluation.json, those of the newest checkpoint of a stage first."""
    if find_odd_file(run, "evaluation.json") is not None:
        return []
    found = []
    for split, checkpoints in results_file.read_results(RunFolder(run)).items():
        for checkpoint, metrics in checkpoints.items() if isinstance(checkpoints, dict) else ():
            place = re.fullmatch(r"(\w+)/step-(\d{1,15})", str(checkpoint))
            if place and isinstance(metrics, dict):
                for name, record in metrics.items():
                    with suppress(RecursionError):  # nested by a stranger
                        found.append(_read_result(split, place, name, record))
    results = [result for result in found if result is not None]
    return sorted(results, key=lambda result: (result.split, result.stage, -result.step, result.metric))


def _read_result(split: str, place: re.Match[str], metric: str, record: Any) -> Result | None:
    if not isinstance(record, dict) or not isinstance(record.get("values"), dict):
        return None
    values = {str(key): float(value) if is_number(value) else None for key, value in record["values"].items()}
    labels = record.get("labels")
    shown = {str(key): format_yaml(value) for key, value in labels.items()} if isinstance(labels, dict) else {}
    samples = record.get("samples")
    return Result(
        split,
        place[1],
        int(place[2]),
        metric,
        values,
        shown,
        samples if isinstance(samples, int) and is_number(samples) else None,
        str(record.get("date", ""))[:10],
    )


@dataclass
class ResultRow:
    """One number of several runs, the newest of each."""

    split: str
    stage: str
    metric: str
    name: str
    results: list[Result | None] = field(default_factory=list)

    def value(self, number: int) -> float | None:
        result = self.results[number]
        return None if result is None else result.values.get(self.name)


def compare_results(runs: Sequence[list[Result]]) -> list[ResultRow]:
    """Rows of a table with a column for each run: the newest result of every number, those of a metric together."""
    rows: dict[tuple[str, str, str], dict[str, ResultRow]] = {}
    for number, results in enumerate(runs):
        for result in results:  # newest first
            group = rows.setdefault((result.split, result.stage, result.metric), {})
            for name in result.values:
                empty = ResultRow(result.split, result.stage, result.metric, name, [None] * len(runs))
                row = group.setdefault(name, empty)
                row.results[number] = row.results[number] or result
    return [row for key in sorted(rows) for row in rows[key].values()]


# Skipped items ---------------------------------------------------------------------------------------------------


def read_skipped(run: Path) -> tuple[list[tuple[str, str]], bool]:
    """Path and reason of skipped items, and whether there are more than are listed."""
    items = []
    for line in read_text(run, "skipped.jsonl").splitlines():
        try:
            item = parse_json(line)
        except ValueError:
            continue
        if isinstance(item, dict):
            items.append((str(item.get("path", "")), str(item.get("reason", ""))))
    return items[:SKIPPED], len(items) > SKIPPED
