"""`kineo evaluate`: show the trained stages of a run held-out data, batch by batch, to every metric that applies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from kineograph.core import distributed, heartbeat
from kineograph.core.batch import Batch, Prompts
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise, key_of
from kineograph.core.protocols import Source
from kineograph.core.registry import find_metric, metric_names
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task, sample_shape
from kineograph.data.captions import require_captions
from kineograph.data.config import Split
from kineograph.data.loader import Loader
from kineograph.data.open_source import open_source
from kineograph.evaluate import results_file, sheets
from kineograph.evaluate.console import Watching, beforehand, open_console
from kineograph.evaluate.extractor.registry import Extractors, parse_choices
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Metric, MetricSkipped, Result, WeightsMissing
from kineograph.sample.inference import draw, inference_mode, sampling_noise
from kineograph.stage.load import StageLoader, choose_sampling_stage
from kineograph.stage.spec import StageSpec, read_stage
from kineograph.train import checkpoint as checkpoints

Note = Callable[[str], None]
FIRST_LOOK = 64  # captions that metrics see before anything is drawn


@dataclass(frozen=True)
class StageResult:
    """One stage at one checkpoint, and what the metrics found."""

    stage: str
    task: str
    step: int
    results: dict[str, Result]


@dataclass
class Evaluation:
    run: Path
    split: str
    judged: list[StageResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        """A value by its name, of the last stage that has it: `evaluation["caption_accuracy"]`."""
        for judged in reversed(self.judged):
            for result in judged.results.values():
                if name in result.values:
                    return result.values[name]
        raise KeyError(name)

    def table(self) -> Any:
        """A rich table."""
        from rich.table import Table

        table = Table("stage", "metric", "value", "of", title=f"{self.run}: {self.split}", title_justify="left")
        for judged in self.judged:
            title = f"{judged.stage} @ {judged.step:,}"
            for metric, result in judged.results.items():
                labels = ", ".join(f"{key} {_short(value)}" for key, value in result.labels.items())
                for name, value in result.values.items():
                    shown = name if name.startswith(metric) else f"{metric}: {name}"
                    table.add_row(title, shown, _short(value), labels)
                    title = labels = ""
            table.add_section()
        return table

    def show(self) -> None:
        console = open_console()
        console.print(self.table())
        for line in (*self.left_out, *(f"wrote {path}" for path in self.files)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def evaluate(
    run: str | Path,
    metrics: Sequence[str] | None = None,
    *,
    samples: int = 256,
    split: str = "validation",
    checkpoint: str | int = "last",
    stage: str | None = None,
    device: str = "auto",
    seed: int = 0,
    batch: int = 32,
    dataset: Any = None,
    extractors: Sequence[str] = (),
    compile: bool = False,
    note: Note = distributed.print_note,
) -> Evaluation:
    """Judge a run: the stage that draws at `checkpoint`, the stages under it as it uses them (or `stage` alone).

    `metrics` None takes all that apply; named ones must, unless they wait for weights that can be fetched and others ran.
    `extractors`: what metrics look through, each `NAME|FILE` (for fid, rfid, kid, is) or `METRIC=NAME|FILE`.
    Writes RUN/evaluation.json and pictures under RUN/evaluation/. Several processes judge a part of the items each; the first one
    writes and speaks, and every one has the same numbers.
    """
    if split not in get_args(Split):
        raise InputError(f"--split {split}: use {' or '.join(get_args(Split)[1:])}")
    if samples < 1 or batch < 1:
        raise InputError(f"samples={samples}, batch={batch}: both start at 1")
    folder = RunFolder.existing(run)
    note = distributed.on_first_rank(note)
    chosen = {metric.name: metric for metric in map(find_metric, metrics if metrics is not None else metric_names())}
    # No CUDA graphs: what one batch leaves is still looked at while the next is drawn.
    stages = StageLoader(folder, distributed.resolve_device(device), compiled=compile, graphs=False)
    looking = Extractors(stages.device, parse_choices(list(extractors)))
    main, names = _stages_to_judge(folder, stage)
    found = Evaluation(folder.path, split)
    reasons: dict[str, list[MetricSkipped]] = {name: [] for name in chosen}
    tree = folder.config()
    run_seed = int(tree.get("seed", 0))
    for name in names:
        step = checkpoints.select(folder.checkpoints(name), checkpoint if name == main else "last").step
        spec = read_stage(tree, name)
        task = stages.load(name, step)
        source = _open(spec, split, run_seed, dataset)
        if len(source) < samples:
            note(
                f"{name}: the {split} split has {len(source)} items, so {len(source)} samples are judged instead of {samples}"
            )
        judge = StageEvaluator(
            spec,
            task,
            source,
            stages.device,
            samples,
            run_seed,
            looking,
            stages,
            seed,
            batch,
            name == main,
            shows=True,
            note=note,
            split=split,
        )
        results, pictures = judge.run(chosen, reasons)
        judged = StageResult(name, spec.config.task, step, results)
        where = f"{split}-{name}-step-{step:08d}"
        if distributed.is_first():
            found.files += pictures.write(folder.path / "evaluation", where, spec.data.shape.fps)
        if judged.results:
            weights = stages.loaded_digests[f"{folder.path}/{name}"]
            if distributed.is_first():
                results_file.add_results(
                    folder, split, name, step, judged.results, samples=judge.count, seed=seed, weights=weights
                )
            found.judged.append(judged)
    _report(found, chosen, reasons, asked=metrics is not None)
    found.files.insert(0, folder.path / "evaluation.json")
    return found


def _stages_to_judge(run: RunFolder, wanted: str | None) -> tuple[str, list[str]]:
    """The stage in question, and all trained stages that are judged, in the order of the run."""
    trained = [name for name in run.config()["stages"] if checkpoints.saved_steps(run.checkpoints(name))]
    if wanted is not None:
        return choose_sampling_stage(run, wanted), [wanted]
    if not trained:
        raise InputError(f"{run.path} has no checkpoint yet: train first")
    try:
        return choose_sampling_stage(run), trained
    except InputError:  # codecs alone
        return trained[-1], trained


def _report(found: Evaluation, chosen: dict[str, Any], reasons: dict[str, list[MetricSkipped]], asked: bool) -> None:
    """Metrics that judged nothing: an error when they were asked for by name, else a line if there is something to say. What only
    waits for something to be fetched is a line in either case, as long as another metric has an answer."""
    done = {name for judged in found.judged for name in judged.results}
    lines: dict[str, list[str]] = {}  # reason → metrics
    for name, metric in chosen.items():
        if name in done:
            continue
        why = "; ".join(dict.fromkeys(map(str, reasons[name])))
        waits = bool(done) and any(isinstance(reason, WeightsMissing) for reason in reasons[name])
        if asked and not waits:
            why = why or f"no trained stage of this run offers {', '.join(sorted(metric.needs))}"
            raise InputError(f"--metrics {name} does not apply to {found.run}: {why}")
        if why:
            lines.setdefault(why, []).append(name)
    for why, names in lines.items():
        found.left_out.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} left out: {why}")


class StageEvaluator:
    """One stage's judgement: a trained one that was loaded, or one that is being trained."""

    def __init__(
        self,
        spec: StageSpec,
        task: Task,
        source: Source,
        device: torch.device,
        samples: int,
        run_seed: int,
        extractors: Extractors,
        stages: StageLoader | None = None,
        seed: int = 0,
        batch: int = 32,
        draws: bool = True,
        shows: bool = False,
        note: Note = lambda line: None,
        split: str = "validation",
    ) -> None:
        self.split = split
        self.name, self.spec, self.task, self.source, self.device = spec.name, spec, task, source, device
        self.run_seed, self.seed, self.batch, self.shows = run_seed, seed, batch, shows
        self.extractors, self.stages, self.note = extractors, stages, note
        self.watching = Watching()
        self.draws = draws and task.can_sample
        self.count = min(samples, len(source))
        self.drawn_from: str | None = None  # what generated pictures were drawn from, beside their captions

    def run(
        self, chosen: dict[str, Any], reasons: dict[str, list[MetricSkipped]]
    ) -> tuple[dict[str, Result], sheets.Pictures]:
        """What the metrics found, and pictures of what they saw if it `shows` any; `reasons` hears why one of them judged nothing."""
        metrics = self.open(chosen, reasons)
        if metrics and "captions" in self.spec.task.reads_for(self.spec.config):
            require_captions(self.source, f"stage {self.name} ({self.spec.config.task})", f"{self.split} items")
        needed = frozenset().union(*(metric.needs for metric in metrics.values()))
        pictures = sheets.Pictures()
        with self._watched(metrics):
            for number, evidence in enumerate(self._evidence(needed) if metrics else ()):
                if not evidence.spare:
                    remarks = self._show(evidence, metrics, reasons)
                    if self.shows:
                        pictures.add(evidence, remarks, number)
        if self.shows:
            pictures = pictures.joined()
        results: dict[str, Result] = {}
        for name, metric in self._judged_by_all(metrics, reasons).items():
            try:
                results[name] = self._labelled(metric)
            except MetricSkipped as reason:
                reasons[name].append(reason)
        return results, pictures

    def _judged_by_all(self, metrics: dict[str, Metric], reasons: dict[str, list[MetricSkipped]]) -> dict[str, Metric]:
        """Those that no process has left out: their answers join what all of them saw, so all must ask for them."""
        missing = {name: [str(reason) for reason in found] for name, found in reasons.items() if name not in metrics}
        for elsewhere in distributed.data_all_gather_object(missing, self.device):
            for name, why in elsewhere.items():
                if metrics.pop(name, None) is not None:
                    reasons[name] += [MetricSkipped(reason) for reason in why]
        return metrics

    def _labelled(self, metric: Metric) -> Result:
        result = metric.compute()
        if "generated" not in metric.needs or self.drawn_from is None:
            return result
        return Result(result.values, {**result.labels, "drawn from": self.drawn_from})

    def open(self, chosen: dict[str, Any], reasons: dict[str, list[MetricSkipped]]) -> dict[str, Metric]:
        """The metrics that can judge this stage."""
        subject = self._subject()
        offered = self._offered(subject)
        metrics: dict[str, Metric] = {}
        for name, metric in chosen.items():
            if metric.needs <= offered:
                try:
                    metrics[name] = metric.open(subject)
                except MetricSkipped as reason:
                    reasons[name].append(reason)
        return metrics

    def _subject(self) -> EvalContext:
        captions = [self.source.caption(index) for index in range(min(FIRST_LOOK, len(self.source)))]
        known = [caption for caption in captions if caption]
        return EvalContext(
            self.name,
            self.task,
            self.spec.data,
            sample_shape(self.task, self.spec.data.shape),
            self.device,
            known if len(known) == len(captions) else None,
            self.extractors,
            self.stages,
        )

    def _offered(self, subject: EvalContext) -> frozenset[Kind]:
        """What this stage can show."""
        offered: set[Kind] = {"real", "losses"}
        if subject.captions is not None:
            offered.add("captions")
        if self.draws:
            offered.add("generated")
        if subject.shape.frames > 1:
            offered.add("clips")
        if self.task.reconstructs:
            offered.add("reconstruction")
        if hasattr(self.task, "encode") and getattr(self.task, "vocabulary", None):
            offered.add("tokens")
        return frozenset(offered)

    @contextmanager
    def _watched(self, metrics: dict[str, Metric]) -> Iterator[None]:
        """A line beforehand, and a bar meanwhile, where a person looks on."""
        if not metrics or not self.shows or not distributed.is_first():
            yield
            return
        shape = sample_shape(self.task, self.spec.data.shape)
        compiled = self.stages is not None and self.stages.compiled
        self.note(beforehand(self.name, self.device, self.count, shape, metrics, compiled))
        self.extractors.looked = self.watching.looked
        with self.watching.shown(self.name, -(-self.count // (self.batch * distributed.data_world()))):
            yield

    def _show(
        self, evidence: EvalBatch, metrics: dict[str, Metric], reasons: dict[str, list[MetricSkipped]]
    ) -> list[list[str]]:
        """To every metric; one that cannot judge it is left out from here on. → their remarks."""
        remarks = []
        for name, metric in list(metrics.items()):
            self.watching.doing(name)
            try:
                remarks.append(metric.update(evidence))
            except MetricSkipped as reason:
                reasons[name].append(reason)
                del metrics[name]
        return [said for said in remarks if said]

    def _evidence(self, needed: frozenset[Kind]) -> Iterator[EvalBatch]:
        """The same items in the same order every time; those that training validates on come first."""
        loader = Loader(
            self.source,
            seed=key_of(self.run_seed, "validation") >> 1,
            batch_size=distributed.data_world(),
            rank=distributed.data_rank(),
            world=distributed.data_world(),
        )
        noise_seed = key_of(key_of(self.run_seed, self.name) >> 1, "validation")  # as the Trainer's own
        together = self.batch * distributed.data_world()
        for real in self.watching.each(loader.fixed(self.count, together)):
            real = real.to(self.device)
            heartbeat.beat()
            evidence = EvalBatch(captions=real.captions, frame_mask=real.frame_mask, spare=real.spare)
            if real.pixels is not None:
                evidence.real = self.task.resize_reference(real.video) if "generated" in needed else real.video
            if "generated" in needed:
                self.watching.doing("drawing")
                evidence.generated = self._draw(real)
            with inference_mode(self.task, self.device):
                if "reconstruction" in needed:
                    shown = self.task.reconstruct(real)
                    assert shown is not None
                    evidence.reconstruction = shown.float().clamp(0, 1)
                if "tokens" in needed:
                    evidence.tokens = self.task.encode(real.video, real.frame_mask)  # type: ignore[operator]
                if "losses" in needed:
                    evidence.losses = self.task.validate(real, Noise(noise_seed, 0, real.slots))
            yield evidence

    def _draw(self, real: Batch) -> torch.Tensor:
        options = getattr(self.spec.config, "sample", None)
        prompts = Prompts(sampling_noise(self.seed, real.slots), real.captions, batch=real)
        if self.drawn_from is None:
            self.drawn_from = self.task.describe_start(prompts)
        return draw(self.task, prompts, options, self.device, self.batch).to(self.device)


def _open(spec: StageSpec, split: str, seed: int, dataset: Any) -> Source:
    if spec.data.source == "dataset" and dataset is None:
        raise InputError(f"stage {spec.name} was trained on a Dataset object: evaluate it from Python with dataset=…")
    return open_source(spec.data, split, seed, dataset)  # type: ignore[arg-type]
