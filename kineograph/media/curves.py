"""curves.png: the curves of a run's metrics.jsonl."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kineograph.core.text_file import iterate_lines, parse_json
from kineograph.media.frames import replace_atomically

DENSE = 2_000  # lines per stage and split that are all read; later ones are thinned out evenly
MAX_POINTS = 1_500  # per curve
MAX_CURVES = 8  # per panel
_COLOURS = ("#1f6fb2", "#d1495b", "#2e933c", "#8e5ea2", "#e08e2b", "#4aa3a2", "#7a6f5d", "#c2649a")

_MARKS = {"fatal": "#c1121f", "warning": "#e08e2b"}

# Title of a panel → the last parts of the names that it shows.
_UNITS = {
    "shares": ("use", "usage", "accuracy", "explained_variance", "chance", "wrong", "codebook_use",
               "caption_accuracy", "number", "digit", "colour", "direction", "place"),
    "PSNR, dB": ("psnr",),
    "number of codes": ("perplexity", "distinct", "codebook_perplexity"),
    "temperature": ("temperature",),
    "learning rate": ("lr",),
    "gradient norm": ("gradient_norm", "grad_norm"),
}  # fmt: skip
_LOG_UNITS = ("number of codes", "gradient norm")
_ONE_SPLIT = ("learning rate", "gradient norm", "samples per second")  # only training has them
_LAST = ("learning rate", "gradient norm", "samples per second")

Curves = dict[str, dict[str, list[tuple[float, float]]]]  # name → stage → (x, y); null in the file becomes nan


@dataclass
class _Panel:
    title: str
    log: bool = False
    stage: str | None = None  # shows this stage alone
    curves: Curves = field(default_factory=dict)


def draw_curves(metrics: str | Path, out: str | Path) -> Path:
    """Draw the metrics over the steps of all stages, one panel per unit, and mark findings."""
    out = Path(out)
    records = list(read_records(Path(metrics)))
    axis = _Axis(records)
    panels = [panel for panel in _build_panels(records, axis) if panel.curves]
    with replace_atomically(out) as temporary:
        _draw(panels, axis, find_marks(records, axis), temporary)
    return out


# Reading ---------------------------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Complete records in order; of a long file, the beginning of each stage and an even share of the rest."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(65_536)
        stride = max(1, int(size / max(1, len(head)) * head.count(b"\n")) // (4 * DENSE))
        file.seek(0)
        counts: Counter[bytes] = Counter()
        for line in iterate_lines(file):
            kind = b"".join(line.split(b",", 2)[:2])  # stage and split come first
            counts[kind] += 1
            if counts[kind] > DENSE and counts[kind] % stride:
                continue
            try:
                record = parse_json(line)
            except ValueError:  # cut off by a kill
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), (int, float)) and "stage" in record:
                yield record


@dataclass(frozen=True)
class Mark:
    """A finding about a stage, where it was made."""

    x: float
    stage: str
    name: str
    severity: str


def find_marks(records: list[dict[str, Any]], axis: _Axis) -> list[Mark]:
    """The findings of the stages (docs/health.md)."""
    found = [(record, record["finding"]) for record in records if isinstance(record.get("finding"), dict)]
    return [
        Mark(
            axis.position(str(record["stage"]), record["step"]),
            str(record["stage"]),
            str(finding["name"]),
            str(finding["severity"]),
        )
        for record, finding in found
    ]


class _Axis:
    """Stages side by side on one x axis, as wide as their share of the steps, at least a fifth of the widest."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.steps: dict[str, float] = {}
        for record in records:
            stage = str(record["stage"])
            self.steps[stage] = max(self.steps.get(stage, 1), record["step"])
        longest = max(self.steps.values(), default=1)
        self.width = {stage: max(steps / longest, 0.2) for stage, steps in self.steps.items()}
        ends = np.cumsum([0.0, *self.width.values()])
        self.start = dict(zip(self.steps, ends.tolist()))
        self.end = float(ends[-1]) or 1.0

    def position(self, stage: str, step: float) -> float:
        return self.start[stage] + step / self.steps[stage] * self.width[stage]

    def span(self, stage: str | None) -> tuple[float, float]:
        """Where a stage begins and ends; None: all of them."""
        return (0.0, self.end) if stage is None else (self.start[stage], self.start[stage] + self.width[stage])

    def ticks(self, only: str | None = None) -> tuple[list[float], list[str]]:
        """Ticks in the middle and at the end of each stage, or of one, labelled with its own steps."""
        positions, labels = [self.span(only)[0]], ["0"]
        for stage, steps in self.steps.items() if only is None else [(only, self.steps[only])]:
            for share in (0.5, 1.0):
                if share == 1.0 or only or self.width[stage] > 0.3:
                    positions.append(self.start[stage] + share * self.width[stage])
                    labels.append(_format_number(steps * share))
        return positions, labels


