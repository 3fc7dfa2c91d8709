"""`kineo runs`: which runs lie in a folder and how far each one is. A broken one is listed as such and breaks nothing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kineograph.core.errors import InputError, KineoError
from kineograph.core.run_folder import RunFolder
from kineograph.evaluate import results_file
from kineograph.evaluate.console import open_console
from kineograph.evaluate.run_summary import planned_steps
from kineograph.train import checkpoint

State = Literal["running", "stopped", "finished", "interrupted", "new", "broken"]
TAIL = 65_536  # bytes of metrics.jsonl that are looked at for the newest step


@dataclass(frozen=True)
class Row:
    name: str
    state: State
    stage: str = ""  # the one that trains, or trains next; the last one of a finished run
    step: int = 0
    steps: int = 0
    best: float | None = None  # lowest validation loss of that stage
    accuracy: float | None = None  # newest caption accuracy of the run, where it was evaluated
    age: float = 0.0  # seconds since the run last wrote something
    problem: str = ""


def list_runs(folder: str | Path = "runs") -> list[Row]:
    """Runs in a folder (or the folder itself, if it is one), the newest first."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder: give the folder that holds your runs (they go to runs/ by default)"
        )
    if RunFolder(folder).exists():
        return [_row(folder)]
    found = [path for path in folder.iterdir() if RunFolder(path).exists()]
    return sorted((_row(path) for path in found), key=lambda row: (row.age, row.name))


def _row(path: Path) -> Row:
    run = RunFolder(path)
    name = path.resolve().name
    age = max(0.0, time.time() - _newest(path))
    try:
        tree = run.config()
        stages = [stage for stage, keys in tree["stages"].items() if not keys.get("skip")]
        planned = {stage: planned_steps(tree, stage) for stage in stages}
        saved = {stage: max(checkpoint.saved_steps(run.checkpoints(stage)), default=0) for stage in stages}
        inside = [stage for stage in stages if saved[stage] and _inside(run.checkpoints(stage), saved[stage])]
        results = results_file.read_results(run)
    except (KineoError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, KineoError) else str(error)
        return Row(name, "broken", age=age, problem=f"config.yaml: {reason}")
    if not stages:
        return Row(name, "broken", age=age, problem="config.yaml: it has no stages")
    unfinished = [stage for stage in stages if saved[stage] < planned[stage] or stage in inside]
    stage = unfinished[0] if unfinished else stages[-1]
    logged = _logged(run.metrics_file)
    running = run.in_use()
    step = max(saved[stage], logged.get(stage, 0)) if running else saved[stage]
    started = any(saved.values()) or bool(logged)
    state: State = (
        "running"
        if running
        else "finished"
        if not unfinished
        else "stopped"
        if run.stopped_marker.exists()
        else "interrupted"
        if started
        else "new"
    )
    best = checkpoint.read_best(run.checkpoints(stage)) or {}
    return Row(name, state, stage, step, planned[stage], best.get("loss"), _accuracy(results), age)


def _inside(checkpoints: Path, step: int) -> bool:
    """Whether the run still has to validate, evaluate or draw with the weights of this step."""
    try:
        return checkpoint.checkpoint_at(checkpoints, step).phase != "train"
    except (OSError, ValueError):  # damaged: training says so
        return False


def _newest(path: Path) -> float:
    """When anything of the run was last written."""
    times = [0.0]
    for place in (
        path,
        path / "config.yaml",
        path / "metrics.jsonl",
        path / "evaluation.json",
        *path.glob("*/checkpoints"),
    ):
        try:
            times.append(place.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _logged(path: Path) -> dict[str, int]:
    """The newest step of each stage in the last lines of metrics.jsonl."""
    newest: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return newest
    for line in lines:
        try:
            entry = json.loads(line)
            newest[entry["stage"]] = max(newest.get(entry["stage"], 0), int(entry["step"]))
        except (ValueError, KeyError, TypeError):
            continue
    return newest


def _accuracy(results: results_file.Results) -> float | None:
    """The newest caption accuracy, of whatever stage."""
    found = [
        (
            str(metrics["caption_accuracy"].get("date")),
            metrics["caption_accuracy"].get("values", {}).get("caption_accuracy"),
        )
        for checkpoints in results.values()
        for metrics in checkpoints.values()
        if "caption_accuracy" in metrics
    ]
    return max(found, key=lambda item: item[0])[1] if found else None


def table(rows: list[Row]) -> Any:
    from rich.table import Table

    made = Table("run", "state", "stage", "step", "best loss", "caption accuracy", "last written")
    for row in rows:
        if row.state == "broken":
            made.add_row(row.name, "broken", row.problem, "", "", "", age_of(row.age))
            continue
        made.add_row(
            row.name,
            row.state,
            row.stage,
            f"{row.step:,} of {row.steps:,}",
            "–" if row.best is None else f"{row.best:.4g}",
            "–" if row.accuracy is None else f"{row.accuracy:.3f}",
            age_of(row.age),
        )
    return made


def age_of(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def show_runs(folder: str | Path = "runs") -> None:
    rows = list_runs(folder)
    if not rows:
        print(f"no runs in {folder}: kineo train PRESET makes one")
        return
    open_console().print(table(rows))
