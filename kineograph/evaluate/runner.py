"""`kineo evaluate`: compute every metric that applies to the trained stages of a run, on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from kineograph.core import distributed
from kineograph.core.capabilities import ChecksHealth
from kineograph.core.config import Tree, parse
from kineograph.core.errors import InputError, NoData
from kineograph.core.health import read_findings
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.protocols import Source
from kineograph.core.registry import find_metric, metric_names
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.data.open_source import Split, open_source
from kineograph.evaluate import results_file
from kineograph.evaluate.console import open_console
from kineograph.evaluate.extractor.registry import Extractors, parse_choices
from kineograph.evaluate.metric_api import Result, WeightsMissing
from kineograph.evaluate.stage_evaluator import Reasons, StageEvaluator
from kineograph.stage.data_record import check_items, move_data
from kineograph.stage.load import StageLoader, choose_sampling_stage
from kineograph.stage.spec import StageSpec, read_stage
from kineograph.train import checkpoint as checkpoints
from kineograph.train.config import TrainConfig


@dataclass(frozen=True)
class StageResult:
    """The results of one stage at one checkpoint."""

    stage: str
    task: str
    step: int
    results: dict[str, Result]


@dataclass
class Evaluation:
    run: Path
    split: str
    stages: list[StageResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # lines that name skipped metrics and the reason
    findings: list[str] = field(
        default_factory=list
    )  # lines about stages that went wrong in training, or look like it here
    files: list[Path] = field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        """A value by its name, from the last stage that has it: `evaluation["caption_accuracy"]`."""
        for stage in reversed(self.stages):
            for result in stage.results.values():
                if name in result.values:
                    return result.values[name]
        raise KeyError(name)

    def table(self) -> Any:
        """A rich table."""
        from rich.table import Table

        table = Table("stage", "metric", "value", "of", title=f"{self.run}: {self.split}", title_justify="left")
        for stage in self.stages:
            title = f"{stage.stage} @ {stage.step:,}"
            for metric, result in stage.results.items():
                labels = ", ".join(f"{key} {_format(value)}" for key, value in result.labels.items())
                for name, value in result.values.items():
                    table.add_row(
                        title, name if name.startswith(metric) else f"{metric}: {name}", _format(value), labels
                    )
                    title = labels = ""
            table.add_section()
        return table

    def show(self) -> None:
        console = open_console()
        console.print(self.table())
        for line in (*self.findings, *self.skipped, *(f"wrote {path}" for path in self.files)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _validation_batch(train: Tree) -> int:
    """Samples of all processes in a batch of training's validation."""
    return parse(
        TrainConfig, {key: train[key] for key in ("batch_size", "accumulate") if key in train}
    ).micro_batch_size


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
    moved: Sequence[str] = (),
    extractors: Sequence[str] = (),
    compile: bool = False,
    note: Callable[[str], None] = distributed.print_note,
) -> Evaluation:
    """Evaluate the sampling stage of a run at `checkpoint` and the stages below it, or `stage` alone.

    `metrics`: None for all that apply. A named metric that does not apply is an error, unless only its weights are missing and
    another metric has a result. `extractors`: `NAME|FILE` for fid, rfid, kid and is, or `METRIC=NAME|FILE`.
    `moved`: where the data lie now, such as data.folder=NEW; they must be the items that the run was trained on.
    Writes RUN/evaluation.json and image sheets under RUN/evaluation/. Several processes share the items; all return the same
    numbers, and the first one writes and prints.
    """
    if split not in get_args(Split):
        raise InputError(f"--split {split}: use {' or '.join(get_args(Split)[1:])}")
    if samples < 1 or batch < 1:
        raise InputError(f"samples={samples}, batch={batch}: use 1 or more")
    folder = RunFolder.existing(run)
    note = distributed.on_first_rank(note)
    chosen = {metric.name: metric for metric in map(find_metric, metrics if metrics is not None else metric_names())}
    # No CUDA graphs: a batch is still in use while the next is sampled.
    stages = StageLoader(folder, distributed.resolve_device(device), compiled=compile, graphs=False)
    enable_flash_attention_3(stages.device)
    opened = Extractors(stages.device, parse_choices(list(extractors)))
    main, names = _select_stages(folder, stage)
    evaluation = Evaluation(folder.path, split)
    reasons: Reasons = {name: [] for name in chosen}
    tree = folder.config()
    run_seed = int(tree.get("seed", 0))
    for name in names:
        step = checkpoints.select(folder.checkpoints(name), checkpoint if name == main else "last").step
        spec = read_stage(tree, name)
        task = stages.load(name, step)
        if spec.data.source == "dataset" and dataset is None:
            raise InputError(f"stage {name} was trained on a Dataset object: evaluate it from Python with dataset=…")
        spec = replace(spec, data=move_data(spec.data, moved))
        source = _open_items(folder, spec, split, run_seed, dataset, note)  # type: ignore[arg-type]
        if len(source) < samples:
            note(f"{name}: the {split} split has {len(source)} items: evaluating {len(source)} samples, not {samples}")
        evaluator = StageEvaluator(
            spec,
            task,
            source,
            stages.device,
            samples,
            run_seed,
            opened,
            stages,
            seed,
            batch,
            generate=name == main,
            interactive=True,
            note=note,
            split=split,
            validation_batch=_validation_batch(tree["stages"][name].get("train", {})),
        )
        results, sheets = evaluator.run(chosen, reasons)
        if distributed.is_first():
            stem = f"{split}-{name}-step-{step:08d}"
            evaluation.files += sheets.write(folder.path / "evaluation", stem, spec.data.shape.fps)
        if results:
            weights = stages.loaded_digests[f"{folder.path}/{name}"]
            if distributed.is_first():
                results_file.add_results(
                    folder, split, name, step, results, samples=evaluator.count, seed=seed, weights=weights
                )
            evaluation.stages.append(StageResult(name, spec.config.task, step, results))
        evaluation.findings += _list_findings(folder, name, task, results)
    _report_skipped(evaluation, chosen, reasons, named=metrics is not None)
    evaluation.files.insert(0, folder.path / "evaluation.json")
    return evaluation


