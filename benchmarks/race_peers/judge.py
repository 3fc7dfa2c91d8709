"""Judges a peer with the race's metrics, on the held-out items that `kineo evaluate` takes for our run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.race_peers.contestant import Trained
from benchmarks.race_peers.track import Track
from kineograph.core.metric_options import MetricOptions
from kineograph.core.noise import key_of
from kineograph.core.registry import find_metric
from kineograph.data.loader import Loader
from kineograph.data.open_source import open_source
from kineograph.evaluate.extractor.registry import Extractors, parse_choices
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, MetricSkipped
from kineograph.race.results import COLUMNS

BATCH = {"cuda": 64, "cpu": 16}
EXTRA = {"caption_accuracy": "reconstructed_captions"}  # metric → one whose value is a bound of it


def find_metrics(record: dict[str, Any]) -> list[str]:
    """The metrics that the race computed for one of ours."""
    titles = {title for entry in record["entries"].values() for title in entry.get("figures", {})}
    names = [column.metric for column in COLUMNS if column.metric and column.title in titles]
    return [*names, *(EXTRA[name] for name in names if name in EXTRA)]


def judge(
    track: Track, trained: Trained, request: dict[str, Any], names: list[str], draw: Callable[[list[str]], Tensor]
) -> dict[str, Any]:
    """→ figures, labels, bounds, skipped"""
    spec = track.plan.stages[-1].spec
    source = open_source(spec.data, "validation", track.plan.seed)
    extractors = Extractors(track.device, MetricOptions(extractors=parse_choices(list(request["extractors"]))))
    captions = [caption for index in range(min(8, len(source))) for caption in source.formatted_captions(index)[:1]]
    context = EvalContext("peer", None, spec.data, track.shape, track.device, captions, extractors)
    metrics, skipped = {}, {}
    for name in names:
        metric = find_metric(name)
        if "reconstruction" in metric.needs and trained.reconstruct is None:
            continue
        try:
            metrics[name] = metric.open(context)
        except MetricSkipped as reason:
            skipped[name] = str(reason)
    loader = Loader(source, seed=key_of(track.plan.seed, "validation") >> 1, batch_size=1)
    times: list[tuple[int, float]] = []
    rows = min(BATCH[track.device.type], request["samples"])
    while True:
        try:
            for batch in loader.fixed_batches(request["samples"], rows):
                _show(batch.to(track.device), trained, draw, metrics, skipped, times)
            break
        except torch.OutOfMemoryError:
            if rows == 1 or times:  # half of the items are in the metrics already
                raise
            rows //= 2
            torch.cuda.empty_cache()
    return _collect(metrics, skipped, times)


@torch.no_grad()
def _show(
    batch: Any,
    trained: Trained,
    draw: Callable[[list[str]], Tensor],
    metrics: dict[str, Any],
    skipped: dict[str, str],
    times: list[tuple[int, float]],
) -> None:
    started = time.perf_counter()
    drawn = check_drawn(draw(batch.captions), batch.video.shape)
    times.append((len(batch), time.perf_counter() - started))
    print(f"drew {len(batch)} in {times[-1][1]:.1f} s", flush=True)
    shown = EvalBatch(captions=batch.captions, real=batch.video, generated=drawn)
    if trained.reconstruct is not None:
        shown.reconstruction = trained.reconstruct(batch.video).float().clamp(0, 1)
    for name, metric in list(metrics.items()):
        try:
            metric.update(shown)
        except MetricSkipped as reason:
            skipped[name] = str(reason)
            del metrics[name]


def check_drawn(drawn: Tensor, shape: torch.Size) -> Tensor:
    if drawn.shape != shape:
        raise RuntimeError(f"drew {tuple(drawn.shape)} for items of {tuple(shape)}")
    drawn = drawn.float()
    if not bool(drawn.isfinite().all()):  # also waits for the device, so that the time is that of drawing
        raise RuntimeError("some drawn pixels are not finite")
    return drawn.clamp(0, 1)


def _collect(metrics: dict[str, Any], skipped: dict[str, str], times: list[tuple[int, float]]) -> dict[str, Any]:
    figures, labels = {}, {}
    results = {}
    for name, metric in metrics.items():
        try:
            results[name] = metric.compute()
        except MetricSkipped as reason:
            skipped[name] = str(reason)
    for column in COLUMNS:
        if column.metric in results and column.key in results[column.metric].values:
            figures[column.title] = results[column.metric].values[column.key]
            labels[column.title] = results[column.metric].labels
    accuracy = labels.get("caption accuracy", {})
    bounds = {name: accuracy[name] for name in ("ceiling", "chance") if name in accuracy}
    if "reconstructed_captions" in results:
        bounds["codec"] = results["reconstructed_captions"].values["reconstructed_captions"]
    timed = times[1:] or times
    figures["samples/s"] = sum(rows for rows, _ in timed) / sum(seconds for _, seconds in timed)
    judged = sum(rows for rows, _ in times)
    return {"figures": figures, "labels": labels, "bounds": bounds, "samples": judged, "skipped": skipped}
