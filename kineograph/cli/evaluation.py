"""`kineo evaluate`, `metrics`, `compare` and `race`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Exit, Option, Typer

from kineograph.cli.options import (
    Batch,
    Checkpoint,
    Compile,
    Device,
    Guidance,
    Run,
    SamplingOptions,
    Seed,
    Stage,
    Steps,
    Trust,
    print_to_stderr,
)

app = Typer()

MetricNames = Annotated[str | None, Option("--metrics", help="Comma-separated names.", show_default="all that apply")]
Extractor = Annotated[
    list[str] | None,
    Option(
        metavar="[METRIC=]NAME|FILE",
        help="The network behind a metric: a name from `kineo weights list`, or a TorchScript or safetensors file. Without METRIC: fid, rfid, kid, is.",
        show_default="inception-v3; fvd=i3d-kinetics400; lpips=lpips-vgg16; clip_score=the run's clip stage",
    ),
]
FidMode = Annotated[
    Literal["tensorflow", "clean", "pytorch"] | None,
    Option(
        help="How fid, rfid and kid resize: tensorflow (the original, torch-fidelity), clean (clean-fid), pytorch (pytorch-fid).",
        show_default="tensorflow",
    ),
]
FidFeatures = Annotated[int | None, Option(help="Inception's layer of fid, rfid, kid: 64, 192, 768 or 2048 (default).")]
FvdMode = Annotated[
    Literal["tensorflow", "pytorch"] | None,
    Option(help="How fvd resizes: tensorflow (the original), pytorch (cd-fvd).", show_default="tensorflow"),
]
FvdFrames = Annotated[int | None, Option(min=10, help="Compute fvd on a clip's first N frames.", show_default="all")]
KidSubsets = Annotated[int, Option(min=1, help="Random subsets of kid.")]
KidSubsetSize = Annotated[int | None, Option(min=2, help="Samples in a subset of kid.", show_default="1000, or all")]
IsSplits = Annotated[int | None, Option(min=1, help="Splits of is.", show_default="10 from 5,000 pictures on, else 1")]
SaveStats = Annotated[Path | None, Option(metavar="FILE.npz", help="Write the real items' statistics, for later.")]


@app.command()
def evaluate(
    run: Run,
    moved: Annotated[list[str] | None, Argument(metavar="[data.folder=NEW]", help="Where the data lie now.")] = None,
    metrics: MetricNames = None,
    samples: Annotated[int | None, Option(min=1, help="How many samples to evaluate.", show_default="256")] = None,
    split: Annotated[
        str | None, Option(help="validation, test, or train: what the model has seen.", show_default="validation")
    ] = None,
    prompts: Annotated[
        Path | None,
        Option(metavar="FILE", help="Draw and judge these prompts instead of held-out items (docs/sampling.md)."),
    ] = None,
    guidance: Guidance = None,
    steps: Steps = None,
    sampling: SamplingOptions = None,
    batch: Batch = None,
    checkpoint: Checkpoint = "last",
    stage: Stage = None,
    seed: Seed = 0,
    extractor: Extractor = None,
    fid_mode: FidMode = None,
    fid_features: FidFeatures = None,
    fvd_mode: FvdMode = None,
    fvd_frames: FvdFrames = None,
    kid_subsets: KidSubsets = 100,
    kid_subset_size: KidSubsetSize = None,
    is_splits: IsSplits = None,
    from_items: Annotated[
        bool,
        Option(
            "--from-items",
            help="Judge a decoder or upsampler alone: draw from the real items' embeddings or smaller copies.",
        ),
    ] = False,
    reference: Annotated[
        str | None,
        Option(
            metavar="train|DIR|FILE.npz",
            help="What fid, kid and fvd compare samples with: the training split, a folder, or saved statistics.",
            show_default="the items of --split",
        ),
    ] = None,
    reference_items: Annotated[
        int | None, Option(min=1, help="Items of the reference.", show_default="all, at most 50,000 of a split")
    ] = None,
    save_stats: SaveStats = None,
    compile: Compile = False,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Evaluate a run: a table, evaluation.json and a sheet of samples.

    Exit code 1: a stage has a fatal finding, such as a collapsed codec. 4: a metric that --metrics names could not be computed. What was computed is written.
    """
    options = _make_metric_options(locals())
    from kineograph.evaluate.runner import evaluate as run_evaluation
    from kineograph.run.launch import NO_TIMEOUT, is_main_process, process_group
    from kineograph.sample.options import parse_settings

    flags = {"guidance": guidance, "steps": steps}
    changes = parse_settings(sampling) | {key: value for key, value in flags.items() if value is not None}

    with process_group(timeout=NO_TIMEOUT):
        evaluation = run_evaluation(
            run, split_names(metrics), samples=samples, split=split, checkpoint=checkpoint, stage=stage, seed=seed,
            device=device, extractors=extractor or [], compile=compile, moved=moved or [], options=options,
            reference=reference, reference_items=reference_items, save_stats=save_stats, prompts=prompts, batch=batch,
            sampling=changes,
        )  # fmt: skip
    if is_main_process():
        evaluation.show()
    if evaluation.fatal:
        raise Exit(1)
    if evaluation.missing:
        raise Exit(4)


