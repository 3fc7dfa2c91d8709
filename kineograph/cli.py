"""The command line. Commands import heavy packages themselves, so that --help stays fast."""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kineograph.core.text_file import escape_controls

app = typer.Typer(
    name="kineo",
    help="Train, sample and evaluate text-to-image and text-to-video models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(name="data", help="Make a dataset to experiment with, or check your own.", no_args_is_help=True)
app.add_typer(data_app)
weights_app = typer.Typer(
    name="weights", help="Weights of the networks behind metrics and perceptual losses.", no_args_is_help=True
)
app.add_typer(weights_app)

Run = Annotated[Path, typer.Argument(help="A run folder, such as runs/muse-tiny.")]
Checkpoint = Annotated[str, typer.Option(help="last, best, or a step.")]
Stage = Annotated[str | None, typer.Option(help="Which stage draws.", show_default="the last that can")]
Seed = Annotated[int, typer.Option(min=0)]
Guidance = Annotated[float | None, typer.Option(help="Classifier-free guidance scale.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Sampling steps.")]
Negative = Annotated[str | None, typer.Option(help="What not to draw.")]
SamplingOptions = Annotated[
    list[str] | None, typer.Option("--set", metavar="sample.K=V", help="Any other sampling option.")
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Samples drawn at a time; fewer take less memory.", show_default="sample.batch, or as many as fit"
    ),
]
Ema = Annotated[bool, typer.Option("--ema/--no-ema", help="Averaged weights, or those of the last step.")]
Fps = Annotated[
    float | None, typer.Option(help="Playback speed, in frames per second.", show_default="as trained, or as --prime")
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="torch.compile: the first batch is slow, later ones are faster. On a CPU it needs a C++ compiler.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
MetricNames = Annotated[
    str | None, typer.Option("--metrics", help="Comma-separated names.", show_default="all that apply")
]
Extractor = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[METRIC=]NAME|FILE",
        help="The network behind a metric: a name from `kineo weights list`, or a TorchScript or safetensors file. Without METRIC: fid, rfid, kid, is.",
        show_default="inception-v3; fvd=i3d-kinetics400; lpips=lpips-vgg16; clip_score=the run's clip stage",
    ),
]
FidMode = Annotated[
    Literal["tensorflow", "clean", "pytorch"] | None,
    typer.Option(
        help="How fid, rfid and kid resize: tensorflow (the original, torch-fidelity), clean (clean-fid), pytorch (pytorch-fid).",
        show_default="tensorflow",
    ),
]
FidFeatures = Annotated[
    int | None,
    typer.Option(help="Inception's layer for fid, rfid, kid: 64, 192, 768 or 2048.", show_default="2048"),
]
FvdMode = Annotated[
    Literal["tensorflow", "pytorch"] | None,
    typer.Option(help="How fvd resizes: tensorflow (the original), pytorch (cd-fvd).", show_default="tensorflow"),
]
FvdFrames = Annotated[
    int | None, typer.Option(min=10, help="Compute fvd on the first N frames of each clip.", show_default="all")
]
KidSubsets = Annotated[int, typer.Option(min=1, help="Random subsets of kid.")]
KidSubsetSize = Annotated[
    int | None, typer.Option(min=2, help="Samples in a subset of kid.", show_default="1000, or all if fewer")
]
IsSplits = Annotated[
    int | None, typer.Option(min=1, help="Splits of is.", show_default="10 from 5,000 pictures on, otherwise 1")
]
SaveStats = Annotated[
    Path | None, typer.Option(metavar="FILE.npz", help="Write the statistics of the real items, to compare with later.")
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Processes to plan the run for.", show_default="those that a launcher started, or 1"),
]


def _set_trust(trusted: bool) -> None:
    if trusted:
        from kineograph.core.trust import trust_all

        trust_all()


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_set_trust,
        help="Run the code that a run or checkpoint from elsewhere names: dotted paths and pipes.",
    ),
]


