"""Time from the command to a caption accuracy: `python -m benchmarks.time_to_quality phenaki-digits --target 0.95`

Trains presets by `kineo train` in a new process, measures caption accuracy of the averaged weights while they train, and
stops at the first that reaches the target. Loading, compilation and all stages count; measuring does not.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.measure import measure_matmul_flops
from benchmarks.recipes import parse_seeds
from benchmarks.report import ResultFile, format_command, make_record
from kineograph.core.errors import ConfigError, KineoError
from kineograph.run.layers import read_config

RESULTS = Path(__file__).parent / "results"
POLL = 0.2  # seconds between looks at metrics.jsonl


@dataclass
class Outcome:
    """One seed of one preset; times in seconds since the command, without those of measuring."""

    preset: str
    seed: int
    first_step: float | None = None  # when the first optimizer step was logged
    reached: float | None = None  # when the target was measured
    accuracy: float = 0.0  # the best that was measured
    seconds: float = 0.0  # of the whole command
    exit_code: int = 0
    message: str = ""


class Watch:
    """Reads metrics.jsonl while it is written."""

    def __init__(self, outcome: Outcome, stage: str, target: float) -> None:
        self.outcome, self.stage, self.target = outcome, stage, target
        self.measuring = 0.0  # seconds

    def see(self, record: dict[str, Any], now: float) -> bool:
        """Note a record that was read `now` seconds after the command. → whether the target is reached"""
        outcome = self.outcome
        self.measuring += record.get("time/evaluation_seconds", 0.0)
        if outcome.first_step is None and record.get("split") == "train":
            outcome.first_step = now - self.measuring
        accuracy = record.get("metric/caption_accuracy")
        if accuracy is None or record.get("stage") != self.stage:
            return False
        outcome.accuracy = max(outcome.accuracy, accuracy)
        if accuracy >= self.target:
            outcome.reached = now - self.measuring
        return outcome.reached is not None


def measure(preset: str, seed: int, overrides: list[str], options: argparse.Namespace, folder: Path) -> Outcome:
    """Train until the target is reached, or to the end."""
    stage = list(read_config([preset, *overrides])["stages"])[-1]
    outcome, run = Outcome(preset, seed), folder / f"{preset}-{seed}"
    watch = Watch(outcome, stage, options.target)
    keys = {"metrics": "[caption_accuracy]", "evaluation_samples": options.samples, "evaluate_every": options.every}
    words = [f"stages.{stage}.train.{key}={value}" for key, value in keys.items()]
    words += [f"stages.{stage}.train.epoch_samples=null", "train.sample_every=0", f"seed={seed}"]
    command = [sys.executable, "-m", "kineograph", "train", preset, *words, *overrides, "--run", str(run)]
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            for record in _follow(run / "metrics.jsonl", child):
                if watch.see(record, time.monotonic() - started):
                    child.send_signal(signal.SIGTERM)
                    break
        finally:
            outcome.exit_code = child.wait()
        outcome.seconds = time.monotonic() - started
        log.seek(0)
        lines = log.read().decode("utf-8", "replace").splitlines()
    if outcome.reached is not None:
        outcome.exit_code = 0  # it was stopped
    elif outcome.exit_code:
        outcome.message = next((line for line in reversed(lines) if line.strip()), "")
    return outcome


def _follow(path: Path, child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Complete lines as they appear, until the process ends."""
    at = 0
    while True:
        has_ended = child.poll() is not None
        if path.exists():
            with open(path, "rb") as file:
                file.seek(at)
                whole, newline, _ = file.read().rpartition(b"\n")
            at += len(whole + newline)
            yield from (json.loads(line) for line in whole.splitlines())
        if has_ended:
            return
        time.sleep(POLL)


def format_table(outcomes: list[Outcome], target: float) -> str:
    lines = [f"| preset | seed | first step, s | {target:g} reached, s | best | whole command, s |", f"|{'---|' * 6}"]
    for each in outcomes:
        cells = [f"{value:.1f}" if value is not None else "–" for value in (each.first_step, each.reached)]
        best = f"{each.accuracy:.3f}" if not each.exit_code else f"exit code {each.exit_code}: {each.message}"
        lines.append(f"| `{each.preset}` | {each.seed} | {cells[0]} | {cells[1]} | {best} | {each.seconds:.1f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _build_parser().parse_intermixed_args(arguments)
    try:
        if not 0 <= options.target <= 1:
            raise ConfigError(f"--target {options.target:g}: caption accuracy is 0 to 1")
        overrides = [word for word in options.words if "=" in word]
        presets = [word for word in options.words if "=" not in word]
        for preset in presets:
            read_config([preset, *overrides])
        jobs = [(preset, seed) for preset in presets for seed in parse_seeds(options.seeds)]
    except KineoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = machine.describe(device, measure_matmul_flops(device, small=True))
    folder = Path(options.runs or tempfile.mkdtemp(prefix="kineo-time-to-quality-"))
    file = ResultFile(options.out, f"time-to-quality-{machine.slugify_device(device)}")
    command = format_command("benchmarks.time_to_quality", arguments)
    outcomes: list[Outcome] = []
    for preset, seed in jobs:
        outcomes.append(measure(preset, seed, overrides, options, folder))
        file.write(make_record(facts, command, outcomes=[asdict(each) for each in outcomes]))
    print(format_table(outcomes, options.target))
    return 1 if any(outcome.exit_code for outcome in outcomes) else 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_quality", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="PRESET|KEY=VALUE")
    parser.add_argument("--target", type=float, default=0.95, help="caption accuracy")
    parser.add_argument("--samples", type=int, default=256, help="prompts of each measurement")
    parser.add_argument("--every", type=int, default=250, help="steps of the last stage between measurements")
    parser.add_argument("--seeds", default="0", help="such as 0-2 or 0,3,7")
    parser.add_argument("--runs", help="folder of the runs (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
