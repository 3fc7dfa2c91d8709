"""Rows → a table for people, and dated JSON that keeps the command and the hardware beside the figures."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.measure import Timing

PARAMETERS_APART = 0.05
"""Sizes further apart than this are flagged: the ratio then compares different models."""


@dataclass(frozen=True)
class Row:
    """One side of one case. `error` says why there is no timing."""

    case: str
    side: str  # ours, or the peer's package and version
    precision: str
    samples: int | None = None  # a call
    parameters: int | None = None
    flops: float | None = None  # a call
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
    """A case's two sides: how many times faster ours is than the peer's fastest precision."""

    case: str
    ratio: float
    parameters_apart: float | None  # (ours − peer) / peer
    matched: bool


def compare(rows: list[Row]) -> list[Comparison]:
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        timed = [row for row in rows if row.case == case and row.timing]
        ours = [row for row in timed if row.side == "ours"]
        peers = sorted((row for row in timed if row.side != "ours"), key=lambda row: row.timing.ms)  # type: ignore[union-attr]
        if not ours or not peers:
            continue
        mine, best = ours[0], peers[0]
        apart = (mine.parameters - best.parameters) / best.parameters if mine.parameters and best.parameters else None
        ratio = best.timing.ms / mine.timing.ms  # type: ignore[union-attr]
        found.append(Comparison(case, ratio, apart, apart is not None and abs(apart) <= PARAMETERS_APART))
    return found


# For people ------------------------------------------------------------------------------------------------------


def show(rows: list[Row], machine: Machine, console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:  # a log keeps whole rows
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
        table.add_row(row.case, row.side, row.precision, *_figures(row, machine))
    console.print(table)
    for row in rows:
        for line in (*([f"failed: {row.error}"] if row.error else []), *row.notes):
            console.print(f"{row.case} ({row.side} {row.precision}): {line}", markup=False)
    for pair in compare(rows):
        console.print(_verdict(pair), markup=False)


def _figures(row: Row, machine: Machine) -> list[str]:
    if row.timing is None:
        return ["–"] * 8
    timing = row.timing
    share = row.tflops / machine.matmul_tflops if row.tflops else None
    return [
        f"{timing.ms:.2f}",
        f"{timing.low:.2f}–{timing.high:.2f}",
        f"{timing.pipelined_ms:.2f}",
        f"{row.samples_per_s:,.1f}",
        _or_dash(timing.peak_gib, "{:.2f}"),
        _or_dash(row.parameters and row.parameters / 1e6, "{:.2f} M"),
        _or_dash(row.tflops, "{:.3g}"),
        _or_dash(share, "{:.1%}"),
    ]


def _or_dash(value: float | None, form: str) -> str:
    return form.format(value) if value else "–"


def _verdict(pair: Comparison) -> str:
    line = f"{pair.case}: {pair.ratio:.2f}× the peer's speed"
    if pair.parameters_apart is None:
        return f"{line}; parameters could not be compared"
    line += f", parameters {pair.parameters_apart:+.1%}"
    return line if pair.matched else f"{line}: MORE THAN {PARAMETERS_APART:.0%} APART, not a like-for-like figure"


# For machines ----------------------------------------------------------------------------------------------------


def as_json(rows: list[Row], machine: Machine, command: str) -> dict[str, Any]:
    told = [
        asdict(row)
        | {
            "samples_per_s": row.samples_per_s,
            "tflops": row.tflops,
            "mfu": row.tflops / machine.matmul_tflops if row.tflops else None,
        }
        for row in rows
    ]
    return run_of(machine, command, rows=told, comparisons=[asdict(pair) for pair in compare(rows)])


def run_of(machine: Machine, command: str, **found: Any) -> dict[str, Any]:
    """What was measured, with the day, the command and the hardware."""
    return {"date": date.today().isoformat(), "command": command, "machine": asdict(machine), **found}


def command_of(module: str, words: list[str]) -> str:
    return shlex.join(["python", "-m", module, *words])


class File:
    """The day's file: what other runs wrote there, and this run's rows as far as they are known. It can be cut off after any of them."""

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