def _print_version(asked: bool) -> None:
    if asked:
        from kineograph import __version__

        print(f"kineograph {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def presets(name: Annotated[str | None, typer.Argument(help="Print the file of this preset.")] = None) -> None:
    """List the presets by family: what each is, hardware, time, expected result."""
    from kineograph.run.presets import print_preset, print_presets

    if name is None:
        print_presets()
    else:
        print_preset(name)


@app.command(context_settings={"ignore_unknown_options": False})
def train(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET|FILE.yaml … [key=value …]", help="A preset, YAML or JSON files, then overrides."
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/<name>")] = None,
    resume: Annotated[
        Literal["auto", "never", "must"],
        typer.Option(help="An existing run: auto continues it, never refuses it, must requires it."),
    ] = "auto",
    resume_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Continue from a checkpoint elsewhere: a folder, a tar, their URL, or wandb:ENTITY/PROJECT/NAME:VERSION.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Resolve the config, check the data, build, estimate; do not train.")
    ] = False,
    processes: Processes = None,
    trust: Trust = False,
) -> None:
    """Train all stages; run the same command again to resume.

    Example: kineo train muse-tiny data.source=folder data.folder=photos train.steps=500
    """
    from kineograph.run.launch import is_main_process

    if dry_run:
        if not is_main_process():
            return
        from kineograph.run.dry_run import dry_run as check

        if resume_from:
            raise typer.BadParameter("has no effect with --dry-run: leave one out", param_hint="--resume-from")
        check(what or [], run, resume, processes=processes)
        return
    if processes is not None:
        raise typer.BadParameter(
            "needs --dry-run; to train with several processes, start them with torchrun", param_hint="--processes"
        )
    from kineograph.run.train import train as run_training

    folder = run_training(what or [], run=run, resume=resume, resume_from=resume_from or ())
    if is_main_process():
        print(f"done: {folder}")


@app.command()
def sample(
    run: Run,
    prompts: Annotated[
        list[str] | None, typer.Argument(help='Captions; none for an unconditional model; "" for the null text.')
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Captions from a file: one per line, or caption@@picture; or .jsonl (docs/sampling.md).",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the media.", show_default="RUN/drawn")] = None,
    count: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 1,
    seed: Seed = 0,
    guidance: Guidance = None,
    steps: Steps = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames per clip, those of --prime included.")] = None,
    fps: Fps = None,
    prime: Annotated[
        Path | None,
        typer.Option(
            help="A picture or clip to continue (a long clip: its last frames), or a picture to enlarge or, with --mask, to inpaint."
        ),
    ] = None,
    sketch: Annotated[
        Path | None, typer.Option(help="A picture or clip to draw from, for stages trained with sketches.")
    ] = None,
    mask: Annotated[Path | None, typer.Option(help="A picture, white where the one of --prime is inpainted.")] = None,
    negative: Negative = None,
    checkpoint: Checkpoint = "last",
    format: Annotated[
        str | None,
        typer.Option(
            help="gif, mp4, or png (a film strip of a clip).",
            show_default="gif for clips, mp4 with sound, png for pictures",
        ),
    ] = None,
    stage: Stage = None,
    options: SamplingOptions = None,
    size: Annotated[
        str | None, typer.Option(metavar="HxW", help="Height and width in pixels.", show_default="as trained")
    ] = None,
    batch: Batch = None,
    ema: Ema = True,
    compile: Compile = False,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Draw prompts with a trained run: media named by caption, each with a JSON file that reproduces it.

    Example: kineo sample runs/clips --prompts prompts.txt --count 2
    """
    flags = locals()  # the parameters above are the fields of SampleRequest, and where and how to write
    del flags["trust"]
    from kineograph.run.launch import NO_TIMEOUT, process_group
    from kineograph.sample.command import write_samples

    with process_group(timeout=NO_TIMEOUT):
        paths = write_samples(**flags, note=_print_to_stderr)
    for path in paths:
        print(path)


@app.command()
def story(
    run: Run,
    scenes: Annotated[
        Path,
        typer.Argument(
            metavar="SCENES.txt",
            help="One scene per line; blank lines and lines that begin with # are skipped. Or .jsonl: prompt, frames, overlap, negative, seed.",
        ),
    ],
    overlap: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Frames of the previous scene that a scene continues.",
            show_default="the stage's sample.overlap, or about half a scene",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the video.", show_default="RUN/drawn")] = None,
    seed: Seed = 0,
    guidance: Guidance = None,
    steps: Steps = None,
    frames: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Frames drawn per scene. The first scene shows all of them, later ones only the new: FRAMES − OVERLAP.",
            show_default="as trained",
        ),
    ] = None,
    fps: Fps = None,
    prime: Annotated[Path | None, typer.Option(help="A picture or clip that the first scene continues.")] = None,
    sketch: Annotated[
        Path | None,
        typer.Option(help="A picture or clip to draw the whole story from, for stages trained with sketches."),
    ] = None,
    negative: Negative = None,
    checkpoint: Checkpoint = "last",
    format: Annotated[str | None, typer.Option(help="gif or mp4.", show_default="gif; mp4 with sound")] = None,
    stage: Stage = None,
    options: SamplingOptions = None,
    ema: Ema = True,
    compile: Compile = False,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Draw one long video, a scene per line, each continuing the last; with a sheet of the scenes and a JSON file that reproduces it.

    Frames are written as they are drawn, so a story can have any length.
    """
    flags = locals()
    del flags["trust"]
    from kineograph.sample.command import write_story

    for path in write_story(**flags, note=_print_to_stderr):
        print(path)