@app.command("metrics")
def metrics_(
    drawn: Annotated[Path, Argument(metavar="A", help="What was drawn: a folder, or statistics (.npz).")],
    reference: Annotated[
        Path | None,
        Argument(metavar="B", help="What to compare with: a folder, statistics (.npz), or a run, for its data."),
    ] = None,
    metrics: Annotated[
        str | None,
        Option(
            help="Comma-separated: fid, kid, fvd, is; paired, paired_lpips for files of equal names.",
            show_default="fid, kid, is, and fvd of clips",
        ),
    ] = None,
    size: Annotated[
        str | None,
        Option(metavar="N|HxW", help="Scale and crop files to this size first.", show_default="their own size"),
    ] = None,
    frames: Annotated[int | None, Option(min=1, help="Read each clip's first N frames.", show_default="all")] = None,
    fps: Annotated[float | None, Option(min=0.01, help="Read clips at this rate.", show_default="their own")] = None,
    split: Annotated[
        Literal["train", "validation", "test"] | None,
        Option(help="Which items of B.", show_default="train of a run, all of a folder"),
    ] = None,
    samples: Annotated[int | None, Option(min=1, help="Read at most N items of each set.", show_default="all")] = None,
    extractor: Extractor = None,
    fid_mode: FidMode = None,
    fid_features: FidFeatures = None,
    fvd_mode: FvdMode = None,
    fvd_frames: FvdFrames = None,
    kid_subsets: KidSubsets = 100,
    kid_subset_size: KidSubsetSize = None,
    is_splits: IsSplits = None,
    save_stats: SaveStats = None,
    out: Annotated[Path | None, Option(metavar="FILE.json", help="Also write the results here.")] = None,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Compare two sets of pictures or clips: FID, KID, IS, FVD, and PSNR, SSIM, LPIPS of pairs.

    Example: kineo metrics drawn photos --fid-mode clean --save-stats photos.npz

    Exit code 4: a metric that --metrics names could not be computed; the others are shown.
    """
    options = _make_metric_options(locals())
    from kineograph.evaluate.extractor.registry import parse_choices
    from kineograph.evaluate.set_metrics import compare_sets, parse_size

    options = options.model_copy(update={"extractors": parse_choices(extractor or [])})
    comparison = compare_sets(
        drawn, reference, split_names(metrics), options=options, split=split, size=parse_size(size), frames=frames,
        fps=fps, samples=samples, save_stats=save_stats, out=out, device=device, note=print_to_stderr,
    )  # fmt: skip
    comparison.show()
    if comparison.is_incomplete:
        raise Exit(4)


@app.command()
def compare(
    runs: Annotated[list[Path], Argument(help="Run folders.")],
    out: Annotated[Path | None, Option(help="Write comparison.json and comparison.png here.")] = None,
    trust: Trust = False,
) -> None:
    """Compare runs side by side."""
    from kineograph.evaluate.compare import compare as compare_runs

    comparison = compare_runs(runs)
    comparison.show()
    if out is not None:
        for path in comparison.write(out):
            print(path)


@app.command()
def race(
    data: Annotated[str, Argument(metavar="DATA", help="digits, a folder, or a YAML with a data section.")],
    setting: Annotated[
        list[str] | None,
        Argument(metavar="[key=value …]", help="How a folder is read: keys of data.*, such as split_by=folder."),
    ] = None,
    run: Annotated[Path | None, Option(help="Folder of the race.", show_default="runs/race-<data>")] = None,
    families: Annotated[str | None, Option(help="Comma-separated families.", show_default="all with presets")] = None,
    minutes: Annotated[float, Option(min=0.001, help="Training time of each family, compilation included.")] = 5,
    seeds: Annotated[int, Option(min=1, max=100, help="Runs of each family.")] = 1,
    metrics: MetricNames = None,
    samples: Annotated[int, Option(min=1, help="Held-out prompts that each family is judged on.")] = 256,
    extractor: Extractor = None,
    frames: Annotated[
        int | None, Option(min=1, help="Frames of a clip; 1 races on pictures.", show_default="as the data have")
    ] = None,
    size: Annotated[int | None, Option(min=8, help="Height and width, pixels.", show_default="64; on a CPU 32")] = None,
    jobs: Annotated[int, Option(min=1, max=64, help="Families that run side by side.")] = 1,
    board: Annotated[Path | None, Option(metavar="FILE.md", help="Write the table to this board, or renew it.")] = None,
    plan: Annotated[bool, Option("--plan", help="Write the plans and stop, to look at them or edit them.")] = False,
    trust: Trust = False,
) -> None:
    """Race families on the same data, in the same minutes, before the same judge: one table, one sheet.

    Run the same command again to go on. Exit code 1: a family failed (the others are in the table), or none learned anything.

    Example: kineo race digits --families muse,dalle2 --frames 1 --minutes 5
    """
    from kineograph.race.command import race as run_race

    metrics = ",".join(split_names(metrics) or ()) or None
    print(
        run_race(
            data, setting or [], run=run, families=split_names(families), minutes=minutes, seeds=seeds, metrics=metrics,
            samples=samples, extractors=extractor or [], frames=frames, size=size, jobs=jobs, board=board, plan_only=plan,
            trust=trust, command=f"kineo {shlex.join(sys.argv[1:])}", note=print_to_stderr,
        )
    )  # fmt: skip


def split_names(names: str | None) -> list[str] | None:
    found = [name.strip() for name in (names or "").split(",") if name.strip()]
    if names is not None and not found:
        from kineograph.core.errors import InputError

        raise InputError(f"{names!r} names nothing: give names with commas between them, or leave the option out")
    return found or None


def _make_metric_options(parameters: dict[str, Any]) -> Any:
    """The parameters of a command that are fields of MetricOptions."""
    from kineograph.core.config import parse
    from kineograph.core.metric_options import MetricOptions

    fields = MetricOptions.model_fields.keys() & parameters.keys()
    return parse(MetricOptions, {name: parameters[name] for name in fields}, "")
