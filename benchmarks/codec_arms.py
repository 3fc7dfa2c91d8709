"""What the perceptual loss and the GAN gain: the same codec, data and steps in several arms, judged alike.

    python -m benchmarks.codec_arms --data PHOTOS [--arms l2,lpips,gan] [--side-by-side] [key=value …]

Each arm is a run of `kineo train PRESET` in RUNS/ARM, evaluated by `kineo evaluate` on held-out items: PSNR, rFID by Inception, and LPIPS
by AlexNet, since the loss uses VGG16. Further `key=value` apply to all arms. A finished arm is not trained again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.machine import find_commit, get_device_name
from benchmarks.report import format_command
from kineograph.core.batch import Batch
from kineograph.core.capabilities import SupportsReconstruction
from kineograph.core.distributed import resolve_device
from kineograph.core.run_folder import RunFolder
from kineograph.data.open_source import open_source
from kineograph.evaluate.results_file import newest_result, read_results
from kineograph.media.frames import to_images
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import read_stage

ARMS = {
    "l2": ("perceptual.weight=0", "adversarial=null"),
    "lpips": ("adversarial=null",),
    "gan": (),
    "gan-bce": ("adversarial.loss=bce",),
    "gan-fixed": ("adversarial.adaptive=false", "adversarial.weight=0.1"),
    "gan-only": ("perceptual.weight=0",),
}
"""Overrides of the preset's codec."""
NUMBERS = {"psnr": "reconstruction", "lpips": "lpips", "rfid": "rfid", "codebook_perplexity": "codebook"}
"""A number → the metric that it is of."""
STAGE = "tokenizer"
COLUMNS = 12  # items on the sheet


def main(words: list[str]) -> int:
    options = _build_parser().parse_args(words)
    arms = options.arms.split(",")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        print(f"--arms {unknown[0]}: use {', '.join(ARMS)}", file=sys.stderr)
        return 2
    options.runs.mkdir(parents=True, exist_ok=True)
    commands = {arm: _train_command(arm, options) for arm in arms}
    seconds = _run_all(commands, options.runs, "train", options.side_by_side)
    judging = {arm: _evaluate_command(arm, options) for arm in arms}
    _run_all(judging, options.runs, "evaluate", options.side_by_side)
    rows = {arm: read_numbers(options.runs / arm) | {"seconds": seconds[arm]} for arm in arms}
    print("\n".join(format_table(rows)))
    draw_sheet(options.runs, arms, options.device).save(options.runs / "arms.png")
    result = {
        "command": format_command("benchmarks.codec_arms", words),
        "date": date.today().isoformat(),
        "device": get_device_name(resolve_device(options.device)),
        "torch": torch.__version__,
        "commit": find_commit(),
        "training": {arm: " ".join(command) for arm, command in commands.items()},
        "arms": rows,
    }
    file = options.runs / "arms.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {file}, {options.runs / 'arms.png'}")
    return 0


def _train_command(arm: str, options: argparse.Namespace) -> list[str]:
    overrides = [f"stages.{STAGE}.{override}" for override in ARMS[arm]]
    return [
        *("kineo", "train", options.preset, f"data.folder={options.data}", f"name={arm}"),
        *(*options.settings, *overrides, "--run", str(options.runs / arm)),
    ]


def _evaluate_command(arm: str, options: argparse.Namespace) -> list[str]:
    return [
        *("kineo", "evaluate", str(options.runs / arm), "--metrics", ",".join(dict.fromkeys(NUMBERS.values()))),
        *("--extractor", "lpips=lpips-alexnet", "--samples", str(options.samples), "--device", options.device),
    ]


def _run_all(commands: dict[str, list[str]], logs: Path, what: str, side_by_side: bool) -> dict[str, float]:
    """Run the commands of all arms, one after the other or at the same time. → seconds of each"""
    seconds: dict[str, float] = {}
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    for arm, command in commands.items():
        running[arm] = _start(command, logs / f"{arm}-{what}.log"), time.monotonic()
        if not side_by_side:
            _wait(arm, running, seconds)
    for arm in running:
        _wait(arm, running, seconds)
    return seconds


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    print(f"$ {' '.join(command)} > {log}", flush=True)
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "kineograph", *command[1:]], stdout=file, stderr=file)


