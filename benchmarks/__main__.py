"""`python -m benchmarks [CASE …] [--peer] [--device cpu|cuda] [--small] [--deterministic] [--repeat N] [--out DIR]`"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks import machine, report
from benchmarks.case import Sizes, Workload, find_cases, load_cases
from benchmarks.measure import measure_matmul_flops, release_memory, time_calls
from benchmarks.report import Row
from kineograph.core.errors import InputError, KineoError
from kineograph.train.determinism import deterministic_algorithms, set_deterministic_environment

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _build_parser().parse_args(arguments)
    if options.list:
        for case in load_cases().values():
            print(
                f"{case.name:16} {case.about}"
                + (f" (peer: {case.peer.package} {case.peer.version})" if case.peer else "")
            )
        return 0
    try:
        rows = run(options, report.format_command("benchmarks", arguments))
    except KineoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 1 if any(row.error for row in rows if row.side == "ours") else 0


def run(options: argparse.Namespace, command: str) -> list[Row]:
    device = _resolve_device(options.device)
    if options.deterministic:
        set_deterministic_environment()
    with deterministic_algorithms(device) if options.deterministic else nullcontext():
        return _run_cases(options, command, device)


def _run_cases(options: argparse.Namespace, command: str, device: torch.device) -> list[Row]:
    cases = find_cases(options.cases)
    if options.peer:
        for case in cases:
            if case.peer:
                case.peer.check()
    facts = machine.describe(device, measure_matmul_flops(device, options.small))
    rows: list[Row] = []
    file = report.ResultFile(
        options.out,
        machine.slugify_device(device)
        + ("-small" if options.small else "")
        + ("-deterministic" if options.deterministic else ""),
    )

    def add(row: Row) -> None:
        """Record a row and print it at once, since the table comes only at the end."""
        rows.append(row)
        result = f"{row.timing.ms:.2f} ms" if row.timing else f"failed: {row.error}"
        print(f"# {row.case} · {row.side} {row.precision}: {result}", flush=True)
        file.write(report.to_json(rows, facts, command))

    for case in cases:
        sizes = case.resolve_sizes(options.small)
        repeat = options.repeat or (2 if options.small else case.repeat)
        warmup = 1 if options.small else case.warmup
        add(_measure_side(case.name, "ours", "", case.ours, sizes, device, warmup, repeat))
        if options.peer and case.peer:
            side = f"{case.peer.package} {case.peer.installed_version()}"
            # bf16 on a CPU is emulated: its times mean nothing.
            for precision in case.peer.precisions if device.type == "cuda" else ("fp32",):
                peer_sizes = {**sizes, "precision": precision}
                add(_measure_side(case.name, side, precision, case.peer.build, peer_sizes, device, warmup, repeat))
    report.print_table(rows, facts)
    print(f"written: {file.write(report.to_json(rows, facts, command))}")
    return rows


def _measure_side(
    case: str,
    side: str,
    precision: str,
    build: Callable[[Sizes, torch.device], Workload],
    sizes: Sizes,
    device: torch.device,
    warmup: int,
    repeat: int,
) -> Row:
    """Build, time and release one side. A failure becomes a row with its error, so that the other cases still run."""
    torch.manual_seed(0)
    workload = None
    try:
        workload = build(sizes, device)
        timing = time_calls(workload.call, device, warmup, repeat)
        return Row(
            case,
            side,
            workload.precision or precision,
            samples=workload.samples,
            parameters=workload.parameters,
            flops=workload.flops,
            timing=timing,
            notes=tuple(workload.notes),
        )
    except Exception as error:
        traceback.print_exc(limit=-6)
        return Row(case, side, precision, error=f"{type(error).__name__}: {error}"[:400])
    finally:
        if workload is not None:
            workload.close()
        del workload
        release_memory(device)


def _resolve_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device; use --device cpu, and --small for a quick run")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time optimizer steps and sampling calls; with --peer, also those of other implementations.",
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases to run (default: all)")
    parser.add_argument("--peer", action="store_true", help="also run the peer, in the same process")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--small", action="store_true", help="shrunk sizes, to test that the cases run")
    parser.add_argument(
        "--deterministic", action="store_true", help="step as train.deterministic=true does, to measure its price"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="timed calls per side (default: set by the case)")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder of the dated JSON (default: benchmarks/results)",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
