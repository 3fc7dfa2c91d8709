"""RUN/evaluation.json: results by split, then checkpoint (`generator/step-00000300`), then metric."""

from __future__ import annotations

import math
import os
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kineograph.core.health import read_findings
from kineograph.core.run_folder import RunFolder, read_json, write_json

if TYPE_CHECKING:  # with torch, which reading results needs not
    from kineograph.evaluate.metric_api import Result

FORMAT = 1
Results = dict[str, dict[str, dict[str, dict[str, Any]]]]  # split → checkpoint → metric → record


def read_results(run: RunFolder) -> Results:
    """All recorded results; {} where the file is missing or damaged."""
    results = read_json(run.path / "evaluation.json").get("results")
    return results if isinstance(results, dict) and _are_results(results) else {}


def _are_results(results: dict[Any, Any]) -> bool:
    """Whether the dicts are nested as ours are."""
    levels = [results]
    for _ in range(3):
        if not all(isinstance(value, dict) for level in levels for value in level.values()):
            return False
        levels = [value for level in levels for value in level.values()]
    return all(
        isinstance(record.get("values"), dict) and isinstance(record.get("labels", {}), dict) for record in levels
    )


def add_results(run: RunFolder, split: str, stage: str, step: int, results: dict[str, Result], **extra: Any) -> None:
    """Record the results of one checkpoint. Earlier results of the same metrics are replaced, all others stay.

    `findings` of the file are those about the stages of the run, as metrics.jsonl has them now.
    """
    path = run.path / "evaluation.json"
    everything = read_results(run)
    if not everything and path.exists():  # keep a damaged file
        os.replace(path, path.with_name("evaluation.damaged.json"))
    records = everything.setdefault(split, {}).setdefault(f"{stage}/step-{step:08d}", {})
    date = datetime.now(UTC).isoformat(timespec="seconds")
    for name, result in results.items():
        records[name] = {**to_record(result), **extra, "date": date}
    findings: dict[str, list[dict[str, Any]]] = {}
    for name, found_at, finding in read_findings(run.metrics_file):
        findings.setdefault(name, []).append({"step": found_at, **finding.to_json()})
    write_json(path, {"format": FORMAT, "results": everything} | ({"findings": findings} if findings else {}))


def to_record(result: Result) -> dict[str, Any]:
    """Values that are not finite become null."""
    values = {key: value if math.isfinite(value) else None for key, value in result.values.items()}
    return {"values": values, "labels": result.labels}


def newest_result(results: Results, split: str, stage: str, metric: str) -> tuple[int, dict[str, Any]] | None:
    """Step and record of a stage's newest result of a metric."""
    candidates = []
    for key, metrics in results.get(split, {}).items():
        match = re.fullmatch(rf"{re.escape(stage)}/step-(\d+)", key)
        if match and metric in metrics:
            candidates.append((str(metrics[metric].get("date", "")), int(match[1]), metrics[metric]))
    if not candidates:
        return None
    _, step, record = max(candidates, key=lambda item: item[:2])
    return step, record
