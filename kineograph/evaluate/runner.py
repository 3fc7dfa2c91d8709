"""`kineo evaluate`: compute every metric that applies to the trained stages of a run, on held-out data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from kineograph.core import distributed
from kineograph.core.capabilities import ChecksHealth, resize_reference, takes_captions
from kineograph.core.config import Tree, parse
from kineograph.core.console import open_console
from kineograph.core.errors import InputError, NoData
from kineograph.core.health import read_findings
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.metric_options import MetricOptions
from kineograph.core.prompt import Prompt
from kineograph.core.protocols import Source
from kineograph.core.registry import find_metric, metric_names
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.data.open_source import Split, open_source
from kineograph.evaluate import results_file
from kineograph.evaluate.console import format_value
from kineograph.evaluate.extractor.registry import Extractors, parse_choices
from kineograph.evaluate.metric_api import KIND_NAMES, Kind, MetricSkipped, Result
from kineograph.evaluate.picture_sets import MediaFolder, PictureSet, open_folder, open_split, read_at
from kineograph.evaluate.saved_statistics import (
    SUFFIX,
    SavedStatistics,
    check_new_file,
    read_statistics,
    write_statistics,
)
from kineograph.evaluate.stage_evaluator import Reasons, StageEvaluator
from kineograph.media.filenames import slugify
from kineograph.sample.options import find_changes, resolve_options
from kineograph.sample.prompt_file import check_fields, read_prompts, refuse_scenes
from kineograph.sample.request import SampleRequest
from kineograph.stage.data_record import check_items, explain_moved_data, move_data
from kineograph.stage.load import StageLoader, choose_sampling_stage
from kineograph.stage.spec import StageSpec, read_batch, read_stage
from kineograph.train import checkpoint as checkpoints
from kineograph.train.checkpoint_folder import planned_steps
from kineograph.train.config import TrainConfig
from kineograph.train.health import YOUNG_STEPS


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
    missing: list[str] = field(default_factory=list)  # metrics that were asked for by name and have no result
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

    @property
    def fatal(self) -> list[str]:
        """The fatal findings: figures of these stages are of a model that learned nothing."""
        return [line for line in self.findings if ": fatal: " in line]

    def table(self) -> Any:
        """A rich table."""
        from rich.table import Table

        table = Table("stage", "metric", "value", "of", title=f"{self.run}: {self.split}", title_justify="left")
        for stage in self.stages:
            title = f"{stage.stage} @ {stage.step:,}"
            for metric, result in stage.results.items():
                labels = ", ".join(f"{key} {format_value(value)}" for key, value in result.labels.items())
                for name, value in result.values.items():
                    table.add_row(
                        title, name if name.startswith(metric) else f"{metric}: {name}", format_value(value), labels
                    )
                    title = labels = ""
            table.add_section()
        return table

    def show(self) -> None:
        console = open_console()
        console.print(self.table())
        for line in (*self.findings, *self.skipped, *(f"wrote {path}" for path in self.files)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _describe(metric: str, result: Result) -> str:
    """`fid 12.3: extractor …, count …`"""
    values = ", ".join(f"{name} {format_value(value)}" for name, value in result.values.items())
    labels = ", ".join(f"{key} {format_value(value)}" for key, value in result.labels.items())
    return (values if metric in result.values else f"{metric}: {values}") + (f"; {labels}" if labels else "")


def _validation_batch(train: Tree) -> int:
    """Samples of all processes in a batch of training's validation."""
    return parse(
        TrainConfig, {key: train[key] for key in ("batch_size", "accumulate") if key in train}
    ).micro_batch_size


