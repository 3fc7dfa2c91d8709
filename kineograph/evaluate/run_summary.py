"""Summary of a run from the files in its folder: no weights are loaded, nothing is computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kineograph.core.capabilities import SupportsReconstruction, SupportsSampling
from kineograph.core.config import flatten, merge
from kineograph.core.errors import InputError
from kineograph.core.health import read_findings
from kineograph.core.registry import find_task
from kineograph.core.run_folder import RunFolder, read_json
from kineograph.core.task import Codec
from kineograph.evaluate import results_file
from kineograph.evaluate.metric.caption_accuracy import ATTRIBUTES
from kineograph.stage.load import choose_sampling_stage
from kineograph.train import checkpoint
from kineograph.train.checkpoint_folder import planned_steps
from kineograph.train.metrics_file import MetricsFile

RATE = "time/samples_per_second"
FEATURE_METRICS: dict[str, tuple[str, Callable[[float], str]]] = {  # row → metric, number format
    "FID": ("fid", lambda v: f"{v:.2f}"),
    "KID": ("kid", lambda v: f"{v:.5f}"),
    "Inception Score": ("is", lambda v: f"{v:.2f}"),
    "FVD": ("fvd", lambda v: f"{v:.1f}"),
    "CLIP score": ("clip_score", lambda v: f"{v:.3f}"),
    "rFID": ("rfid", lambda v: f"{v:.2f}"),
    "LPIPS": ("lpips", lambda v: f"{v:.4f}"),
    "LPIPS of pairs": ("paired_lpips", lambda v: f"{v:.4f}"),
}
PROTOCOL = (  # labels that must agree where values are compared
    "extractor",
    "mode",
    "resize",
    "features",
    "count",
    "real",
    "frames",
    "tokens",
    "real frames",
    "subsets",
    "splits",
    "reference",
    "drawn from",
)


@dataclass(frozen=True)
class Cell:
    """One cell of the comparison: a value, or the command that would compute it (None: nothing would)."""

    value: float | str | None
    text: str = "–"
    command: str | None = None
    optional: bool = False  # it needs extra weights: suggest the command only where another run has the value
    protocol: dict[str, Any] = field(default_factory=dict)  # how the value was computed


@dataclass
class RunSummary:
    path: Path
    cells: dict[str, Cell] = field(default_factory=dict)  # by row
    losses: list[tuple[float, float]] = field(default_factory=list)  # (minutes, training loss) of the main stage
    data: dict[str, Any] = field(default_factory=dict)  # dotted keys of data.* that the main stage is judged with
    items: str | None = None  # digest of the judged items, where it was recorded
    fatal: list[str] = field(default_factory=list)  # findings of training (docs/health.md)


def find_main_stage(run: RunFolder) -> str:
    """The stage to sample from; before it is trained, the last trained stage, else the last."""
    try:
        return choose_sampling_stage(run)
    except InputError:
        names = list(run.config()["stages"])
        trained = [name for name in names if checkpoint.saved_steps(run.checkpoints(name))]
        return (trained or names)[-1]


def summarize_run(path: str | Path, split: str = "validation") -> RunSummary:
    """All cells that a comparison shows about a run."""
    run = RunFolder.existing(path)
    tree = run.config()
    stages = list(tree["stages"])
    main = find_main_stage(run)
    records = MetricsFile(run.metrics_file).read()
    training = [r for r in records if r["stage"] == main and r.get("split") == "train"]
    command = _train_command(run, tree)
    tasks = " + ".join(str(tree["stages"][name]["task"]).rpartition(".")[2] for name in stages)
    sizes = {name: _count_parameters(run, name) for name in stages}
    done, planned = checkpoint.saved_steps(run.checkpoints(main)), planned_steps(tree, main, run.checkpoints(main))
    rates = [r[RATE] for r in training if _is_number(r.get(RATE))]
    elapsed = {r["stage"]: r["time/elapsed"] for r in records if _is_number(r.get("time/elapsed"))}
    cells = {
        "stages": Cell(tasks, tasks),
        "judged stage": Cell(main, main),
        "parameters": _cell(sizes[main], _millions, command),
        "parameters, all stages": _cell(sum(filter(None, sizes.values())) or None, _millions, command),
        "steps": Cell(done[-1], f"{done[-1]:,} of {planned:,}") if done else Cell(None, command=command),
        "best validation loss": _best_loss(run, main, records),
        **_evaluation_cells(run, main, stages, tree, split),
        "training samples/s": _cell(statistics.median(rates) if rates else None, lambda v: f"{v:,.1f}", command),
        "training time": _cell(sum(elapsed.values()) if elapsed else None, _duration, command),
    }
    losses = [
        (r["time/elapsed"] / 60, r["loss"])
        for r in training
        if _is_number(r.get("loss")) and _is_number(r.get("time/elapsed"))
    ]
    data = flatten(merge(tree.get("data") or {}, tree["stages"][main].get("data") or {}))
    recorded = (read_json(run.data_file).get(main) or {}).get(split) or {}
    found = ((stage, finding) for stage, _, finding in read_findings(run.metrics_file) if finding.severity == "fatal")
    fatal = list(dict.fromkeys(f"{stage}: {finding.name}: {finding.evidence}" for stage, finding in found))
    return RunSummary(run.path, cells, losses, data, recorded.get("digest"), fatal)


def _train_command(run: RunFolder, tree: dict[str, Any]) -> str | None:
    """The command that continues the run; None when every stage is done."""
    unfinished = [
        name
        for name, stage in tree["stages"].items()
        if not stage.get("skip")
        and max(checkpoint.saved_steps(run.checkpoints(name)), default=0)
        < planned_steps(tree, name, run.checkpoints(name))
    ]
    return f"kineo train {run.config_file} --run {run.path}" if unfinished else None


def _evaluation_cells(
    run: RunFolder, main: str, stages: list[str], tree: dict[str, Any], split: str
) -> dict[str, Cell]:
    """The results of the sampling stage and of its codec in evaluation.json."""
    results = results_file.read_results(run)
    command = f"kineo evaluate {run.path}" + (f" --split {split}" if split != "validation" else "")
    source = merge(tree.get("data") or {}, tree["stages"][main].get("data") or {}).get("source", "moving_digits")
    samples = issubclass(find_task(tree["stages"][main]["task"]), SupportsSampling)
    newest = results_file.newest_result(results, split, main, "caption_accuracy")
    fill = command if samples and source == "moving_digits" else None
    accuracy = _result_cell(run, main, newest, "caption_accuracy", _percent, fill)
    if newest is not None and accuracy.value is not None and (start := _start_label(newest[1].get("labels", {}))):
        accuracy = replace(accuracy, text=f"{accuracy.text} ({start[0]})")
    cells = {"caption accuracy": accuracy}
    for name in ATTRIBUTES:
        cells[f"  {name} right"] = _result_cell(run, main, newest, name, _percent, None)
    codecs = [name for name in stages if issubclass(find_task(tree["stages"][name]["task"]), SupportsReconstruction)]
    named = (tree["stages"][main].get("codec"), main)  # of a cascade, the codec that the judged stage draws with
    codec = next((name for name in (*named, *codecs) if name in codecs), None)
    codec_task = find_task(tree["stages"][codec]["task"]) if codec is not None else None
    has_codes = codec_task is not None and issubclass(codec_task, Codec) and codec_task.has_codebook
    for row, metric, key, text in (
        ("PSNR, dB", "reconstruction", "psnr", lambda v: f"{v:.2f}"),
        ("codebook use", "codebook", "codebook_use", _percent),
        ("codebook perplexity", "codebook", "codebook_perplexity", lambda v: f"{v:,.1f}"),
    ):
        newest = results_file.newest_result(results, split, codec, metric) if codec else None
        fill = command if codec is not None and (has_codes or metric != "codebook") else None
        cells[row] = _result_cell(run, codec or "", newest, key, text, fill)
    for row, (metric, text) in FEATURE_METRICS.items():
        stage = codec or "" if metric in ("rfid", "lpips") else main
        newest = results_file.newest_result(results, split, stage, metric)
        cell = _result_cell(run, stage, newest, metric, text, None)
        if newest is None or cell.value is None:
            cells[row] = Cell(None, command=f"{command} --metrics {metric}", optional=True)
        else:  # comparable only with the same extractor and count
            labels = newest[1].get("labels", {})
            mode = [labels["mode"]] if "mode" in labels else []
            basis = [labels.get("extractor"), *mode, labels.get("count"), *_start_label(labels)]
            cells[row] = replace(cell, text=f"{cell.text} ({', '.join(map(str, basis))})")
    return cells


def _start_label(labels: dict[str, Any]) -> list[str]:
    """What samples started from, unless it was captions: samples of true embeddings are not text-to-image."""
    start = str(labels.get("drawn from", "captions"))
    return [] if start.startswith("captions") else [f"of {start}"]


def _result_cell(
    run: RunFolder,
    stage: str,
    newest: tuple[int, dict[str, Any]] | None,
    key: str,
    text: Callable[[float], str],
    command: str | None,
) -> Cell:
    if newest is None or not _is_number(newest[1].get("values", {}).get(key)):
        return Cell(None, command=command)
    step, value = newest[0], newest[1]["values"][key]
    labels = newest[1].get("labels", {})
    protocol = {label: labels[label] for label in PROTOCOL if label in labels}
    saved = checkpoint.saved_steps(run.checkpoints(stage))
    return Cell(value, text(value) + (f" @ step {step:,}" if saved and step != saved[-1] else ""), protocol=protocol)


def _best_loss(run: RunFolder, main: str, records: list[dict[str, Any]]) -> Cell:
    """The loss of the best checkpoint; else the lowest that was logged; else that of an evaluation."""
    best = checkpoint.read_best(run.checkpoints(main))
    if _is_number(best.get("loss")):
        return Cell(best["loss"], f"{best['loss']:.4g} @ step {best['step']:,}")
    held_out = [r for r in records if r["stage"] == main and r.get("split") == "validation"]
    losses = [r["loss"] for r in held_out if _is_number(r.get("loss"))]
    if losses:
        return Cell(min(losses), f"{min(losses):.4g}")
    newest = results_file.newest_result(results_file.read_results(run), "validation", main, "loss")
    return _result_cell(run, main, newest, "loss", lambda v: f"{v:.4g}", f"kineo evaluate {run.path}")


def _count_parameters(run: RunFolder, stage: str) -> int | None:
    """Parameters of a stage, from the headers of its files."""
    steps = checkpoint.saved_steps(run.checkpoints(stage))
    if not steps:
        return None
    try:
        return sum(map(math.prod, checkpoint.checkpoint_at(run.checkpoints(stage), steps[-1]).shapes("model").values()))
    except (OSError, ValueError, SafetensorError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _cell(value: float | None, text: Callable[[float], str], command: str | None) -> Cell:
    return Cell(None, command=command) if value is None else Cell(value, text(value))


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _millions(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e4 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