def _open_items(
    run: RunFolder, spec: StageSpec, split: Split, seed: int, dataset: Any, note: Callable[[str], None]
) -> Source:
    """Open a split of the data that the stage was trained on."""
    try:
        source = open_source(spec.data, split, seed, dataset)
        if dataset is None:
            # Training has not recorded the test split: the validation split tells whether these are the items.
            known = source if split == "validation" else open_source(spec.data, "validation", seed)
            check_items(run, spec.name, spec.data, "validation", known, note)
        return source
    except NoData as error:
        raise InputError(
            f"{error}; if the data were moved, say where: kineo evaluate {run.path} data.folder=NEW"
        ) from None


def _list_findings(run: RunFolder, stage: str, task: Task, results: dict[str, Result]) -> list[str]:
    """Findings of training, and of the validation limits that the results are beyond."""
    found = {finding.name: finding for name, _, finding in read_findings(run.metrics_file) if name == stage}
    values = {name: value for result in results.values() for name, value in result.values.items()}
    for limit in task.health_limits() if isinstance(task, ChecksHealth) else ():
        finding = limit.check(values) if not limit.logs else None
        if finding is not None:
            found.setdefault(finding.name, finding)
    return [f"{stage}: {finding.severity}: {finding}" for finding in found.values()]


def _select_stages(run: RunFolder, stage: str | None) -> tuple[str, list[str]]:
    """The stage to sample from, and all trained stages to evaluate, in the run's order."""
    if stage is not None:
        return choose_sampling_stage(run, stage), [stage]
    trained = [name for name in run.config()["stages"] if checkpoints.saved_steps(run.checkpoints(name))]
    if not trained:
        raise InputError(f"{run.path} has no checkpoint yet: train first")
    try:
        return choose_sampling_stage(run), trained
    except InputError:  # only codecs
        return trained[-1], trained


def _report_skipped(evaluation: Evaluation, chosen: dict[str, Any], reasons: Reasons, named: bool) -> None:
    """Add a line for each reason why metrics have no result. Raise if the user named such a metric, except where only its
    weights are missing and another metric has a result."""
    computed = {name for stage in evaluation.stages for name in stage.results}
    lines: dict[str, list[str]] = {}  # reason → metrics
    for name, metric in chosen.items():
        if name in computed:
            continue
        why = "; ".join(dict.fromkeys(map(str, reasons[name])))
        can_wait = bool(computed) and any(isinstance(reason, WeightsMissing) for reason in reasons[name])
        if named and not can_wait:
            why = why or f"no trained stage of this run offers {', '.join(sorted(metric.needs))}"
            raise InputError(f"--metrics {name} does not apply to {evaluation.run}: {why}")
        if why:
            lines.setdefault(why, []).append(name)
    evaluation.skipped += [f"skipped {', '.join(names)}: {why}" for why, names in lines.items()]