@app.command()
def evaluate(
    run: Run,
    moved: Annotated[
        list[str] | None, typer.Argument(metavar="[data.folder=NEW]", help="Where the run's data lie now.")
    ] = None,
    metrics: MetricNames = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="How many samples to evaluate.", show_default="256")
    ] = None,
    split: Annotated[str | None, typer.Option(help="validation or test.", show_default="validation")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw and judge these prompts instead of held-out items (docs/sampling.md)."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples at a time; fewer take less memory.", show_default="evaluate.batch, or as many as fit"
        ),
    ] = None,
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
        typer.Option(
            "--from-items",
            help="Judge a decoder or upsampler alone: draw from the real items' embeddings or smaller copies, not through other stages.",
        ),
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="train|DIR|FILE.npz",
            help="What fid, kid and fvd compare samples with: the training split, a folder, or saved statistics.",
            show_default="the items of --split",
        ),
    ] = None,
    reference_items: Annotated[
        int | None, typer.Option(min=1, help="Items of the reference.", show_default="all, at most 50,000 of a split")
    ] = None,
    save_stats: SaveStats = None,
    compile: Compile = False,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Evaluate a run: a table, evaluation.json and a sheet of samples.

    Exit code 4: a metric that --metrics names could not be computed; the others are written.
    """
    options = _metric_options(
        fid_mode, fid_features, fvd_mode, fvd_frames, kid_subsets, kid_subset_size, is_splits, from_items
    )
    from kineograph.evaluate.runner import evaluate as run_evaluation
    from kineograph.run.launch import NO_TIMEOUT, is_main_process, process_group

    with process_group(timeout=NO_TIMEOUT):
        evaluation = run_evaluation(
            run, _split_names(metrics), samples=samples, split=split, checkpoint=checkpoint, stage=stage, seed=seed,
            device=device, extractors=extractor or [], compile=compile, moved=moved or [], options=options,
            reference=reference, reference_items=reference_items, save_stats=save_stats, prompts=prompts, batch=batch,
        )  # fmt: skip
    if is_main_process():
        evaluation.show()
    if evaluation.missing:
        raise typer.Exit(4)


def _split_names(names: str | None) -> list[str] | None:
    return [name.strip() for name in names.split(",") if name.strip()] if names else None


def _metric_options(
    fid_mode: str | None,
    fid_features: int | None,
    fvd_mode: str | None,
    fvd_frames: int | None,
    kid_subsets: int,
    kid_subset_size: int | None,
    is_splits: int | None,
    from_items: bool = False,
) -> Any:
    values = locals()
    from kineograph.core.config import parse
    from kineograph.core.metric_options import MetricOptions

    return parse(MetricOptions, values, "")


@app.command("metrics")
def metrics_(
    drawn: Annotated[Path, typer.Argument(metavar="A", help="What was drawn: a folder, or statistics (.npz).")],
    reference: Annotated[
        Path | None,
        typer.Argument(metavar="B", help="What to compare with: a folder, statistics (.npz), or a run, for its data."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: fid, kid, fvd, is; paired, paired_lpips for files of equal names.",
            show_default="fid, kid, is, and fvd of clips",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="N|HxW", help="Scale and crop files to this size first.", show_default="their own size"),
    ] = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Read the first N frames of each clip.", show_default="all")
    ] = None,
    fps: Annotated[
        float | None, typer.Option(min=0.01, help="Read clips at this rate.", show_default="their own")
    ] = None,
    split: Annotated[
        Literal["train", "validation", "test"] | None,
        typer.Option(help="Which items of B.", show_default="train of a run, all of a folder"),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Read at most N items of each set.", show_default="all")
    ] = None,
    extractor: Extractor = None,
    fid_mode: FidMode = None,
    fid_features: FidFeatures = None,
    fvd_mode: FvdMode = None,
    fvd_frames: FvdFrames = None,
    kid_subsets: KidSubsets = 100,
    kid_subset_size: KidSubsetSize = None,
    is_splits: IsSplits = None,
    save_stats: SaveStats = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write the results here.")] = None,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Compare two sets of pictures or clips: FID, KID, IS, FVD, and PSNR, SSIM, LPIPS of pairs.

    Example: kineo metrics drawn photos --fid-mode clean --save-stats photos.npz

    Exit code 4: a metric that --metrics names could not be computed; the others are shown.
    """
    options = _metric_options(fid_mode, fid_features, fvd_mode, fvd_frames, kid_subsets, kid_subset_size, is_splits)
    from kineograph.evaluate.extractor.registry import parse_choices
    from kineograph.evaluate.set_metrics import compare_sets, parse_size

    options = options.model_copy(update={"extractors": parse_choices(extractor or [])})
    comparison = compare_sets(
        drawn, reference, _split_names(metrics), options=options, split=split, size=parse_size(size), frames=frames,
        fps=fps, samples=samples, save_stats=save_stats, out=out, device=device, note=_print_to_stderr,
    )  # fmt: skip
    comparison.show()
    if comparison.is_incomplete:
        raise typer.Exit(4)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path | None, typer.Option(help="Write comparison.json and comparison.png here.")] = None,
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
    data: Annotated[str, typer.Argument(metavar="DATA", help="digits, a folder, or a YAML with a data section.")],
    setting: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value …]", help="How a folder is read: keys of data.*, such as split_by=folder."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the race.", show_default="runs/race-<data>")] = None,
    families: Annotated[
        str | None, typer.Option(help="Comma-separated families.", show_default="all that have presets")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.001, help="Training time of each family, compilation included.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each family.")] = 1,
    metrics: MetricNames = None,
    samples: Annotated[int, typer.Option(min=1, help="Held-out prompts that each family is judged on.")] = 256,
    extractor: Extractor = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Frames of a clip; 1 races on pictures.", show_default="as the data have")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=8, help="Height and width in pixels.", show_default="64; on a CPU 32")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Families that run side by side.")] = 1,
    board: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the table to this board, or replace it there.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Write the plans and stop, to look at them or edit them.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Race families on the same data, in the same minutes, before the same judge: one table, one sheet.

    Run the same command again to go on. Exit code 1: a family failed (the others are in the table), or none learned anything.

    Example: kineo race digits --families muse,dalle2 --frames 1 --minutes 5
    """
    from kineograph.race.command import race as run_race

    print(
        run_race(
            data, setting or [], run=run, families=_split_names(families), minutes=minutes, seeds=seeds, metrics=metrics,
            samples=samples, extractors=extractor or [], frames=frames, size=size, jobs=jobs, board=board, plan_only=plan,
            trust=trust, command=f"kineo {shlex.join(sys.argv[1:])}", note=_print_to_stderr,
        )
    )  # fmt: skip


@app.command()
def cache(
    what: Annotated[list[str], typer.Argument(metavar="RUN|FILE.yaml [key=value …]")],
    run: Annotated[Path | None, typer.Option(help="Run folder, for a file or preset.")] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Then remove what no stage reads any more.")] = False,
    trust: Trust = False,
) -> None:
    """Encode the data once with the trained codecs and frozen text encoders; training then reads it from disk.

    Only new and changed items are encoded.
    """
    from kineograph.run.cache import cache_run
    from kineograph.run.launch import NO_TIMEOUT, is_main_process, process_group

    with process_group(timeout=NO_TIMEOUT):
        paths = cache_run(what, run, remove=prune)
    for path in paths if is_main_process() else ():
        print(path)


@data_app.command("make")
def data_make(
    what: Annotated[str, typer.Argument(help="moving-digits; crops of pictures of yours; or emoji, with their names.")],
    out: Annotated[Path, typer.Option(help="A new or empty folder.")],
    count: Annotated[int | None, typer.Option(min=1, help="How many items.", show_default="100; emoji: all")] = None,
    as_: Annotated[
        str | None,
        typer.Option("--as", help="gif, mp4, png, memmap or webdataset.", show_default="gif; crops and emoji: png"),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value …]",
            help="Digits: keys of data.*, such as size=64 frames=16 digits=2. Crops: size, zoom, smallest.",
        ),
    ] = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Crops: a folder of large pictures; may be repeated. Emoji: the package (.tgz or folder), if npm cannot get it.",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    embeddings: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Write CLIP embeddings beside the shards, with this run's CLIP stage."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write a dataset: moving digits, small crops of large pictures such as wallpapers, or 3,700 emoji with their names."""
    from kineograph.run.dataset_writer import write_dataset

    print(write_dataset(what, out, count, as_, setting or [], split, embeddings, from_ or []))


