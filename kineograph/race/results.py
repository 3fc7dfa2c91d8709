"""The figures of an entry, from the files of its run, and of a family over its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kineograph.core.run_folder import RunFolder
from kineograph.evaluate import results_file
from kineograph.evaluate.run_summary import summarize_run
from kineograph.train.metrics_file import MetricsFile

Figures = dict[str, float]  # column → value


class Column(NamedTuple):
    title: str
    metric: str  # of kineo evaluate, or "" for a figure of the run
    key: str
    form: str  # of a number
    more_is_better: bool | None  # None: neither


# Of the first five, which judge samples, the first that all entries have decides the order.
COLUMNS = (
    Column("caption accuracy", "caption_accuracy", "caption_accuracy", ".3f", True),
    Column("FVD", "fvd", "fvd", ".1f", False),
    Column("FID", "fid", "fid", ".2f", False),
    Column("KID", "kid", "kid", ".4f", False),
    Column("CLIP score", "clip_score", "clip_score", ".3f", True),
    Column("codec PSNR", "reconstruction", "psnr", ".1f", True),
    Column("codec LPIPS", "lpips", "lpips", ".4f", False),
    Column("samples/s", "", "drawn_per_second", ".3g", True),
    Column("M parameters", "", "parameters", ".2f", None),
    Column("GiB", "", "memory", ".2f", None),
    Column("steps", "", "steps", ",.0f", None),
    Column("minutes", "", "minutes", ".2f", None),
)


@dataclass(frozen=True)
class Score:
    """A figure of a family over its seeds."""

    median: float
    worst: float
    count: int


def collect_figures(run: Path, metrics: str | None = None) -> tuple[Figures, dict[str, Any]]:
    """The figures of an entry by column title, and its bounds, labels and judged samples. `metrics`: those of the judge; None: all."""
    folder = RunFolder.existing(run)
    results = _select_metrics(results_file.read_results(folder), metrics)
    stages = list(folder.config()["stages"])
    figures: Figures = {}
    extra: dict[str, Any] = {"labels": {}}
    for column in COLUMNS:
        found = _find_newest(results, stages, column.metric) if column.metric else None
        value = found["values"].get(column.key) if found else None
        if isinstance(value, int | float) and math.isfinite(value):
            figures[column.title] = value
            extra["labels"][column.title] = found["labels"] if found else {}
    records = filter(None, (_find_newest(results, stages, name) for name in _list_metrics(results)))
    drawn = [record for record in records if isinstance(record.get("drawn_per_second"), int | float)]
    if drawn:
        newest = max(drawn, key=lambda record: str(record.get("date")))
        figures["samples/s"] = newest["drawn_per_second"]
        extra["samples"] = newest["samples"]
    accuracy = extra["labels"].get("caption accuracy", {})
    extra["bounds"] = {name: accuracy[name] for name in ("ceiling", "chance") if name in accuracy}
    reconstructed = _find_newest(results, stages, "reconstructed_captions")
    if reconstructed:
        extra["bounds"]["codec"] = reconstructed["values"]["reconstructed_captions"]
    return figures | _summarize(run, folder, stages), extra


def _select_metrics(results: results_file.Results, metrics: str | None) -> results_file.Results:
    """Without the results of metrics that an earlier judging computed and this one did not."""
    if metrics is None:
        return results
    names = {name.strip() for name in metrics.split(",")}
    return {
        split: {key: {name: records[name] for name in records.keys() & names} for key, records in checkpoints.items()}
        for split, checkpoints in results.items()
    }


def _list_metrics(results: results_file.Results) -> list[str]:
    return [name for split in results.values() for metrics in split.values() for name in metrics]


def _find_newest(results: results_file.Results, stages: Sequence[str], metric: str) -> dict[str, Any] | None:
    """The newest record of the last stage that has one."""
    found = (results_file.newest_result(results, "validation", stage, metric) for stage in reversed(stages))
    return next((record for _, record in filter(None, found)), None)


def _summarize(run: Path, folder: RunFolder, stages: Sequence[str]) -> Figures:
    cells = summarize_run(run).cells
    records = MetricsFile(folder.metrics_file).read()
    elapsed = {r["stage"]: r["time/elapsed"] for r in records if isinstance(r.get("time/elapsed"), int | float)}
    memory = [r[key] for r in records for key in ("time/memory_gib", "time/host_memory_gib") if key in r]
    on_gpu = [r["time/memory_gib"] for r in records if "time/memory_gib" in r]
    figures: Figures = {"minutes": sum(elapsed.values()) / 60}
    if memory:
        figures["GiB"] = max(on_gpu or memory)
    if isinstance(parameters := cells["parameters, all stages"].value, int | float):
        figures["M parameters"] = parameters / 1e6
    steps = [max((r["step"] for r in records if r["stage"] == stage), default=0) for stage in stages]
    return figures | {"steps": sum(steps)}


def join_seeds(figures: Sequence[Figures]) -> dict[str, Score]:
    """Median and worst of each column over the seeds that have it."""
    scores = {}
    for column in COLUMNS:
        values = [each[column.title] for each in figures if column.title in each]
        if values:
            worst = max(values) if column.more_is_better is False else min(values)
            scores[column.title] = Score(statistics.median(values), worst, len(values))
    return scores


def find_order(scores: dict[str, dict[str, Score]]) -> Column | None:
    """The first column that judges samples and that all families have."""
    return next((column for column in COLUMNS[:5] if all(column.title in each for each in scores.values())), None)


def rank_families(scores: dict[str, dict[str, Score]]) -> list[str]:
    """The families, best first; as they are if no column orders them."""
    column = find_order(scores)
    if column is None:
        return list(scores)
    sign = -1 if column.more_is_better else 1
    return sorted(scores, key=lambda family: sign * scores[family][column.title].median)
