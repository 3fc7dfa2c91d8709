"""Train presets with several seeds, evaluate each, give minimum and median: `python -m benchmarks.recipes muse-digits --seeds 0-2 --jobs 3`

Every run goes through `kineo train` and `kineo evaluate`, as a user's would. `--only STAGE` trains the stages up to STAGE and reports
its last validation. Words with `=` are overrides for all runs. A run that fails counts as 0 and is named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.measure import measure_matmul_flops
from benchmarks.report import ResultFile, format_command, make_record
from kineograph.core.errors import ConfigError, KineoError
from kineograph.core.health import read_findings
from kineograph.run.layers import read_config

RESULTS = Path(__file__).parent / "results"


@dataclass
class Outcome:
    """One seed of one preset."""

    preset: str
    seed: int
    exit_code: int = 0
    train_seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)  # of `kineo evaluate`
    validation: dict[str, dict[str, float]] = field(default_factory=dict)  # stage → its last validation
    findings: list[str] = field(default_factory=list)  # stage and name of each
    message: str = ""  # the last line of a run that failed


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _build_parser().parse_intermixed_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        presets = [word for word in options.words if "=" not in word]
        overrides = [word for word in options.words if "=" in word]
        jobs = [
            (preset, seed, [*overrides, *_skip_later_stages(preset, options.only)])
            for preset in presets
            for seed in parse_seeds(options.seeds)
        ]
    except KineoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    folder = Path(options.runs or tempfile.mkdtemp(prefix="kineo-recipes-"))
    facts = machine.describe(device, measure_matmul_flops(device, small=True))
    file = ResultFile(options.out, f"recipes-{machine.slugify_device(device)}")
    command = format_command("benchmarks.recipes", arguments)
    outcomes: list[Outcome] = []

    def run(job: tuple[str, int, list[str]]) -> None:
        outcome = train_and_evaluate(*job, folder, options.samples, evaluate=options.only is None)
        outcomes.append(outcome)
        print(f"# {_describe(outcome, options.score)}", flush=True)
        file.write(make_record(facts, command, outcomes=[asdict(each) for each in outcomes]))

    started = time.monotonic()

    def run_in_turn(number: int) -> None:
        time.sleep(max(0.0, started + number * options.stagger - time.monotonic()))
        run(jobs[number])

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run_in_turn, range(len(jobs))))
    print(format_table(outcomes, options.score, options.only))
    return 1 if any(outcome.exit_code for outcome in outcomes) else 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="PRESET|KEY=VALUE")
    parser.add_argument("--seeds", default="0-2", help="such as 0-2 or 0,3,7")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument(
        "--stagger",
        type=float,
        default=0,
        metavar="SECONDS",
        help="between starts: the first run compiles for the others",
    )
    parser.add_argument("--samples", type=int, default=512, help="samples to evaluate")
    parser.add_argument("--score", default="caption_accuracy", help="the metric of the table")
    parser.add_argument("--only", metavar="STAGE", help="train no stage after this one, and report its validation")
    parser.add_argument("--runs", help="folder of the runs (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    return parser


def parse_seeds(text: str) -> list[int]:
    """`0-2` → 0, 1, 2; `0,3,7` → these."""
    try:
        first, dash, last = text.partition("-")
        return list(range(int(first), int(last) + 1)) if dash else [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {text}: use a range such as 0-2, or a list such as 0,3,7") from None


def _skip_later_stages(preset: str, last: str | None) -> list[str]:
    if last is None:
        return []
    stages = list(read_config([preset]).get("stages", {}))
    if last not in stages:
        raise ConfigError(f"--only {last}: the stages of {preset} are {', '.join(stages)}")
    return [f"stages.{name}.skip=true" for name in stages[stages.index(last) + 1 :]]


def train_and_evaluate(
    preset: str, seed: int, overrides: Sequence[str], folder: Path, samples: int, evaluate: bool = True
) -> Outcome:
    outcome, run = Outcome(preset, seed), folder / f"{preset}-{seed}"
    started = time.monotonic()
    outcome.exit_code, outcome.message = _run_kineo("train", preset, f"seed={seed}", *overrides, "--run", str(run))
    outcome.train_seconds = time.monotonic() - started
    for record in _read_records(run / "metrics.jsonl"):
        if record.get("split") == "validation" and "loss" in record:
            numbers = {name: value for name, value in record.items() if isinstance(value, float)}
            outcome.validation[record["stage"]] = numbers
    outcome.findings = [f"{stage}: {finding.name}" for stage, _, finding in read_findings(run / "metrics.jsonl")]
    if evaluate and not outcome.exit_code:
        words = ("evaluate", str(run), "--metrics", "caption_accuracy", "--samples", str(samples))
        outcome.exit_code, outcome.message = _run_kineo(*words)
        outcome.scores = _read_scores(run / "evaluation.json")
    return outcome


def _run_kineo(*words: str) -> tuple[int, str]:
    """Run a command. → its exit code, and its last line if that is not 0."""
    done = subprocess.run([sys.executable, "-m", "kineograph", *words], capture_output=True, text=True, check=False)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return done.returncode, lines[-1] if done.returncode and lines else ""


def _read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _read_scores(path: Path) -> dict[str, float]:
    """The values of the last evaluation."""
    if not path.exists():
        return {}
    checkpoints = json.loads(path.read_text(encoding="utf-8"))["results"]["validation"]
    metrics = list(checkpoints.values())[-1]
    return {name: value for metric in metrics.values() for name, value in metric["values"].items()}


# Table -----------------------------------------------------------------------------------------------------------


def format_table(outcomes: Sequence[Outcome], score: str, stage: str | None = None) -> str:
    """A Markdown row per preset: seeds, minimum and median of the score (or of the stage's PSNR), minutes."""
    lines = [
        f"| preset | seeds | finished | {'PSNR' if stage else score} min | median | each | minutes, median | findings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for preset in dict.fromkeys(outcome.preset for outcome in outcomes):
        rows = sorted((each for each in outcomes if each.preset == preset), key=lambda each: each.seed)
        values = [_value(each, score, stage) for each in rows]
        minutes = statistics.median(each.train_seconds for each in rows) / 60
        lines.append(
            f"| `{preset}` | {len(rows)} | {sum(not each.exit_code for each in rows)} | {min(values):.3f} | "
            f"{statistics.median(values):.3f} | {', '.join(f'{value:.3f}' for value in values)} | {minutes:.1f} | "
            f"{sum(len(each.findings) for each in rows) or 'none'} |"
        )
    return "\n".join(lines)


def _value(outcome: Outcome, score: str, stage: str | None) -> float:
    numbers = outcome.scores if stage is None else outcome.validation.get(stage, {})
    return numbers.get(score if stage is None else "psnr", 0.0)


def _describe(outcome: Outcome, score: str) -> str:
    codecs = ", ".join(
        f"{stage} {numbers['psnr']:.1f} dB" for stage, numbers in outcome.validation.items() if "psnr" in numbers
    )
    state = f"{score} {outcome.scores.get(score, 0.0):.3f}" if outcome.scores else codecs
    failed = f", exit code {outcome.exit_code}: {outcome.message}" if outcome.exit_code else ""
    findings = "".join(f", finding {name}" for name in outcome.findings)
    return f"{outcome.preset} seed {outcome.seed}: {state}, {outcome.train_seconds:.0f} s{failed}{findings}"


if __name__ == "__main__":
    sys.exit(main())