@data_app.command("check")
def data_check(
    folder: Annotated[Path, typer.Argument(help="A dataset folder.")],
    setting: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value …]", help="Keys of data.*, such as flip=0.5 or size=256 frames=17 fps=8 'buckets={}'."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every problem, also many of one kind.", show_default=False)
    ] = False,
) -> None:
    """List what a folder holds and every problem with it (exit 1 if there is any); with buckets, which items go where."""
    from kineograph.data.check import bucket_lines, check_folder, parse_settings

    settings = parse_settings(folder, setting) if setting else None  # before hours of decoding: it may have a typo
    report = check_folder(folder, settings)
    for line in [*report.lines(everything), *(bucket_lines(settings) if settings is not None else [])]:
        print(escape_controls(line))
    if report.problems:
        raise typer.Exit(1)


@data_app.command("show")
def data_show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE.yaml",
            help="A folder of pictures, clips, shards or arrays; or a config that names its data.",
        ),
    ],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET|FILE.yaml] [key=value …]",
            help="How to read them: a preset's data keys, and keys of data.*, such as size=64 frames=9 fps=8.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("data.png"),
    count: Annotated[int, typer.Option(min=1, max=400, help="How many items.")] = 16,
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Of which split.")] = "train",
    stage: Annotated[str | None, typer.Option(help="Whose data keys.", show_default="the last stage")] = None,
) -> None:
    """Write a contact sheet of items as the model will see them: sampled, cropped, resized, with their captions.

    Example: kineo data show clips phenaki-tiny data.frames=9 --out clips.png
    """
    from kineograph.run.data_sheet import show_data

    print(show_data(path, what or [], out, count, split, stage))


