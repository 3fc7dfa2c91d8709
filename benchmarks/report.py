"""Results as a table, and as dated JSON with the command and the hardware."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import Machine, describe, slugify_device
from benchmarks.measure import Timing, measure_matmul_flops

PARAMETERS_APART = 0.05
"""Largest relative difference of parameter counts for a like-for-like comparison."""


@dataclass(frozen=True)
class Row:
    """The result of one side of a case; without a timing, `error` gives the reason."""

    case: str
    side: str  # ours, or the peer's package and version
    precision: str
    samples: int | None = None  # per call
    parameters: int | None = None
    flops: float | None = None  # per call
    timing: Timing | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.timing.ms * 1000 if self.timing and self.samples else None

    @property
    def tflops(self) -> float | None:
        return self.flops / self.timing.ms * 1000 / 1e12 if self.timing and self.flops else None


@dataclass(frozen=True)
class Comparison:
    """Speed of our side relative to the peer's fastest precision."""

    case: str
    ratio: float
    parameters_apart: float | None  # (ours − peer) / peer
    matched: bool


def compare(rows: list[Row]) -> list[Comparison]:
    comparisons = []
    for case in dict.fromkeys(row.case for row in rows):
        timed = [row for row in rows if row.case == case and row.timing]
        ours = [row for row in timed if row.side == "ours"]
        peers = sorted((row for row in timed if row.side != "ours"), key=lambda row: row.timing.ms)  # type: ignore[union-attr]
        if not ours or not peers:
            continue
        mine, best = ours[0], peers[0]
        apart = (mine.parameters - best.parameters) / best.parameters if mine.parameters and best.parameters else None
        ratio = best.timing.ms / mine.timing.ms  # type: ignore[union-attr]
        comparisons.append(Comparison(case, ratio, apart, apart is not None and abs(apart) <= PARAMETERS_APART))
    return comparisons


# Table -----------------------------------------------------------------------------------------------------------


def print_table(rows: list[Row], machine: Machine, console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:  # do not fold rows in a log
        console = Console(file=console.file, width=170)
    console.print(
        f"{machine.device} · torch {machine.torch} · matmul ceiling {machine.matmul_tflops:g} TFLOP/s · commit {machine.commit}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("case", "side", "precision"):
        table.add_column(name)
    for name in ("ms", "quartiles", "pipelined", "samples/s", "peak GiB", "parameters", "TFLOP/s", "MFU"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.case, row.side, row.precision, *_format_figures(row, machine))
    console.print(table)
    for row in rows:
        for line in (*([f"failed: {row.error}"] if row.error else []), *row.notes):
            console.print(f"{row.case} ({row.side} {row.precision}): {line}", markup=False)
    for pair in compare(rows):
        console.print(_format_comparison(pair), markup=False)


def _format_figures(row: Row, machine: Machine) -> list[str]:
    if row.timing is None:
        return ["–"] * 8
    timing = row.timing
    share = row.tflops / machine.matmul_tflops if row.tflops else None
    return [
        f"{timing.ms:.2f}",
        f"{timing.low:.2f}–{timing.high:.2f}",
        f"{timing.pipelined_ms:.2f}",
        f"{row.samples_per_s:,.1f}",
        _format_or_dash(timing.peak_gib, "{:.2f}"),
        _format_or_dash(row.parameters and row.parameters / 1e6, "{:.2f} M"),
        _format_or_dash(row.tflops, "{:.3g}"),
        _format_or_dash(share, "{:.1%}"),
    ]


def _format_or_dash(value: float | None, form: str) -> str:
    return form.format(value) if value else "–"


def _format_comparison(pair: Comparison) -> str:
    line = f"{pair.case}: {pair.ratio:.2f}× the peer's speed"
    if pair.parameters_apart is None:
        return f"{line}; parameters could not be compared"
    line += f", parameters {pair.parameters_apart:+.1%}"
    return line if pair.matched else f"{line}: MORE THAN {PARAMETERS_APART:.0%} APART, not a like-for-like figure"


# JSON ------------------------------------------------------------------------------------------------------------


def to_json(rows: list[Row], machine: Machine, command: str) -> dict[str, Any]:
    results = [
        asdict(row)
        | {
            "samples_per_s": row.samples_per_s,
            "tflops": row.tflops,
            "mfu": row.tflops / machine.matmul_tflops if row.tflops else None,
        }
        for row in rows
    ]
    return make_record(machine, command, rows=results, comparisons=[asdict(pair) for pair in compare(rows)])


def make_record(machine: Machine, command: str, **results: Any) -> dict[str, Any]:
    """Results with the date, the command and the hardware."""
    return {"date": date.today().isoformat(), "command": command, "machine": asdict(machine), **results}


def write_results(out: Path, name: str, words: list[str], device: torch.device, **results: Any) -> Path:
    """Write results of `python -m benchmarks.NAME WORDS`."""
    facts = describe(device, measure_matmul_flops(device, small=True))
    run = make_record(facts, format_command(f"benchmarks.{name}", words), **results)
    return ResultFile(out, f"{name}-{slugify_device(device)}").write(run)


def format_command(module: str, words: list[str]) -> str:
    return shlex.join(["python", "-m", module, *words])


class ResultFile:
    """The result file of a day, shared by its runs. Written after every row, so that an interrupted run keeps its rows."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.others: list[Any] | None = None

    def write(self, run: dict[str, Any]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{run['date']}-{self.name}.json"
        if self.others is None:
            self.others = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
        path.write_text(
            json.dumps({"runs": [*self.others, run]}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return path