def _format_number(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _build_panels(records: list[dict[str, Any]], axis: _Axis) -> list[_Panel]:
    """One panel for each unit. A stage's loss has a unit of its own, which its terms share."""
    panels = {f"loss of {stage}": _Panel(f"loss of {stage}", log=True, stage=stage) for stage in axis.steps}
    for record in records:
        if "finding" in record:
            continue
        stage, split = str(record["stage"]), str(record.get("split", "train"))
        x = axis.position(stage, record["step"])
        for name, value in record.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
                continue
            title = _find_unit(name)
            if title is None:
                continue
            panel = panels.setdefault(title or f"loss of {stage}", _Panel(title, log=title in _LOG_UNITS))
            label = split if name == "loss" else name if title in _ONE_SPLIT else f"{name}, {split}"
            panel.curves.setdefault(label, {}).setdefault(stage, []).append(
                (x, math.nan if value is None else float(value))
            )
    for panel in panels.values():
        finite = {name: segments for name, segments in panel.curves.items() if _shows_more(name, segments, panel)}
        longest = sorted(finite, key=lambda name: (name not in ("train", "validation"), -_count_finite(finite[name])))
        panel.curves = {name: finite[name] for name in longest[:MAX_CURVES]}
    order = [*(title for title in panels if title not in _LAST), *(title for title in _LAST if title in panels)]
    return [panels[title] for title in order]


def _find_unit(name: str) -> str | None:
    """The title of the panel with this metric's unit; "" for a loss and its terms; None for what is not drawn."""
    last = name.rpartition("/")[2]
    if name == "time/samples_per_second":
        return "samples per second"
    if name.startswith("time/") or last in ("skipped", "ema_decay", "adversarial_weight"):
        return None
    for unit, names in _UNITS.items():
        if last in names:
            return unit
    if name.startswith("retrieval/"):
        return "shares"
    if name.startswith("cosine/"):
        return "cosines"
    return name if name.startswith("metric/") else ""


def _shows_more(name: str, segments: dict[str, list[tuple[float, float]]], panel: _Panel) -> bool:
    """Leave out curves without a number, terms of a loss that are switched off (0), and those that are all of it."""
    if not _count_finite(segments):
        return False
    if panel.stage is None or name in ("train", "validation"):
        return True
    values = [y for points in segments.values() for _, y in points if math.isfinite(y)]
    return any(values) and segments not in (panel.curves.get("train"), panel.curves.get("validation"))


def _count_finite(segments: dict[str, list[tuple[float, float]]]) -> int:
    return sum(math.isfinite(y) for points in segments.values() for _, y in points)


# Drawing ---------------------------------------------------------------------------------------------------------


def _draw(panels: list[_Panel], axis: _Axis, marks: list[Mark], path: Path) -> None:
    # Without pyplot: no global state, and half the import time.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(len(panels) / 2))
    height = 2.9 * rows
    figure = Figure(figsize=(12, height), dpi=100)
    FigureCanvasAgg(figure)
    # Fixed margins: a layout engine would draw everything twice.
    figure.subplots_adjust(left=0.055, right=0.985, bottom=0.3 / height, top=1 - 0.5 / height, wspace=0.13, hspace=0.4)
    if not panels:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", va="center", color="#777777")
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, 2, index + 1)
        for number, (name, segments) in reversed(list(enumerate(panel.curves.items()))):  # the first on top
            label: str | None = name
            for points in segments.values():
                _draw_curve(axes, label, np.asarray(points, dtype=float), _COLOURS[number % len(_COLOURS)])
                label = None  # one legend entry for all stages
        _style_axes(axes, panel, axis)
        begin, end = axis.span(panel.stage)
        shown = [mark for mark in marks if begin <= mark.x <= end and panel.stage in (None, mark.stage)]
        _draw_marks(axes, shown, named=panel.stage is not None)
    figure.savefig(path, format="png")