def evaluate(
    run: str | Path,
    metrics: Sequence[str] | None = None,
    *,
    samples: int | None = None,
    split: str | None = None,
    checkpoint: str | int = "last",
    stage: str | None = None,
    device: str = "auto",
    seed: int = 0,
    batch: int | None = None,
    prompts: Sequence[str | Prompt] | str | Path | None = None,
    sampling: Mapping[str, Any] | None = None,
    dataset: Any = None,
    moved: Sequence[str] = (),
    extractors: Sequence[str] = (),
    options: MetricOptions | None = None,
    reference: str | Path | None = None,
    reference_items: int | None = None,
    save_stats: Path | None = None,
    compile: bool = False,
    note: Callable[[str], None] = distributed.print_note,
) -> Evaluation:
    """Evaluate the sampling stage of a run at `checkpoint` and the stages below it, or `stage` alone.

    `metrics`: None for all that apply. A named metric without a result is listed in `missing`; if none has one, that is an error.
    `samples`: how many (default 256) of `split` (default validation). `prompts`: draw and judge these, or those of a file, instead
    of held-out items. `sampling`: changed sampling options, such as {"guidance": 3}; only the stage that draws is evaluated then,
    and the results are kept beside those without changes. `batch`: samples at a time; None: `evaluate.batch` of the run, or as many as fit.
    `extractors`: `NAME|FILE` for fid, rfid, kid and is, or `METRIC=NAME|FILE`; `options`: how metrics are computed.
    `reference`: what fid, kid and fvd compare samples with: `train`, a folder or statistics (.npz); None: the held-out items.
    `save_stats`: write the statistics of the real items there.
    `moved`: where the data lie now, such as data.folder=NEW; they must be the items that the run was trained on.
    Writes RUN/evaluation.json and image sheets under RUN/evaluation/. Several processes share the items; all return the same
    numbers, and the first one writes and prints.
    """
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch} is too small: use at least 1")
    if prompts is not None:
        unused = {"--samples": samples, "--split": split, "--save-stats": save_stats}
        for flag, value in (unused | ({} if reference is not None else {"data.folder=NEW": moved or None})).items():
            if value is not None:
                raise InputError(f"{flag} has no effect with --prompts, which reads no held-out items: leave one out")
    asked = _read_prompts(run, prompts, stage, seed) if prompts is not None else None
    samples = 256 if samples is None else samples
    split = split or ("validation" if asked is None else f"prompts-{asked.name}")
    if asked is None and split not in get_args(Split):
        raise InputError(f"--split {split}: use {', '.join(get_args(Split))}")
    if samples < 1:
        raise InputError(f"samples={samples}: use 1 or more")
    folder = RunFolder.existing(run)
    note = distributed.on_first_rank(note)
    chosen = {metric.name: metric for metric in map(find_metric, metrics if metrics is not None else metric_names())}
    _check_reference(chosen, metrics is not None, reference, reference_items, save_stats)
    # No CUDA graphs: a batch is still in use while the next is sampled.
    stages = StageLoader(folder, distributed.resolve_device(device), compiled=compile, graphs=False)
    enable_flash_attention_3(stages.device)
    options = options or MetricOptions()
    chosen_networks = {**options.extractors, **parse_choices(list(extractors))}
    opened = Extractors(stages.device, options.model_copy(update={"extractors": chosen_networks}))
    statistics = read_statistics(Path(reference)) if reference and str(reference).endswith(SUFFIX) else None
    main, names = _select_stages(folder, stage if asked is None else asked.stage)
    drawing = _change_sampling(read_stage(folder.config(), main), sampling) if sampling else None
    names = [main] if drawing is not None else names
    title = split if drawing is None else "-".join([split, *drawing.changes])
    evaluation = Evaluation(folder.path, title)
    reasons: Reasons = {name: [] for name in chosen}
    if asked is not None:
        there = {"captions", "generated", "clips", "sound"} | ({"real"} if reference is not None else set())
        for name, metric in chosen.items():
            if not metric.needs <= there:
                remedy = "add --reference" if metric.needs <= there | {"real"} else "leave --prompts out"
                reasons[name].append(MetricSkipped(f"prompts have nothing real to compare with; {remedy}"))
    tree = folder.config()
    run_seed = int(tree.get("seed", 0))
    # Found out before any stage is evaluated; a training may replace the newest checkpoint until then.
    checkpoints.select(folder.checkpoints(main), checkpoint)
    files = None
    if reference is not None and reference != "train" and statistics is None:
        files = open_folder(Path(reference), limit=reference_items, note=note)
    for name in names:
        step = checkpoints.select(folder.checkpoints(name), checkpoint if name == main else "last").step
        spec = read_stage(tree, name) if drawing is None else drawing.spec
        task = stages.load(name, step)
        if drawing is not None and "guidance" in drawing.options and not takes_captions(task):
            raise InputError(f"guidance has no effect: {spec.config.task} was trained without captions; leave it out")
        if spec.data.source == "dataset" and dataset is None and asked is None:
            raise InputError(f"stage {name} was trained on a Dataset object: evaluate it from Python with dataset=…")
        spec = replace(spec, data=move_data(spec.data, moved))
        source = _open_items(folder, spec, split, run_seed, dataset, note) if asked is None else None  # type: ignore[arg-type]
        if source is not None and len(source) < samples:
            s = "" if len(source) == 1 else "s"
            note(
                f"{name}: the {split} split has {len(source)} item{s}: evaluating {len(source)} sample{s}, not {samples}"
            )
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
            batch or read_batch(tree, "evaluate"),
            generate=name == main,
            interactive=True,
            note=note,
            split=split,
            validation_batch=_validation_batch(tree["stages"][name].get("train", {})),
            named=metrics is not None,
            save_statistics=save_stats is not None and name == main,
            prompts=asked.request if asked is not None else None,
        )
        if reference is not None and name == main:
            evaluator.reference = statistics or _open_reference(files, evaluator, dataset, reference_items, note)
        results, sheets = evaluator.run(chosen, reasons)
        if distributed.is_first():
            stem = f"{title}-{name}-step-{step:08d}"
            figures = [_describe(name, result) for name, result in results.items() if "generated" in chosen[name].needs]
            evaluation.files += sheets.write(folder.path / "evaluation", stem, spec.data.shape.fps, figures)
        if results:
            weights = stages.loaded_digests[f"{folder.path}/{name}"]
            if distributed.is_first():
                rate = evaluator.count_drawn_per_second()
                speed = {"drawn_per_second": rate} if rate is not None else {}
                results_file.add_results(
                    folder, title, name, step, results, samples=evaluator.count, seed=seed, weights=weights, **speed
                )
            evaluation.stages.append(StageResult(name, spec.config.task, step, results))
        if evaluator.statistics is not None and save_stats is not None:
            _save_statistics(evaluator.statistics, save_stats, evaluation)
        evaluation.findings += _list_findings(folder, name, step, task, results)
    _report_skipped(evaluation, chosen, reasons, named=metrics is not None)
    evaluation.files.insert(0, folder.path / "evaluation.json")
    return evaluation


