"""`kineo runs`: list the runs of a folder and their progress. A broken run is listed as broken."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kineograph.core.config_file import load_file
from kineograph.core.console import open_console
from kineograph.core.errors import InputError, KineoError
from kineograph.core.health import read_findings
from kineograph.core.run_folder import RunFolder, open_nofollow
from kineograph.core.text_file import parse_json
from kineograph.evaluate import results_file
from kineograph.train import checkpoint_folder
from kineograph.train.checkpoint_folder import expect_steps, planned_steps

State = Literal["running", "stopped", "finished", "failed", "interrupted", "new", "broken"]
TAIL = 65_536  # bytes at the end of metrics.jsonl that are read for the newest step


@dataclass(frozen=True)
class Row:
    name: str
    state: State
    stage: str = ""  # the stage that trains now or next; the last one of a finished run
    step: int = 0
    steps: int = 0
    best: float | None = None  # lowest validation loss of that stage
    accuracy: float | None = None  # newest caption accuracy of the run
    age: float = 0.0  # seconds since a file was last written
    problem: str = ""
    findings: tuple[str, ...] = ()  # "stage: name" of each finding in training, fatal ones first


def list_runs(folder: str | Path = "runs") -> list[Row]:
    """List the runs in a folder, or the folder itself if it is a run; the newest first."""
    folder = Path(folder)
    if not os.path.exists(folder):  # False for a name that is too long
        raise InputError(
            f"{folder} does not exist: start a run with kineo train PRESET, or give the folder of your runs"
        )
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of your runs (runs/ by default)")
    if RunFolder(folder).exists():
        return [read_run(folder)]
    rows = [read_run(path) for path in folder.iterdir() if RunFolder(path).exists()]
    return sorted(rows, key=lambda row: (row.age, row.name))


def read_run(path: Path) -> Row:
    """State and progress of one run. Imports no torch."""
    try:
        return _describe_run(path)
    except Exception as error:  # whatever its files hold, the others are listed
        return Row(path.resolve().name, "broken", problem=f"{type(error).__name__}: {error}")


def _describe_run(path: Path) -> Row:
    run = RunFolder(path)
    name = path.resolve().name
    age = max(0.0, time.time() - _find_last_write(path))
    try:
        tree = load_file(run.config_file)  # only listed: code that it names is not run
        if not isinstance(tree.get("stages"), dict):
            return Row(name, "broken", age=age, problem="config.yaml: `stages` is no mapping of names to stages")
        stages = [stage for stage, keys in tree["stages"].items() if not keys.get("skip")]
        planned = {stage: planned_steps(tree, stage, run.checkpoints(stage)) for stage in stages}
        saved = {stage: max(checkpoint_folder.saved_steps(run.checkpoints(stage)), default=0) for stage in stages}
        in_phase = [stage for stage in stages if saved[stage] and _is_in_phase(run.checkpoints(stage), saved[stage])]
        results = results_file.read_results(run)
    except (KineoError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, KineoError) else str(error)
        return Row(name, "broken", age=age, problem=f"config.yaml: {reason}")
    if not stages:
        return Row(name, "broken", age=age, problem="config.yaml: it has no stages")
    unfinished = [stage for stage in stages if saved[stage] < planned[stage] or stage in in_phase]
    stage = unfinished[0] if unfinished else stages[-1]
    logged, shares = _read_newest(run.metrics_file)
    running = run.in_use()
    fatal, findings = _read_health(run)
    step = max(saved[stage], logged.get(stage, 0)) if running else saved[stage]
    steps = expect_steps(step, shares[stage]) if running and step and stage in shares else planned[stage]
    started = any(saved.values()) or bool(logged)
    state: State = "interrupted" if started else "new"
    if running:
        state = "running"
    elif not unfinished:
        state = "finished"
    elif stage in fatal or run.failed_marker.exists():
        state = "failed"
    elif run.stopped_marker.exists():
        state = "stopped"
    best = checkpoint_folder.read_best(run.checkpoints(stage))
    problem = _read_failure(run) if state == "failed" else ""
    accuracy = _find_newest_accuracy(results)
    return Row(name, state, stage, step, steps, best.get("loss"), accuracy, age, problem, findings)


def _read_failure(run: RunFolder) -> str:
    """The first line of the error that ended the run; "" if a finding did."""
    with suppress(OSError), open(run.failed_marker, encoding="utf-8", errors="replace", opener=open_nofollow) as file:
        return file.readline(500).strip()
    return ""


def _read_health(run: RunFolder) -> tuple[set[str], tuple[str, ...]]:
    """Stages with a fatal finding, and all findings, fatal ones first."""
    found = [(stage, finding) for stage, _, finding in read_findings(run.metrics_file)]
    found.sort(key=lambda pair: pair[1].severity != "fatal")
    fatal = {stage for stage, finding in found if finding.severity == "fatal"}
    return fatal, tuple(dict.fromkeys(f"{stage}: {finding.name}" for stage, finding in found))


def _is_in_phase(checkpoints: Path, step: int) -> bool:
    """Whether the run must still validate, evaluate or draw with this checkpoint."""
    try:
        return (
            checkpoint_folder.read_state(checkpoint_folder.step_folder(checkpoints, step)).get("phase", "train")
            != "train"
        )
    except (OSError, ValueError):  # damaged, which training reports
        return False


def _find_last_write(path: Path) -> float:
    """When a file of the run was last written."""
    names = ("config.yaml", "metrics.jsonl", "evaluation.json")
    times = [0.0]
    for file in (path, *(path / name for name in names), *path.glob("*/checkpoints")):
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def _read_newest(path: Path) -> tuple[dict[str, int], dict[str, float]]:
    """The newest step of each stage in the last lines of metrics.jsonl and, with train.minutes, the share of its time."""
    newest: dict[str, int] = {}
    shares: dict[str, float] = {}
    if not path.is_file():  # a pipe would block
        return newest, shares
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return newest, shares
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            entry = parse_json(line)
            newest[entry["stage"]] = max(newest.get(entry["stage"], 0), int(entry["step"]))
            if isinstance(share := entry.get("time/share"), int | float) and 0 < share <= 1:
                shares[entry["stage"]] = share
    return newest, shares


def _find_newest_accuracy(results: results_file.Results) -> float | None:
    """The newest caption accuracy of any stage on the validation split: those of other prompts do not compare."""
    evaluated = results.get("validation", {}).values()
    measured = [metrics["caption_accuracy"] for metrics in evaluated if "caption_accuracy" in metrics]
    newest = max(measured, key=lambda result: str(result.get("date")), default={})
    accuracy = newest.get("values", {}).get("caption_accuracy")
    return accuracy if isinstance(accuracy, int | float) else None


def _make_table(rows: list[Row]) -> Any:
    from rich.table import Table

    table = Table("run", "state", "stage", "step", "best loss", "caption accuracy", "health", "last written")
    for row in rows:
        if row.state == "broken":
            table.add_row(row.name, "broken", row.problem, "", "", "", "", format_age(row.age))
            continue
        table.add_row(
            row.name,
            row.state,
            row.stage,
            f"{row.step:,} of {row.steps:,}",
            "–" if row.best is None else f"{row.best:.4g}",
            "–" if row.accuracy is None else f"{row.accuracy:.3f}",
            "\n".join(row.findings) or row.problem or "–",
            format_age(row.age),
        )
    return table


def format_age(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def print_runs(folder: str | Path = "runs") -> None:
    """Print the runs of a folder as a table."""
    rows = list_runs(folder)
    if not rows:
        print(f"no runs in {folder}: start one with kineo train PRESET")
        return
    open_console().print(_make_table(rows))