@app.command("import")
def import_(
    what: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR|FILE …",
            help="A folder of weights; or a config; sat-config: several, later ones over earlier ones.",
        ),
    ],
    from_: Annotated[
        str,
        typer.Option("--from", help="diffusers, sat; or of configs: sat-config, dalle2-config, phenaki, nuwa, muse."),
    ],
    run: Annotated[Path | None, typer.Option(help="Run folder to create.", show_default="runs/<DIR>")] = None,
    link: Annotated[
        bool, typer.Option("--link", help="diffusers: refer to the folder instead of copying its weights.")
    ] = False,
    lora: Annotated[
        Path | None,
        typer.Option(help="diffusers: a LoRA file or folder; the run refers to DIR and holds the adapters."),
    ] = None,
) -> None:
    """Make a run from released weights, to sample from and to fine-tune; or print another project's config as Kineograph YAML.

    Configs: SAT's, DALLE2-pytorch's JSON, and scripts that call the trainers of phenaki-pytorch, nuwa-pytorch or
    muse-maskgit-pytorch; these are parsed, never run.

    Example: kineo import CogVideoX-2b --from diffusers --run runs/cogvideox-2b
    """
    from kineograph.interop.import_run import import_weights

    print(import_weights(what, from_, run, link, lora, _print_to_stderr))


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    to: Annotated[str, typer.Option("--to", help="diffusers or safetensors.")],
    checkpoint: Checkpoint = "last",
    online: Annotated[
        bool, typer.Option("--online", help="The weights of the last step instead of the averaged ones.")
    ] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="diffusers: only the adapters, as a LoRA file, instead of merged weights.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="diffusers: fp32, bf16 or fp16.", show_default="as saved in the run")
    ] = None,
    trust: Trust = False,
) -> None:
    """Write a run's weights for other tools: a diffusers folder (CogVideoX), or plain safetensors (every family)."""
    from kineograph.interop.export_run import export_weights

    for path in export_weights(run, out, to, checkpoint, online, lora, dtype, _print_to_stderr):
        print(path)