@dataclass(frozen=True)
class _Drawing:
    """The stage that draws, with changed sampling options."""

    spec: StageSpec
    options: dict[str, Any]  # those that differ from the run's

    @property
    def changes(self) -> list[str]:
        """`guidance=3` and so on, as parts of a file's name."""
        return [re.sub(r"[^\w.=+]+", "_", f"{key}={format_value(value)}") for key, value in self.options.items()]


def _change_sampling(spec: StageSpec, sampling: Mapping[str, Any]) -> _Drawing | None:
    """None if the options are those of the run."""
    options = resolve_options(spec.config, sampling)
    found = find_changes(spec.config.sample_options, options)
    return _Drawing(replace(spec, config=spec.config.model_copy(update={"sample": options})), found) if found else None


@dataclass(frozen=True)
class _Asked:
    """Prompts to evaluate."""

    name: str  # of the file, and a digest of the prompts
    stage: str
    request: SampleRequest


def _read_prompts(
    run: str | Path, prompts: Sequence[str | Prompt] | str | Path, stage: str | None, seed: int
) -> _Asked:
    """Check prompts against the stage's task before it is loaded."""
    name = "list"
    if isinstance(prompts, str | Path):
        name, prompts = slugify(Path(prompts).stem), read_prompts(prompts)
    folder = RunFolder.existing(run)
    stage = choose_sampling_stage(folder, stage)
    request = SampleRequest(str(run), stage, seed=seed, prompts=prompts)
    check_fields(request.entries or [], read_stage(folder.config(), stage))
    refuse_scenes(request.entries or [], "remove it; single clips are judged")
    return _Asked(f"{name}-{_digest_prompts(request.entries or [])}", stage, request)


