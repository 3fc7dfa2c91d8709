"""`python -m benchmarks [CASE …] [--peer] [--device cpu|cuda] [--small] [--repeat N] [--out DIR]`"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import machine, report
from benchmarks.case import Sizes, Work, all_cases, find_cases
from benchmarks.measure import matmul_ceiling, release, time_calls
from benchmarks.report import Row
from kineograph.core.errors import InputError, KineoError

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    if options.list:
        for case in all_cases().values():
            print(
                f"{case.name:16} {case.about}"
                + (f" (peer: {case.peer.package} {case.peer.version})" if case.peer else "")
            )
        return 0
    try:
        rows = run(options, report.command_of("benchmarks", given))
    except KineoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 1 if any(row.error for row in rows if row.side == "ours") else 0


def run(options: argparse.Namespace, command: str) -> list[Row]:
    device = _device(options.device)
    cases = find_cases(options.cases)
    if options.peer:
        for case in cases:
            if case.peer:
                case.peer.check()
    facts = machine.describe(device, matmul_ceiling(device, options.small))
    rows: list[Row] = []
    file = report.File(options.out, machine.slug(device) + ("-small" if options.small else ""))

    def add(row: Row) -> None:
        """Keep a row, and say that it is there: a table at the end of ten minutes is late."""
        rows.append(row)
        shown = f"{row.timing.ms:.2f} ms" if row.timing else f"failed: {row.error}"
        print(f"# {row.case} · {row.side} {row.precision}: {shown}", flush=True)
        file.write(report.as_json(rows, facts, command))

    for case in cases:
        sizes = case.sized(options.small)
        repeat = options.repeat or (2 if options.small else case.repeat)
        warmup = 1 if options.small else case.warmup
        add(_measured(case.name, "ours", "", case.ours, sizes, device, warmup, repeat))
        if options.peer and case.peer:
            side = f"{case.peer.package} {case.peer.installed_version()}"
            for precision in case.peer.precisions if device.type == "cuda" else ("fp32",):
                # bf16 on a CPU is emulated and says nothing
                asked = {**sizes, "precision": precision}
                add(_measured(case.name, side, precision, case.peer.build, asked, device, warmup, repeat))
    report.show(rows, facts)
    print(f"written: {file.write(report.as_json(rows, facts, command))}")
    return rows


def _measured(
    case: str,
    side: str,
    precision: str,
    build: Callable[[Sizes, torch.device], Work],
    sizes: Sizes,
    device: torch.device,
    warmup: int,
    repeat: int,
) -> Row:
    """One side, built, timed and released. A failure is a row too: the other cases still run."""
    torch.manual_seed(0)
    work = None
    try:
        work = build(sizes, device)
        timing = time_calls(work.call, device, warmup, repeat)
        return Row(
            case,
            side,
            work.precision or precision,
            samples=work.samples,
            parameters=work.parameters,
            flops=work.flops,
            timing=timing,
            notes=tuple(work.notes),
        )
    except Exception as error:
        traceback.print_exc(limit=-6)
        return Row(case, side, precision, error=f"{type(error).__name__}: {error}"[:400])
    finally:
        if work is not None:
            work.close()
        del work
        release(device)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device cuda: torch sees no CUDA device here; use --device cpu, with --small for a quick look"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time optimizer steps and sampling calls; with --peer, beside the peer.",
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="which cases (all); --list names them")
    parser.add_argument("--peer", action="store_true", help="run the peer's side too, in the same process")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--small", action="store_true", help="shrunk sizes: does it run, not how fast")
    parser.add_argument("--repeat", type=int, metavar="N", help="timed calls a side (the case's own number)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="where the dated JSON goes (benchmarks/results)"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
