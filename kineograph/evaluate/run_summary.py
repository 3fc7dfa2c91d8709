"""What is known about a finished or half-finished run from its folder alone: no weights are loaded, nothing is computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kineograph.core.config import merge
from kineograph.core.errors import InputError
from kineograph.core.registry import find_task
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.evaluate import results_file
from kineograph.evaluate.caption_accuracy import ATTRIBUTES
from kineograph.stage.load import choose_sampling_stage
from kineograph.train import checkpoint
from kineograph.train.config import TrainConfig
from kineograph.train.trackers import MetricsFile

RATE = "time/samples_per_second"
DISTANCES: dict[str, tuple[str, Callable[[float], str]]] = {  # row → metric, and how its number is written
    "FID": ("fid", lambda v: f"{v:.2f}"),
    "KID": ("kid", lambda v: f"{v:.5f}"),
    "Inception Score": ("is", lambda v: f"{v:.2f}"),
    "FVD": ("fvd", lambda v: f"{v:.1f}"),
    "CLIP score": ("clip_score", lambda v: f"{v:.3f}"),
    "rFID": ("rfid", lambda v: f"{v:.2f}"),
    "LPIPS": ("lpips", lambda v: f"{v:.4f}"),
}


@dataclass(frozen=True)
class Cell:
    """One cell: a value, or the command that would fill it (None where nothing would)."""

    value: float | str | None
    text: str = "–"
    command: str | None = None
    wanted: bool = True  # False: only where another run has the number, since it takes extra weights


@dataclass
class RunSummary:
    path: Path
    facts: dict[str, Cell] = field(default_factory=dict)  # row → cell
    losses: list[tuple[float, float]] = field(default_factory=list)  # (minutes, training loss) of the main stage


def planned_steps(tree: dict[str, Any], stage: str) -> int:
    """How many steps a stage is to be trained for."""
    train = merge(tree.get("train") or {}, tree["stages"][stage].get("train") or {})
    return int(train.get("steps", TrainConfig.model_fields["steps"].default))


def find_main_stage(run: RunFolder) -> str:
    """The stage that draws; before it is trained, the last one that is; before that, the last of all."""
    try:
        return choose_sampling_stage(run)
    except InputError:
        names = list(run.config()["stages"])
        trained = [name for name in names if checkpoint.saved_steps(run.checkpoints(name))]
        return (trained or names)[-1]


def summarize_run(path: str | Path, split: str = "validation") -> RunSummary:
    """Everything that a comparison shows about a run."""
    run = RunFolder.existing(path)
    tree = run.config()
    stages = list(tree["stages"])
    main = find_main_stage(run)
    records = MetricsFile(run.metrics_file).read()
    found = RunSummary(run.path, losses=_curve(records, main))
    facts = found.facts
    train = _train_command(run, tree)
    facts["stages"] = Cell(
        text := " + ".join(str(tree["stages"][name]["task"]).rpartition(".")[2] for name in stages), text
    )
    facts["judged stage"] = Cell(main, main)
    sizes = {name: _size(run, name) for name in stages}
    facts["parameters"] = _cell(sizes[main], _count, train)
    facts["parameters, all stages"] = _cell(sum(filter(None, sizes.values())) or None, _count, train)
    done = checkpoint.saved_steps(run.checkpoints(main))
    planned = planned_steps(tree, main)
    facts["steps"] = Cell(done[-1], f"{done[-1]:,} of {planned:,}") if done else Cell(None, command=train)
    facts["best validation loss"] = _best_loss(run, main, records)
    facts |= _judgements(run, main, stages, tree, split)
    rates = [r[RATE] for r in records if _is_train(r, main) and _is_number(r.get(RATE))]
    facts["training samples/s"] = _cell(statistics.median(rates) if rates else None, lambda v: f"{v:,.1f}", train)
    facts["training time"] = _cell(_elapsed(records), _duration, train)
    return found


def _train_command(run: RunFolder, tree: dict[str, Any]) -> str | None:
    """What goes on with the run; None when every stage is done."""
    left = [
        name
        for name, stage in tree["stages"].items()
        if not stage.get("skip")
        and max(checkpoint.saved_steps(run.checkpoints(name)), default=0) < planned_steps(tree, name)
    ]
    return f"kineo train {run.config_file} --run {run.path}" if left else None


def _judgements(run: RunFolder, main: str, stages: list[str], tree: dict[str, Any], split: str) -> dict[str, Cell]:
    """What evaluation.json says of the drawing stage and of its codec."""
    results = results_file.read_results(run)
    command = f"kineo evaluate {run.path}" + (f" --split {split}" if split != "validation" else "")
    source = merge(tree.get("data") or {}, tree["stages"][main].get("data") or {}).get("source", "moving_digits")
    drawing = find_task(tree["stages"][main]["task"]).sample is not Task.sample
    read = results_file.newest_result(results, split, main, "caption_accuracy")
    facts = {
        "caption accuracy": _judged(
            run, main, read, "caption_accuracy", _share, command if drawing and source == "moving_digits" else None
        )
    }
    accuracy = facts["caption accuracy"]
    if read is not None and accuracy.value is not None and _drawn_from(read[1].get("labels", {})):
        told = _drawn_from(read[1]["labels"])[0]
        facts["caption accuracy"] = replace(accuracy, text=f"{accuracy.text} ({told})")
    for name in ATTRIBUTES:
        facts[f"  {name} right"] = _judged(run, main, read, name, _share, None)
    codec = next(
        (name for name in stages if find_task(tree["stages"][name]["task"]).reconstruct is not Task.reconstruct), None
    )
    codes = codec is not None and getattr(find_task(tree["stages"][codec]["task"]), "vocabulary", 0) is not None
    for row, metric, key, text in (
        ("PSNR, dB", "reconstruction", "psnr", lambda v: f"{v:.2f}"),
        ("codebook use", "codebook", "codebook_use", _share),
        ("codebook perplexity", "codebook", "codebook_perplexity", lambda v: f"{v:,.1f}"),
    ):
        found = results_file.newest_result(results, split, codec, metric) if codec else None
        asks = codec is not None and (codes or metric != "codebook")
        facts[row] = _judged(run, codec or "", found, key, text, command if asks else None)
    for row, (metric, text) in DISTANCES.items():
        stage = codec or "" if metric in ("rfid", "lpips") else main
        found = results_file.newest_result(results, split, stage, metric)
        cell = _judged(run, stage, found, metric, text, None)
        if found is None or cell.value is None:
            facts[row] = Cell(None, command=f"{command} --metrics {metric}", wanted=False)
        else:  # two such numbers are comparable only if they rest on the same
            labels = found[1].get("labels", {})
            rests_on = [labels.get("extractor"), labels.get("count"), *_drawn_from(labels)]
            facts[row] = Cell(cell.value, f"{cell.text} ({', '.join(map(str, rests_on))})")
    return facts


def _drawn_from(labels: dict[str, Any]) -> list[str]:
    """Where it was not captions: pictures of true embeddings are no text to image."""
    told = labels.get("drawn from", "captions")
    return [] if told.startswith("captions") else [f"of {told}"]


def _judged(
    run: RunFolder,
    stage: str,
    found: tuple[int, dict[str, Any]] | None,
    key: str,
    text: Callable[[float], str],
    command: str | None,
) -> Cell:
    if found is None or not _is_number(found[1].get("values", {}).get(key)):
        return Cell(None, command=command)
    step, value = found[0], found[1]["values"][key]
    newest = checkpoint.saved_steps(run.checkpoints(stage))
    return Cell(value, text(value) + (f" @ step {step:,}" if newest and step != newest[-1] else ""))


def _best_loss(run: RunFolder, main: str, records: list[dict[str, Any]]) -> Cell:
    """Of the best checkpoint; else the lowest that was logged; else what an evaluation found."""
    best = checkpoint.read_best(run.checkpoints(main))
    if best and _is_number(best.get("loss")):
        return Cell(best["loss"], f"{best['loss']:.4g} @ step {best['step']:,}")
    held_out = [r for r in records if r["stage"] == main and r.get("split") == "validation"]
    losses = [r["loss"] for r in held_out if _is_number(r.get("loss"))]
    if losses:
        return Cell(min(losses), f"{min(losses):.4g}")
    found = results_file.newest_result(results_file.read_results(run), "validation", main, "loss")
    return _judged(run, main, found, "loss", lambda v: f"{v:.4g}", f"kineo evaluate {run.path}")


def _size(run: RunFolder, stage: str) -> int | None:
    """Numbers in a stage's weights, read from the files' headers."""
    steps = checkpoint.saved_steps(run.checkpoints(stage))
    if not steps:
        return None
    try:
        return sum(map(math.prod, checkpoint.checkpoint_at(run.checkpoints(stage), steps[-1]).shapes("model").values()))
    except (OSError, ValueError, SafetensorError):
        return None


def _elapsed(records: list[dict[str, Any]]) -> float | None:
    """Seconds of training, over all stages."""
    last = {r["stage"]: r["time/elapsed"] for r in records if _is_number(r.get("time/elapsed"))}
    return sum(last.values()) if last else None


def _curve(records: list[dict[str, Any]], stage: str) -> list[tuple[float, float]]:
    return [
        (r["time/elapsed"] / 60, r["loss"])
        for r in records
        if _is_train(r, stage) and _is_number(r.get("loss")) and _is_number(r.get("time/elapsed"))
    ]


def _is_train(r: dict[str, Any], stage: str) -> bool:
    return r["stage"] == stage and r.get("split") == "train"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _cell(value: float | None, text: Callable[[float], str], command: str | None) -> Cell:
    return Cell(None, command=command) if value is None else Cell(value, text(value))


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _count(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e4 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
