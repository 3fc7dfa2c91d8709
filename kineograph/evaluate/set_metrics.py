"""`kineo metrics`: compare two sets of pictures or clips, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kineograph.core import distributed
from kineograph.core.console import open_console
from kineograph.core.errors import InputError
from kineograph.core.metric_options import MetricOptions
from kineograph.core.registry import find_metric
from kineograph.core.run_folder import RunFolder, write_json
from kineograph.data.open_source import Split
from kineograph.evaluate import results_file
from kineograph.evaluate.console import ProgressBar, format_value
from kineograph.evaluate.extractor.i3d import SHORTEST
from kineograph.evaluate.extractor.registry import Extractors
from kineograph.evaluate.metric_api import (
    DistributionMetric,
    EvalBatch,
    EvalContext,
    Metric,
    MetricSkipped,
    Result,
    Side,
)
from kineograph.evaluate.picture_sets import (
    MediaFolder,
    PictureSet,
    open_folder,
    open_run_split,
    pair_files,
)
from kineograph.evaluate.saved_statistics import (
    SUFFIX,
    SavedStatistics,
    check_new_file,
    read_statistics,
    write_statistics,
)
from kineograph.media.filenames import check_writable

TWO_SETS = ("fid", "kid", "fvd")
PAIRS = ("paired", "paired_lpips")
METRICS = (*TWO_SETS, "is", *PAIRS)
Anything = MediaFolder | PictureSet | SavedStatistics


@dataclass
class SetComparison:
    """Results of `kineo metrics`."""

    drawn: str
    reference: str | None
    results: dict[str, Result] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # metric → reason
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)  # drawn and reference: items, sizes
    named: bool = False
    files: list[Path] = field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        for result in self.results.values():
            if name in result.values:
                return result.values[name]
        raise KeyError(name)

    @property
    def is_incomplete(self) -> bool:
        """A metric that was asked for by name is missing."""
        return self.named and bool(self.skipped)

    def list_skipped(self) -> list[str]:
        """`fid, kid: reason`"""
        lines: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            lines.setdefault(reason, []).append(name)
        return [f"{', '.join(names)}: {reason}" for reason, names in lines.items()]

    def show(self) -> None:
        from rich.table import Table

        title = self.drawn + (f" against {self.reference}" if self.reference is not None else "")
        table = Table("metric", "value", "of", title=title, title_justify="left")
        for metric, result in self.results.items():
            labels = ", ".join(f"{key} {format_value(value)}" for key, value in result.labels.items())
            for name, value in result.values.items():
                table.add_row(name if name.startswith(metric) else f"{metric}: {name}", format_value(value), labels)
                labels = ""
        console = open_console()
        if self.results:
            console.print(table)
        lines = [f"skipped {line}" for line in self.list_skipped()]
        for line in (*lines, *(f"wrote {path}" for path in self.files)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def json(self) -> dict[str, Any]:
        results = {name: results_file.to_record(result) for name, result in self.results.items()}
        return {**self.sets, "results": results, "skipped": self.skipped}


def compare_sets(
    drawn: str | Path,
    reference: str | Path | None = None,
    metrics: Sequence[str] | None = None,
    *,
    options: MetricOptions | None = None,
    split: Split | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    fps: float | None = None,
    samples: int | None = None,
    save_stats: Path | None = None,
    out: Path | None = None,
    device: str = "auto",
    batch: int = 32,
    note: Callable[[str], None] = distributed.print_note,
) -> SetComparison:
    """Compare `drawn` with `reference`: folders, statistics (.npz), or, for the reference, a run, whose training split is read.

    `metrics`: None for fid, kid, is, and fvd of clips. `split` chooses the items of the reference; `size`, `frames` and `fps` say how files are read.
    `samples`: at most so many items of each set. `save_stats`: write the reference's statistics, or those of `drawn` where it is alone.
    """
    names = _check_names(metrics, reference, save_stats)
    if save_stats is not None:
        check_new_file(save_stats)
    if out is not None:
        check_writable(out.parent)
    reading = {"size": size, "frames": frames, "fps": fps, "limit": samples, "note": note}
    left = _open_side(drawn, "A", None if reference is not None else split, reading)
    right = _open_side(reference, "B", split, reading) if reference is not None else None
    comparison = SetComparison(str(drawn), str(reference) if reference is not None else None, named=metrics is not None)
    opened = _open_metrics(names, left, right, options, device, comparison)
    progress = ProgressBar()
    for side, items in (("generated", left), ("real", right)):
        if items is not None:
            _feed(opened, side, items, batch, comparison, progress)  # type: ignore[arg-type]
    _feed_pairs(opened, left, right, comparison)
    if save_stats is not None:
        saved = SavedStatistics(save_stats.name)
        for metric in opened.values():
            if isinstance(metric, DistributionMetric):
                metric.save("real" if right is not None else "generated", saved)
        if not saved.protocol:
            reason = "; ".join(dict.fromkeys(comparison.skipped.values()))
            raise InputError(
                f"--save-stats {save_stats}: there are no statistics to save: {reason or 'name fid, kid or fvd'}"
            )
        write_statistics(save_stats, saved)
        comparison.files.append(save_stats)
    for name, metric in opened.items():
        if right is None and name in TWO_SETS:
            continue
        try:
            result = metric.compute()
            labels = result.labels | _label_sizes(left, right if name != "is" else None)
            caution = {key: labels.pop(key) for key in ("caution",) if key in labels}
            comparison.results[name] = Result(result.values, labels | caution)
        except MetricSkipped as reason_:
            comparison.skipped[name] = str(reason_)
    if not comparison.results and not comparison.files:
        raise InputError(f"no metric could be computed: {'; '.join(comparison.list_skipped())}")
    for name, items in (("drawn", left), ("reference", right)):
        if items is not None:
            comparison.sets[name] = _describe(items)
    if out is not None:
        write_json(out, comparison.json())
        comparison.files.append(out)
    return comparison


def _check_names(metrics: Sequence[str] | None, reference: str | Path | None, save_stats: Path | None) -> list[str]:
    names = [name.replace("-", "_") for name in metrics] if metrics is not None else [*TWO_SETS, "is"]
    for name in names:
        if name not in METRICS:
            raise InputError(f"--metrics {name} is not a metric of two sets: use {', '.join(METRICS)}")
    if reference is not None:
        return names
    if save_stats is None:
        if metrics is None:
            return ["is"]
        if alone := [name for name in names if name != "is"]:
            raise InputError(f"--metrics {', '.join(alone)} compares two sets: kineo metrics A B")
        return names
    return [name for name in names if name in TWO_SETS]


def _open_side(value: str | Path, which: str, split: Split | None, reading: dict[str, Any]) -> Anything:
    path = Path(value).expanduser()
    if path.suffix == SUFFIX:
        return read_statistics(path)
    if RunFolder(path).exists():
        if which == "A":
            raise InputError(
                f"{path} is a run: kineo evaluate {path} --reference B draws with it and compares; kineo metrics takes the "
                "folder of its drawn files"
            )
        return open_run_split(path, split or "train", reading["limit"], reading["note"])
    return open_folder(path, split=split, **reading)


def _open_metrics(
    names: list[str],
    left: Anything,
    right: Anything | None,
    options: MetricOptions | None,
    device: str,
    comparison: SetComparison,
) -> dict[str, Metric]:
    target = distributed.resolve_device(device)
    sets = [items for items in (left, right) if items is not None and not isinstance(items, SavedStatistics)]
    if not sets:
        if right is None:
            raise InputError(f"{comparison.drawn} holds statistics: name a second set to compare them with")
        others = [name for name in names if name != "fid"] if comparison.named else []
        comparison.skipped |= dict.fromkeys(others, "both sets are statistics: only fid compares these")
        return {"fid": _FidOfStatistics(left, right)} if "fid" in names else {}  # type: ignore[dict-item, arg-type]
    shape = sets[0].shape()
    context = EvalContext("", None, None, shape, target, None, Extractors(target, options), reference=True)
    opened: dict[str, Metric] = {}
    for name in names:
        try:
            if name == "fvd" and not comparison.named and shape.frames < SHORTEST:
                continue  # pictures
            if name in PAIRS and not (isinstance(left, MediaFolder) and isinstance(right, MediaFolder)):
                raise MetricSkipped("pairs are files of two folders: name both")
            if name == "is" and isinstance(left, SavedStatistics):
                raise MetricSkipped("it needs pictures, not statistics")
            opened[name] = find_metric(name).open(context)
            for side, items in (("generated", left), ("real", right)):
                if isinstance(items, SavedStatistics) and isinstance(opened[name], DistributionMetric):
                    opened[name].load(side, items)  # type: ignore[attr-defined]
        except MetricSkipped as reason:
            opened.pop(name, None)
            comparison.skipped[name] = str(reason)
    return opened


class _FidOfStatistics:
    """FID of two files of statistics: no network is needed."""

    name = "fid"
    needs: frozenset[Any] = frozenset()

    def __init__(self, drawn: SavedStatistics, reference: SavedStatistics) -> None:
        self.drawn, self.reference = drawn, reference

    def update(self, batch: EvalBatch) -> None:
        raise AssertionError("statistics have no items")

    def compute(self) -> Result:
        from kineograph.evaluate.statistics import frechet_distance

        ours, theirs = (saved.gaussians.get("fid") for saved in (self.drawn, self.reference))
        if ours is None or theirs is None or len(ours.mean) != len(theirs.mean):
            widths = " and ".join(str(len(side.mean)) if side else "no" for side in (ours, theirs))
            raise MetricSkipped(f"{self.drawn.name} and {self.reference.name} hold {widths} features")
        protocol = self.reference.protocol.get("fid", {"extractor": "not stated"})
        theirs = self.reference.gaussian("fid", len(theirs.mean), self.drawn.protocol.get("fid") or protocol)
        labels = {key: value for key, value in protocol.items() if key != "count"}
        counts = {"count": ours.count or "not stated", "real": theirs.count or "not stated"}
        named = {"drawn": self.drawn.label("fid"), "reference": self.reference.label("fid")}
        return Result({"fid": frechet_distance(theirs, ours)}, {**labels, **counts, **named})


def _feed(
    metrics: dict[str, Metric],
    side: Side,
    items: Anything,
    batch: int,
    comparison: SetComparison,
    progress: ProgressBar,
) -> None:
    if isinstance(items, SavedStatistics):
        return
    wanted = [
        name
        for name, metric in metrics.items()
        if (isinstance(metric, DistributionMetric) if name != "is" else side == "generated")
    ]
    if not wanted:
        return
    with progress.show(items.label, -(-len(items) // batch)):
        for clips in progress.track(items.batches(batch)):
            real, generated = (clips.pixels, None) if side == "real" else (None, clips.pixels)
            items_ = EvalBatch(real=real, generated=generated, frame_mask=clips.frame_mask)
            for name in [name for name in wanted if name in metrics]:
                metric = metrics[name]
                try:
                    if isinstance(metric, DistributionMetric):
                        metric.add(items_, side)
                    else:
                        metric.update(items_)
                except MetricSkipped as reason:
                    del metrics[name]
                    comparison.skipped[name] = str(reason)


def _feed_pairs(metrics: dict[str, Metric], left: Anything, right: Anything | None, comparison: SetComparison) -> None:
    names = [name for name in PAIRS if name in metrics]
    if not names:
        return
    assert isinstance(left, MediaFolder) and isinstance(right, MediaFolder)
    for drawn, real in pair_files(left, right):
        batch = EvalBatch(real=real[None], generated=drawn[None])
        for name in [name for name in names if name in metrics]:
            try:
                metrics[name].update(batch)
            except MetricSkipped as reason:
                del metrics[name]
                comparison.skipped[name] = f"{reason}; --size HxW reads both folders at one size"


def _label_sizes(left: Anything, right: Anything | None) -> dict[str, str]:
    """Sizes of the files before the network resizes them."""
    sets = {"size": left, "real size": right}
    return {
        name: items.describe_sizes() for name, items in sets.items() if isinstance(items, MediaFolder) and items.sizes
    }


def _describe(items: Anything) -> dict[str, Any]:
    if isinstance(items, SavedStatistics):
        return {"statistics": items.name}
    described: dict[str, Any] = {"items": len(items), "label": items.label}
    if isinstance(items, MediaFolder):
        described |= {"read": sum(items.sizes.values()), "sizes": items.describe_sizes()}
        described |= {"frames": items.frames or "all", "fps": items.fps or "of the file"}
    return described


def parse_size(text: str | None) -> tuple[int, int] | None:
    """`64` or `48x64` → height, width"""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and 0 < int(part) <= 16_384 for part in parts):
        raise InputError(f"--size {text}: give a number or HxW, such as 64 or 48x64, up to 16384")
    return int(parts[0]), int(parts[-1])