def _draw_curve(axes: Any, label: str | None, points: np.ndarray, colour: str) -> None:
    """One stage's part of a curve; a long one faint, under its running mean."""
    if len(points) > MAX_POINTS:
        points = points[np.linspace(0, len(points) - 1, MAX_POINTS).round().astype(int)]
    x, y = points.T
    y = np.where(np.isfinite(y), y, np.nan)
    if len(y) < 100:
        axes.plot(x, y, color=colour, lw=1.3, marker="o" if len(y) < 30 else None, ms=2.5, label=label)
    else:
        axes.plot(x, y, color=colour, lw=0.6, alpha=0.3)
        axes.plot(x, _smooth(y, max(3, len(y) // 100)), color=colour, lw=1.4, label=label)


def _smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Running mean over finite values; gaps stay gaps."""
    known = np.isfinite(y)
    kernel = np.ones(window)
    total = np.convolve(np.where(known, y, 0.0), kernel, mode="same")
    count = np.convolve(known.astype(float), kernel, mode="same")
    return np.where(known, total / np.maximum(count, 1.0), np.nan)


def _draw_marks(axes: Any, marks: list[Mark], named: bool) -> None:
    """A dotted line where findings were made, with their names in the panels of losses."""
    for x in dict.fromkeys(mark.x for mark in marks):
        here = [mark for mark in marks if mark.x == x]
        colour = _MARKS["fatal" if any(mark.severity == "fatal" for mark in here) else "warning"]
        axes.axvline(x, color=colour, lw=1.1, ls=":")
        if named:
            names = ", ".join(dict.fromkeys(mark.name for mark in here))
            style = {"fontsize": 7, "color": colour, "ha": "right", "va": "top", "rotation": 90}
            axes.text(x, 0.98, names, transform=axes.get_xaxis_transform(), **style)


def _style_axes(axes: Any, panel: _Panel, axis: _Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = np.asarray(
        [y for segments in panel.curves.values() for points in segments.values() for _, y in points], dtype=float
    )
    values = values[np.isfinite(values)]
    if panel.log and (values > 0).all() and values.max() > 8 * values.min():
        axes.set_yscale("log")
        few = values.max() < 1000 * values.min()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _format_number(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(panel.title, fontsize=10, loc="left", pad=15)
    axes.set_xlim(*axis.span(panel.stage))
    axes.set_xticks(*axis.ticks(panel.stage), fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(alpha=0.25, lw=0.6)
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)
    for number, (stage, start) in enumerate(axis.start.items() if panel.stage is None else ()):
        if number:
            axes.axvline(start, color="#555555", lw=0.9, ls="--")
        middle = start + axis.width[stage] / 2
        style = {"fontsize": 8, "color": "#555555", "ha": "center", "va": "bottom"}
        axes.text(middle, 1.01, stage, transform=axes.get_xaxis_transform(), **style)
    if len(panel.curves) > 1:
        handles, names = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], names[::-1], fontsize=7, frameon=False, ncols=2 if len(panel.curves) > 4 else 1)
