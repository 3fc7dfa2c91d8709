"""The curves of a run: metrics.jsonl as columns by stage and split, thinned for a screen, grouped into panels, with marks."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kineograph.studio.metric_records import Record, read_records
from kineograph.studio.run_files import OutsideRun, read_last_lines
from kineograph.studio.runs import is_number
from kineograph.train.checkpoint_folder import saved_steps

POINTS = 1_200  # per curve, about as many as a screen has columns
CURVES = 12  # in one panel
KEYS = 200  # of a record; a stranger's file may hold more
MARKS = 200

Values = list[float | None]


@dataclass
class Columns:
    """The records of one stage and split."""

    step: list[int] = field(default_factory=list)
    minutes: Values = field(default_factory=list)  # of training until then
    values: dict[str, Values] = field(default_factory=dict)  # name → one value a step


@dataclass(frozen=True)
class Curve:
    label: str
    split: str
    name: str


@dataclass
class Panel:
    title: str
    section: str
    log: bool = False
    curves: list[Curve] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: int
    kind: str  # save, resume, skipped, warning, fatal
    text: str


@dataclass
class StageCurves:
    name: str
    splits: dict[str, Columns]
    panels: list[Panel]
    marks: list[Mark]


def read_curves(run: Path, stages: Iterable[str]) -> list[StageCurves]:
    """The curves of each stage, in the order of the config; stages without records have no panels."""
    records: list[Record] = []
    with suppress(OSError, OutsideRun):
        records = read_records(run)
    resumes = find_resumes(run)
    names = list(dict.fromkeys([*stages, *(record["stage"] for record in records)]))[:64]
    curves = []
    for name in names:
        own = [record for record in records if record["stage"] == name]
        splits = {split: _make_columns(own, split) for split in ("train", "validation")}
        _fill_minutes(splits)
        marks = [*_find_marks(own), *(mark for stage, mark in resumes if stage == name)]
        with suppress(OSError):
            saved = saved_steps(run / name / "checkpoints")
            marks += [Mark(step, "save", f"checkpoint of step {step:,}") for step in saved]
        marks = sorted(set(marks), key=lambda mark: (mark.step, mark.kind))[:MARKS]
        thinned = {split: _thin(columns) for split, columns in splits.items()}
        curves.append(StageCurves(name, thinned, make_panels(thinned), marks))
    return curves


def to_json(curves: Sequence[StageCurves]) -> list[dict[str, Any]]:
    """For the page's script. Six digits are more than a screen shows."""
    tree = [asdict(stage) for stage in curves]
    for stage in tree:
        for columns in stage["splits"].values():
            columns["minutes"] = [_round(value) for value in columns["minutes"]]
            columns["values"] = {name: [_round(v) for v in values] for name, values in columns["values"].items()}
    return tree


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


# Columns ---------------------------------------------------------------------------------------------------------


def _make_columns(records: list[Record], split: str) -> Columns:
    """One row a step; several records of a step (validation and metrics) are joined."""
    rows: dict[int, Record] = {}
    for record in records:
        if record.get("split", "train") == split and "finding" not in record:
            rows.setdefault(record["step"], {}).update(record)
    steps = sorted(rows)
    names = dict.fromkeys(name for step in steps for name, value in rows[step].items() if is_number(value))
    chosen = [name for name in names if name not in ("step", "time/elapsed")][:KEYS]
    values = {name: [_number(rows[step].get(name)) for step in steps] for name in chosen}
    elapsed = [_number(rows[step].get("time/elapsed")) for step in steps]
    return Columns(steps, [None if seconds is None else seconds / 60 for seconds in elapsed], values)


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _fill_minutes(splits: dict[str, Columns]) -> None:
    """Give validation the minutes of the training record before it."""
    train, other = splits["train"], splits["validation"]
    if any(value is None for value in other.minutes) and train.step:
        places = [bisect_right(train.step, step) - 1 for step in other.step]
        other.minutes = [train.minutes[max(0, place)] for place in places]