def _digest_prompts(prompts: Sequence[Prompt]) -> str:
    """Six digits of the prompts and the content of their pictures: files of one name do not share their results."""
    digest = hashlib.sha256()
    for prompt in prompts:
        tree = prompt.to_json()
        for key in ("image", "mask"):
            if key in tree:
                tree[key] = hashlib.sha256(Path(tree[key]).read_bytes()).hexdigest()
        digest.update(f"{json.dumps(tree, sort_keys=True)}\n".encode())
    return digest.hexdigest()[:6]


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
        raise explain_moved_data(error, f"kineo evaluate {run.path}") from None


def _list_findings(run: RunFolder, stage: str, step: int, task: Task, results: dict[str, Result]) -> list[str]:
    """Findings of training, and of the validation limits that the results are beyond: before the stage's end, or in a trial, as warnings."""
    found = {finding.name: finding for name, _, finding in read_findings(run.metrics_file) if name == stage}
    values = {name: value for result in results.values() for name, value in result.values.items()}
    is_judged = step >= max(YOUNG_STEPS, planned_steps(run.config(), stage, run.checkpoints(stage)))
    for limit in task.health_limits() if isinstance(task, ChecksHealth) else ():
        finding = limit.check(values) if not limit.logs else None
        if finding is not None:
            found.setdefault(finding.name, finding if is_judged else replace(finding, severity="warning"))
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
    """Add a line for each reason why metrics have no result. Raise if the user named metrics and none of them has one."""
    computed = {name for stage in evaluation.stages for name in stage.results}
    lines: dict[str, list[str]] = {}  # reason → metrics
    for name, metric in chosen.items():
        if name in computed:
            continue
        why = "; ".join(dict.fromkeys(map(str, reasons[name])))
        if named:
            evaluation.missing.append(name)
            why = why or _name_missing(metric.needs)
        if why:
            lines.setdefault(why, []).append(name)
    if named and not computed:
        why = "; ".join(
            f"--metrics {','.join(names)} does not apply to {evaluation.run}: {why}" for why, names in lines.items()
        )
        raise InputError(why)
    evaluation.skipped += [f"skipped {', '.join(names)}: {why}" for why, names in lines.items()]


def _name_missing(needs: frozenset[Kind]) -> str:
    kinds = ", ".join(KIND_NAMES[kind] for kind in sorted(needs))
    hint = "; reconstruction, rfid and codebook judge a tokenizer alone" if "generated" in needs else ""
    return f"it needs {kinds}, and no trained stage of this run has them all{hint}"


# What samples are compared with --------------------------------------------------------------------------------------


def _check_reference(
    chosen: dict[str, Any], named: bool, reference: Any, items: int | None, save_stats: Path | None
) -> None:
    """Refuse options of a reference that would have no effect, before anything is drawn."""
    if save_stats is not None:
        check_new_file(save_stats)
    if items is not None and (reference is None or str(reference).endswith(SUFFIX)):
        raise InputError("--reference-items has no effect without --reference train or a folder: leave it out")
    option = "--reference" if reference is not None else "--save-stats" if save_stats is not None else None
    if option is not None and named and not chosen.keys() & {"fid", "kid", "fvd"}:
        raise InputError(f"{option} has no effect on {', '.join(chosen)}: it is for fid, kid and fvd")


def _open_reference(
    files: MediaFolder | None, evaluator: StageEvaluator, dataset: Any, limit: int | None, note: Callable[[str], None]
) -> PictureSet:
    """A folder, read as the stage reads its data, in the size of its samples; None: the training split."""
    data, shape = evaluator.spec.data, evaluator.shape
    if files is not None:
        return read_at(files, shape, data.fps)
    resize = partial(resize_reference, evaluator.task)
    return open_split(data, "train", evaluator.run_seed, "training split", limit, resize, dataset, note)


def _save_statistics(statistics: SavedStatistics, path: Path, evaluation: Evaluation) -> None:
    if not statistics.protocol:
        raise InputError(f"--save-stats {path}: neither fid, kid nor fvd has a result to save")
    if distributed.is_first():
        write_statistics(path, statistics)
        evaluation.files.append(path)
