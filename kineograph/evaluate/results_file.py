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
    """All recorded results. What is damaged or not of our form is left out."""
    results = _as_dict(read_json(run.path / "evaluation.json").get("results"))
    return {
        split: {
            checkpoint: {metric: record for metric, record in _as_dict(records).items() if _is_record(record)}
            for checkpoint, records in _as_dict(checkpoints).items()
        }
        for split, checkpoints in results.items()
    }


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and isinstance(record.get("values"), dict)
        and isinstance(record.get("labels", {}), dict)
    )


def add_results(run: RunFolder, split: str, stage: str, step: int, results: dict[str, Result], **extra: Any) -> None:
    """Record the results of one checkpoint. Earlier results of the same metrics are replaced, all others stay.

    `findings` of the file are those about the stages of the run, as metrics.jsonl has them now.
    """
    path = run.path / "evaluation.json"
    everything = read_results(run)
    if not everything and path.exists():  # keep a damaged file
        taken = sum(1 for _ in run.path.glob("evaluation.damaged*.json"))
        os.replace(path, path.with_name(f"evaluation.damaged{taken or ''}.json"))
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