@weights_app.command("get")
def weights_get(
    name: Annotated[str | None, typer.Argument(help="Such as inception-v3; without a name, lists them.")] = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE", help="A file that you already have, instead of a download."),
    ] = None,
    accept_hash: Annotated[
        list[str] | None,
        typer.Option(metavar="SHA256", help="Accept a file of --from with this hash, which is not a known one."),
    ] = None,
) -> None:
    """Download weights (or the kernels flash-attention-3) to the cache ($KINEO_CACHE, or ~/.cache/kineograph) and check their hash."""
    if name is None:
        weights_list()
        return
    from kineograph.evaluate.weights import get_weights

    weights = get_weights(name, from_ or [], note=_print_to_stderr, accepted=accept_hash or [])
    print(f"{weights.path}  sha256 {weights.sha256}")


@weights_app.command("list")
def weights_list() -> None:
    """List the weights that can be downloaded, and those in the cache."""
    from kineograph.core.console import open_console
    from kineograph.evaluate.weights import weights_table

    open_console().print(weights_table())


@app.command()
def doctor(
    what: Annotated[list[str] | None, typer.Argument(metavar="[PRESET|FILE.yaml] [key=value …]")] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.001, help="Memory of the GPU to plan for, in GiB, instead of this machine's.")
    ] = None,
    processes: Processes = None,
    trust: Trust = False,
) -> None:
    """Check the machine, and estimate what a preset needs: whether it fits, and which setting helps."""
    from kineograph.run.dry_run import examine

    examine(what or [], memory=memory, processes=processes)


@app.command()
def runs(folder: Annotated[Path, typer.Argument(help="Folder of the runs.")] = Path("runs")) -> None:
    """List runs: stage, step, state, best score."""
    from kineograph.run.listing import print_runs

    print_runs(folder)


