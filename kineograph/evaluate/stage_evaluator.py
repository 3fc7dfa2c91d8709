"""Evaluates one stage: a trained one that was loaded, or one in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch

from kineograph.core import distributed
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import (
    ComparesSamples,
    DescribesStart,
    SupportsReconstruction,
    SupportsSampling,
    can_reconstruct,
    makes_sound,
    resize_reference,
    sample_shape,
)
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise, key_of
from kineograph.core.protocols import Source
from kineograph.core.task import Codec, Task
from kineograph.data.captions import require_captions
from kineograph.data.loader import Loader
from kineograph.evaluate.console import ProgressBar, describe_work
from kineograph.evaluate.extractor.registry import Extractors
from kineograph.evaluate.metric_api import (
    DistributionMetric,
    EvalBatch,
    EvalContext,
    Kind,
    Metric,
    MetricSkipped,
    Result,
)
from kineograph.evaluate.picture_sets import PictureSet
from kineograph.evaluate.saved_statistics import SavedStatistics
from kineograph.evaluate.sheets import SampleSheets
from kineograph.sample.batches import MOST, RowBatches
from kineograph.sample.inference import Drawn, draw, inference_mode, sampling_noise
from kineograph.sample.limits import ClipLimits
from kineograph.sample.request import SampleRequest
from kineograph.sample.rows import Row, RowReader, group_rows, make_prompts
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import StageSpec

CAPTIONS_TO_CHECK = 64  # metrics see so many captions before anything is sampled
Reasons = dict[str, list[MetricSkipped]]  # metric → why it was skipped


class StageEvaluator:
    def __init__(
        self,
        spec: StageSpec,
        task: Task,
        source: Source | None,
        device: torch.device,
        samples: int,
        run_seed: int,
        extractors: Extractors,
        stages: StageLoader | None = None,
        seed: int = 0,
        batch: int | None = None,
        generate: bool = True,
        interactive: bool = False,
        note: Callable[[str], None] = lambda line: None,
        split: str = "validation",
        validation_batch: int | None = None,
        named: bool = True,
        reference: PictureSet | SavedStatistics | None = None,
        save_statistics: bool = False,
        prompts: SampleRequest | None = None,
    ) -> None:
        """`generate`: sample from the stage, if it can. `interactive`: announce the work, show progress, collect sheets.

        `named`: the user chose the metrics; otherwise those of pairs apply only where samples start from real items. `reference`: what
        distributions are compared with; None: the held-out items. `save_statistics`: collect those of the real items in `statistics`.
        `batch` is the number of samples of one process at a time (None: as many as fit), `validation_batch` that of all
        processes in training's validation. With `prompts`, these are drawn and judged instead of the items of `source`.
        """
        self.spec, self.task, self.source, self.device = spec, task, source, device
        self.name, self.shape = spec.name, sample_shape(task, spec.data.shape)
        self.run_seed, self.seed, self.split = run_seed, seed, split
        self.batch, self.validation_batch = batch or MOST, validation_batch
        compiled = stages is not None and stages.compiled
        # In training, the other processes cannot know that one of them takes fewer at a time.
        self.batches = RowBatches(
            batch, device, measure=interactive and not compiled, retry=interactive or not distributed.is_active(),
            key="evaluate.batch", note=note,
        )  # fmt: skip
        self.extractors, self.stages, self.interactive, self.note = extractors, stages, interactive, note
        self.generate = generate and isinstance(task, SupportsSampling)
        self.rows: list[Row] = []  # of the prompts
        if prompts is not None:
            limits = ClipLimits(task, spec.config.task, self.shape)
            self.rows = RowReader(limits, spec.data, spec.config.sample_options, note).read(prompts)
        self.count = len(self.rows) or min(samples, len(source or ()))
        self.named, self.reference = named, reference
        self.statistics = SavedStatistics("") if save_statistics else None
        self.progress = ProgressBar()
        self.start: str | None = None  # what samples start from, beside their captions
        self.drawing: list[tuple[int, float]] = []  # samples and seconds of each batch that was drawn

    def run(self, chosen: dict[str, Any], reasons: Reasons) -> tuple[dict[str, Result], SampleSheets]:
        """Compute the chosen metrics that apply; append to `reasons` why others do not."""
        metrics = self.open(chosen, reasons)
        if self.interactive and self.generate and self.extractors.options.from_items and not self._starts_from_items():
            raise InputError(
                f"--from-items has no effect on stage {self.name} ({self.spec.config.task}): it draws from captions and noise alone"
            )
        if metrics and self.source is not None and "captions" in self.spec.config.reads():
            require_captions(self.source, f"stage {self.name} ({self.spec.config.task})", f"{self.split} items")
        self._read_reference(metrics, reasons)
        needed = frozenset().union(*(metric.needs for metric in metrics.values()))
        sheets = SampleSheets()
        with self._show_progress(metrics):
            batches = self._prompt_batches() if self.rows else self._batches(needed)
            for number, batch in batches if metrics else ():
                if not batch.spare:
                    remarks = self._update(batch, metrics, reasons)
                    if self.interactive:
                        sheets.add(batch, remarks, number)
        if self.interactive:
            sheets = sheets.gather()
        self._drop_skipped_elsewhere(metrics, reasons)
        results: dict[str, Result] = {}
        for name, metric in metrics.items():
            try:
                result = metric.compute()
            except MetricSkipped as reason:
                reasons[name].append(reason)
                continue
            labels = {"drawn from": self.start} if self.start is not None and "generated" in metric.needs else {}
            if _compares_with_reference(metric):
                if self.reference is not None and not isinstance(self.reference, SavedStatistics):
                    labels["reference"] = self.reference.label
                if self.statistics is not None:
                    metric.save("real", self.statistics)
            results[name] = Result(result.values, result.labels | labels)
        return results, sheets

    def _read_reference(self, metrics: dict[str, Metric], reasons: Reasons) -> None:
        """Show the reference to the metrics that compare distributions; drop those that it does not suit."""
        wanted = {name: metric for name, metric in metrics.items() if _compares_with_reference(metric)}
        if self.reference is None or not wanted:
            return

        def show(change: Callable[[DistributionMetric], None]) -> None:
            for name, metric in list(wanted.items()):
                try:
                    change(metric)
                except MetricSkipped as reason:
                    reasons[name].append(reason)
                    del wanted[name], metrics[name]

        reference = self.reference
        if isinstance(reference, SavedStatistics):
            show(lambda metric: metric.load("real", reference))
            return
        if self.interactive:
            self.note(f"{self.name}: reading the reference, {reference.label}, for {', '.join(wanted)}")
        for clips in reference.batches(self.batch):
            items = EvalBatch(real=clips.pixels, frame_mask=clips.frame_mask)
            show(lambda metric, items=items: metric.add(items, "real"))  # type: ignore[misc]

    def open(self, chosen: dict[str, Any], reasons: Reasons) -> dict[str, Metric]:
        """Open the metrics that apply to this stage."""
        if self.source is not None:
            checked = range(min(CAPTIONS_TO_CHECK, len(self.source)))
            captions = [next(iter(self.source.formatted_captions(index)), None) for index in checked]
        else:
            captions = [row.caption for row in self.rows[:CAPTIONS_TO_CHECK]]
        context = EvalContext(
            self.name,
            self.task,
            self.spec.data,
            self.shape,
            self.device,
            [caption for caption in captions if caption] if all(captions) else None,
            self.extractors,
            self.stages,
            reference=self.reference is not None,
        )
        available = self._available(context)
        if any("paired" in metric.needs for metric in chosen.values()) and self.generate and self.source is not None:
            available |= {"paired"} if self.named or self._starts_from_items() else set()
        metrics: dict[str, Metric] = {}
        for name, metric in chosen.items():
            if metric.needs <= available:
                try:
                    metrics[name] = metric.open(context)
                except MetricSkipped as reason:
                    reasons[name].append(reason)
        return metrics

    def _available(self, context: EvalContext) -> frozenset[Kind]:
        kinds: set[Kind] = {"real", "losses"} if self.source is not None else set()
        if context.captions is not None:
            kinds.add("captions")
        if self.generate:
            kinds.add("generated")
            if makes_sound(self.task):
                kinds.add("sound")
        if self.shape.frames > 1:
            kinds.add("clips")
        if self.source is None:
            return frozenset(kinds if self.reference is None else {*kinds, "real"})
        if can_reconstruct(self.task):
            kinds.add("reconstruction")
        if isinstance(self.task, Codec) and self.task.vocabulary:
            kinds.add("tokens")
        return frozenset(kinds)

    def _starts_from_items(self) -> bool:
        """Whether samples are drawn from real items, such as their embeddings, and not from captions alone."""
        if not isinstance(self.task, DescribesStart) or self.source is None:
            return False
        world = distributed.data_world()
        first = next(iter(self._open_loader().fixed_batches(world, world))).to(self.device)
        start = self.task.describe_start(self._make_prompts(first))
        return start is not None and not start.startswith("captions")

    @contextmanager
    def _show_progress(self, metrics: dict[str, Metric]) -> Iterator[None]:
        if not metrics or not self.interactive or not distributed.is_first():
            yield
            return
        compiled = self.stages is not None and self.stages.compiled
        self.note(describe_work(self.name, self.device, self.count, self.shape, metrics, compiled))
        self.extractors.on_progress = self.progress.set_activity
        with self.progress.show(self.name, -(-self.count // (self.batch * distributed.data_world()))):
            yield

    def _update(self, batch: EvalBatch, metrics: dict[str, Metric], reasons: Reasons) -> list[list[str]]:
        """Show a batch to every metric; drop those that skip it. → the metrics' remarks on its rows"""
        remarks = []
        for name, metric in list(metrics.items()):
            self.progress.set_activity(name)
            try:
                remarks.append(metric.update(batch))
            except MetricSkipped as reason:
                reasons[name].append(reason)
                del metrics[name]
        return [rows for rows in remarks if rows]

    def _drop_skipped_elsewhere(self, metrics: dict[str, Metric], reasons: Reasons) -> None:
        """Drop the metrics that any process has skipped: `compute` is collective."""
        skipped = {name: [str(reason) for reason in why] for name, why in reasons.items() if name not in metrics}
        for other in distributed.data_all_gather_object(skipped, self.device):
            for name, why in other.items():
                if metrics.pop(name, None) is not None:
                    reasons[name] += [MetricSkipped(reason) for reason in why]

    def _batches(self, needed: frozenset[Kind]) -> Iterator[tuple[int, EvalBatch]]:
        """The same items in the same order every time, first those that training validates on. → the number of the loaded batch, a part of it"""
        assert self.source is not None
        world = distributed.data_world()
        loader = self._open_loader()
        size, batches = self.batch * world, self.batches
        if isinstance(self.task, ComparesSamples) and self.validation_batch is not None:
            size = min(self.validation_batch, self.count)
            batches = RowBatches(size, self.device, retry=False)  # a part of the batch would have another loss
        for number, real in enumerate(self.progress.track(loader.fixed_batches(self.count, size))):
            real = real.to(self.device)
            for batch in batches.map(len(real), partial(self._evaluate_rows, real, needed)):
                yield number, batch

    def _evaluate_rows(self, whole: Batch, needed: frozenset[Kind], rows: slice) -> EvalBatch:
        indices = range(len(whole))[rows]
        real = whole if len(indices) == len(whole) else whole.rows(indices)
        noise_seed = key_of(key_of(self.run_seed, self.name) >> 1, "validation")  # the Trainer's
        batch = EvalBatch(captions=real.captions, frame_mask=real.frame_mask, spare=real.spare)
        if real.pixels is not None:
            batch.real = resize_reference(self.task, real.video) if "generated" in needed else real.video
        if "generated" in needed:
            self.progress.set_activity("drawing")
            drawn = self._sample(real)
            batch.generated, batch.sound = drawn.pixels.to(self.device), drawn.sound
            batch.real_sound = real.extra.get("audio")
        with inference_mode(self.task, self.device):
            if "reconstruction" in needed:
                assert isinstance(self.task, SupportsReconstruction)
                batch.reconstruction = self.task.reconstruct(real).float().clamp(0, 1)
            if "tokens" in needed:
                assert isinstance(self.task, Codec)
                batch.tokens = self.task.encode(real.video, real.frame_mask)
                batch.token_mask = None if real.frame_mask is None else self.task.mask_for(real.frame_mask)
            if "losses" in needed:
                batch.losses = self.task.validate(real, Noise(noise_seed, 0, real.slots))
        return batch

    def _open_loader(self) -> Loader:
        world = distributed.data_world()
        seed = key_of(self.run_seed, "validation") >> 1
        assert self.source is not None
        return Loader(self.source, seed=seed, batch_size=world, rank=distributed.data_rank(), world=world)

    def _make_prompts(self, real: Batch) -> Prompts:
        noise, from_items = sampling_noise(self.seed, real.slots), self.extractors.options.from_items
        return Prompts(noise, real.captions, batch=real, from_items=from_items)

    def _sample(self, real: Batch) -> Drawn:
        prompts = self._make_prompts(real)
        if self.start is None and isinstance(self.task, DescribesStart):
            self.start = self.task.describe_start(prompts)
        return self._draw(prompts)

    def _draw(self, prompts: Prompts) -> Drawn:
        whole = RowBatches(len(prompts), self.device, retry=False)  # the caller takes fewer rows
        started = time.perf_counter()
        drawn = draw(self.task, prompts, self.spec.config.sample_options, self.device, whole)
        self.drawing.append((len(prompts), time.perf_counter() - started))
        return drawn

    def count_drawn_per_second(self) -> float | None:
        """Samples that this process drew a second, without its first batch if there are more; None: it drew none."""
        timed = self.drawing[1:] or self.drawing
        return sum(rows for rows, _ in timed) / sum(seconds for _, seconds in timed) if timed else None

    def _prompt_batches(self) -> Iterator[tuple[int, EvalBatch]]:
        """The prompts, shared by the processes; those of one shape together."""
        for number, indices in enumerate(group_rows(self.rows)):
            mine = indices[distributed.data_rank() :: distributed.data_world()]
            self.progress.set_activity("drawing")
            for batch in self.progress.track(self.batches.map(len(mine), partial(self._draw_rows, mine))):
                yield number, batch

    def _draw_rows(self, mine: list[int], part: slice) -> EvalBatch:
        rows = [self.rows[index] for index in mine[part]]
        captions = [row.caption or "" for row in rows] if rows[0].caption is not None else None
        drawn = self._draw(make_prompts(rows))
        return EvalBatch(captions=captions, generated=drawn.pixels.to(self.device), sound=drawn.sound)


def _compares_with_reference(metric: Metric) -> TypeGuard[DistributionMetric]:
    """rfid compares each picture with its own reconstruction."""
    return isinstance(metric, DistributionMetric) and "generated" in metric.needs