def _thin(columns: Columns) -> Columns:
    """At most about POINTS rows: of each bucket the lowest and highest loss and the highest gradient norm, so that no spike is lost."""
    rows = len(columns.step)
    if rows <= POINTS:
        return columns
    kept = {0, rows - 1}
    buckets = POINTS // 3
    for number in range(buckets):
        bucket = range(rows * number // buckets, rows * (number + 1) // buckets)
        kept.add(bucket[0])
        for name, choose in (("loss", min), ("loss", max), ("gradient_norm", max)):
            values = columns.values.get(name)
            present = [row for row in bucket if values is not None and values[row] is not None]
            if present and values is not None:
                kept.add(choose(present, key=lambda row: values[row] or 0.0))
    order = sorted(kept)
    return Columns(
        [columns.step[row] for row in order],
        [columns.minutes[row] for row in order],
        {name: [values[row] for row in order] for name, values in columns.values.items()},
    )


# Panels ----------------------------------------------------------------------------------------------------------

_TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "gradient_norm": "Gradient norm",
    "skipped": "Skipped updates",
    "codes/use": "Codebook use",
    "codes/perplexity": "Codebook perplexity",
    "time/samples_per_second": "Samples per second",
    "time/mfu": "Model FLOPs utilization",
    "time/tflops": "TFLOP/s",
    "time/step_ms": "Milliseconds per step",
    "time/memory_gib": "GPU memory, GiB",
    "time/host_memory_gib": "Main memory, GiB",
    "psnr": "PSNR, dB",
    "tokens/distinct": "Distinct tokens",
    "tokens/entropy": "Token entropy",
}
_PARTS = re.compile(r"time/(data|forward|backward|optimizer|sync)_ms")
_LEFT_OUT = (
    "ema_decay",
    "time/share",
    "time/slowest_rank",
    "time/slowest_behind_ms",
    "time/validation_seconds",
    "time/evaluation_seconds",
)
_SECTIONS = ("Loss", "Terms and scores", "Codebook", "Optimizer", "Speed and memory")


def make_panels(splits: dict[str, Columns]) -> list[Panel]:
    """Group the numbers of a stage into panels: training and validation of a number share one, families of numbers too."""
    panels: dict[str, Panel] = {}
    for split, columns in splits.items():
        for name in columns.values:
            if name in _LEFT_OUT or not any(columns.values[name]):  # nothing but zeros says nothing
                continue
            title, section, label = _place(name)
            panel = panels.setdefault(title, Panel(title, section, log=section == "Loss" or title == "Gradient norm"))
            if len(panel.curves) < CURVES:
                panel.curves.append(Curve(label or split, split, name))
    return sorted(panels.values(), key=lambda panel: _SECTIONS.index(panel.section))


def _place(name: str) -> tuple[str, str, str]:
    """Title of the panel, its section, and the label of the curve (empty: its split)."""
    last = name.rpartition("/")[2]
    if parts := _PARTS.fullmatch(name):
        return "Milliseconds by part", "Speed and memory", parts[1]
    if by_time := re.fullmatch(r"loss/t0*(\d+)-0*(\d+)", name):
        return "Loss by noise range", "Loss", f"timesteps {by_time[1]}–{by_time[2]}"
    if by_share := re.fullmatch(r"loss/masked0*(\d+)-0*(\d+)", name):
        return "Loss by mask share", "Loss", f"{by_share[1]}–{by_share[2]} % masked"
    if name.startswith("loss/"):
        return "Loss by range", "Loss", last
    if numbered := re.fullmatch(r"(.*?)[_-]?\d+", name):
        return f"{_make_title(numbered[1])}, each", "Terms and scores", last
    title = _make_title(name)
    if last == "loss":
        return title, "Loss", ""
    if name.startswith("time/"):
        return title, "Speed and memory", ""
    if last in ("lr", "gradient_norm", "skipped"):
        # Several players: one panel, a curve each.
        player = name.rpartition("/")[0]
        return _TITLES[last], "Optimizer", player
    if name.startswith(("codes/", "tokens/")):
        return title, "Codebook", ""
    return title, "Terms and scores", ""


def _make_title(name: str) -> str:
    return _TITLES.get(name) or name[:1].upper() + name[1:].replace("_", " ")


# Marks -----------------------------------------------------------------------------------------------------------

_RESUMED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d):\d\d  ([^\W\d]\w*): .*, from step (\d{1,15})\b.*")


def _find_marks(records: list[Record]) -> list[Mark]:
    """Health findings, and updates skipped because their gradient was not finite."""
    marks, skipped = [], 0.0
    for record in records:
        finding = record.get("finding")
        if isinstance(finding, dict):
            kind = "fatal" if finding.get("severity") == "fatal" else "warning"
            words = [str(finding.get(key, "")) for key in ("name", "evidence", "meaning", "remedy")]
            marks.append(Mark(record["step"], kind, f"{words[0]}: {words[1]}. {words[2]} {words[3]}".strip()))
        count = _number(record.get("skipped"))
        if count is not None and record.get("split", "train") == "train":
            if count > skipped:
                update = "update" if count - skipped == 1 else "updates"
                marks.append(
                    Mark(
                        record["step"],
                        "skipped",
                        f"{count - skipped:,.0f} {update} skipped: the gradient was not finite",
                    )
                )
            skipped = count
    return marks


def find_resumes(run: Path) -> list[tuple[str, Mark]]:
    """Stage and step at which training was taken up again, from the log."""
    found = (_RESUMED.fullmatch(line) for line in read_last_lines(run, "logs/rank-0.log", 20_000, 2**21))
    return [(m[2], Mark(int(m[3]), "resume", f"resumed from step {int(m[3]):,} on {m[1]}")) for m in found if m]