def _wait(arm: str, running: dict[str, tuple[subprocess.Popen[bytes], float]], seconds: dict[str, float]) -> None:
    process, begin = running[arm]
    if process.wait():
        sys.exit(f"{arm} failed: see its log")
    seconds.setdefault(arm, round(time.monotonic() - begin, 1))


# Results -----------------------------------------------------------------------------------------------------------


def read_numbers(run: Path) -> dict[str, Any]:
    """The newest numbers of a run's codec, and which networks gave them."""
    results = read_results(RunFolder.existing(run))
    row: dict[str, Any] = {}
    extractors: dict[str, str] = {}
    for number, metric in NUMBERS.items():
        newest = newest_result(results, "validation", STAGE, metric)
        if newest is None:
            continue
        row["step"], record = newest
        row[number] = record["values"].get(number)
        extractors |= {metric: record["labels"]["extractor"]} if "extractor" in record["labels"] else {}
        row["count"] = record["labels"].get("count")
    return row | {"extractors": extractors}


def format_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table."""
    head = "| arm | PSNR, dB | LPIPS | rFID | perplexity | seconds |"
    lines = [head, "|---|---|---|---|---|---|"]
    for arm, row in rows.items():
        psnr, lpips, rfid, perplexity = (row.get(number) for number in NUMBERS)
        cells = [
            "–" if value is None else f"{value:.{digits}f}"
            for value, digits in ((psnr, 2), (lpips, 4), (rfid, 2), (perplexity, 0), (row["seconds"], 0))
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


@torch.no_grad()
def draw_sheet(runs: Path, arms: list[str], device_name: str = "auto") -> Image.Image:
    """Held-out items in the first row, their reconstructions by each arm below; of clips the middle frame."""
    device = resolve_device(device_name)
    spec = read_stage(RunFolder.existing(runs / arms[0]).config(), STAGE)
    source = open_source(spec.data, "validation", 0)
    indices = np.linspace(0, len(source) - 1, COLUMNS).astype(int)
    items = [source.read(int(index), np.random.default_rng(0)).pixels for index in indices]
    pixels = torch.stack([item for item in items if item is not None])  # B T C H W
    batch = Batch(slots=torch.arange(COLUMNS, device=device), pixels=pixels.to(device))
    rows = [pixels]
    for arm in arms:
        task = StageLoader(RunFolder.existing(runs / arm), device).load(STAGE)
        assert isinstance(task, SupportsReconstruction)
        rows.append((task.reconstruct(batch) * 255).round().clamp(0, 255).to("cpu", torch.uint8))
    middle = pixels.shape[1] // 2
    height, width = pixels.shape[-2:]
    sheet = Image.new("RGB", (COLUMNS * width, len(rows) * height))
    for y, row in enumerate(rows):
        for x, clip in enumerate(row):
            sheet.paste(to_images(clip[middle : middle + 1])[0].convert("RGB"), (x * width, y * height))
    return sheet.resize((2 * sheet.width, 2 * sheet.height), Image.Resampling.NEAREST)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec_arms", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for all arms, such as train.steps=3000")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="pictures or clips: data.folder")
    parser.add_argument("--preset", default="vqgan-photos")
    parser.add_argument("--arms", default="l2,lpips,gan", help=f"of {', '.join(ARMS)} (default: l2,lpips,gan)")
    parser.add_argument("--runs", type=Path, default=Path("runs/arms"), metavar="DIR", help="folder of the runs")
    parser.add_argument("--samples", type=int, default=2048, metavar="N", help="held-out items to judge")
    parser.add_argument("--side-by-side", action="store_true", help="train all arms at the same time")
    parser.add_argument("--device", default="auto", help="of the judges: auto, cpu or cuda")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