@app.command()
def studio(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS …]", help="Folders of runs, or run folders.", show_default="runs"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="Port to listen on.", show_default="8765, or the next free one"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others can reach any but 127.0.0.1.")] = "127.0.0.1",
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="A folder of pictures or clips to show and check; may be repeated."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Show runs in a browser: curves, samples over steps, evaluations, comparisons; draw with them; look at data; plan a run.

    Prints the address to open. Needs the extra `studio`.
    """
    from kineograph.studio.server import serve

    serve(folders or [], host, port, _print_to_stderr, trust, data or [])


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write curves, samples over steps, evaluations and configs of runs as one HTML file, to open anywhere or to mail."""
    from kineograph.studio.report import write_report

    print(write_report(runs, out, note=_print_to_stderr))


def _print_to_stderr(line: str) -> None:
    print(escape_controls(line), file=sys.stderr)


_SHARED = {"train", "cache", "evaluate", "sample"}  # commands that run on every rank


def _rank() -> int | None:
    """This process's rank; None without a launcher, or with half of its variables (the commands in _SHARED report that)."""
    from kineograph.core.errors import InputError
    from kineograph.run.launch import read_launcher_env

    try:
        env = read_launcher_env()
    except InputError:
        return None
    return None if env is None else env.rank


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; print an expected error as one plain message on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if not debug and "WORLD_SIZE" in os.environ:  # before torch is imported: its warnings come once per process
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = [word for word in words if word != "--debug"]
    if words[:1] == ["--"]:  # keeps torchrun from reading --run as its own --run-path; some versions pass it on
        words = words[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name that the terminal cannot show
    try:
        _check_encoding(words)
        if not (_SHARED & set(words)) and _rank():  # rank 0 runs it alone
            return
        app(args=words, prog_name="kineo", standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        _report(error, words)


def _check_encoding(words: list[str]) -> None:
    for number, word in enumerate(words, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # how Python holds bytes that are not UTF-8
            from kineograph.core.errors import InputError

            raise InputError(f"argument {number} is not UTF-8: {os.fsencode(word)!r}; convert it, or rename the file")


_LESS_TRAINING_MEMORY = (
    "lower train.batch_size or raise train.accumulate, set train.checkpointing=true, or make the model smaller (kineo doctor shows "
    "what takes how much); while samples are drawn, set sample.batch=1, while metrics are computed, evaluate.batch=1"
)
_OUT_OF_MEMORY = {  # what helps, by command
    "sample": "lower --batch (or sample.batch in RUN/config.yaml; 1 draws one at a time), --frames or --size",
    "story": "lower --frames (frames of a scene)",
    "evaluate": "lower --batch (or evaluate.batch in RUN/config.yaml; 1 takes one sample at a time), or choose fewer --metrics",
}


def _report(error: Any, words: Sequence[str] = ()) -> None:
    """Print an error as one message and exit with its code. Each rank prints its own; a stop is printed by rank 0."""
    from kineograph.core.errors import KineoError

    rank = _rank()
    prefix = "error: " if rank is None else f"error: rank {rank}: "
    if isinstance(error, KineoError):
        if error.exit_code != 75:
            _print_to_stderr(f"{prefix}{error}")
        elif not rank:
            _print_to_stderr(str(error))
        sys.exit(error.exit_code)
    on_gpu = type(error).__name__ == "OutOfMemoryError"
    if on_gpu or isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's message on a CPU
        remedy = next((_OUT_OF_MEMORY[word] for word in words if word in _OUT_OF_MEMORY), _LESS_TRAINING_MEMORY)
        _print_to_stderr(f"{prefix}the {'GPU' if on_gpu else 'machine'} is out of memory: {remedy}\n{error}")
        sys.exit(1)
    if isinstance(error, OSError) and error.filename is not None:  # a file that is gone, protected, too long …
        _print_to_stderr(f"{prefix}{error.filename}: {error.strerror}")
        sys.exit(2 if error.errno == errno.ENAMETOOLONG else 1)
    _print_to_stderr(f"{prefix}unexpected {type(error).__name__}: {error} (kineo --debug … shows where)")
    sys.exit(1)


if __name__ == "__main__":
    main()
