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

from kineograph.options import command

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


def _set_trust(trusted: bool) -> None:
    if trusted:
        from kineograph.core.trust import trust_all

        trust_all()


Word = Annotated[str | None, typer.Argument()]
Words = Annotated[list[str] | None, typer.Argument()]
Natural = Annotated[int, typer.Option(min=0)]
Count = Annotated[int, typer.Option(min=1)]
MaybeCount = Annotated[int | None, typer.Option(min=1)]
Files = Annotated[list[Path] | None, typer.Option("--from")]
Switch = Annotated[bool, typer.Option("--ema/--no-ema")]
Trust = Annotated[bool, typer.Option("--trust", callback=_set_trust)]
Split = Literal["train", "validation", "test"]

HELP = """
run: A run folder, such as runs/muse-tiny.
checkpoint: last, best, or a step.
stage: Which stage draws. (default: the last that can)
seed: Seed of the noise.
guidance: Classifier-free guidance scale.
steps: Sampling steps.
negative: What not to draw.
options sample.K=V: Any other sampling option.
batch: Samples drawn at a time; fewer take less memory. (default: sample.batch, or as many as fit)
ema: Averaged weights, or those of the last step.
fps: Playback speed, in frames per second. (default: as trained, or as --prime)
compile: torch.compile: the first batch is slow, later ones are faster. On a CPU it needs a C++ compiler.
device: auto, cpu, cuda, cuda:1 …
metrics: Comma-separated names. (default: all that apply)
extractor [METRIC=]NAME|FILE: The network behind a metric: a name from `kineo weights list`, or a TorchScript or safetensors file.
    Without METRIC: fid, rfid, kid, is.
    (default: inception-v3; fvd=i3d-kinetics400; lpips=lpips-vgg16; clip_score=the run's clip stage)
fid_mode: How fid, rfid and kid resize: tensorflow (the original, torch-fidelity), clean (clean-fid), pytorch (pytorch-fid).
    (default: tensorflow)
fid_features: Inception's layer for fid, rfid, kid: 64, 192, 768 or 2048. (default: 2048)
fvd_mode: How fvd resizes: tensorflow (the original), pytorch (cd-fvd). (default: tensorflow)
fvd_frames: Compute fvd on the first N frames of each clip. (default: all)
kid_subsets: Random subsets of kid.
kid_subset_size: Samples in a subset of kid. (default: 1000, or all if fewer)
is_splits: Splits of is. (default: 10 from 5,000 pictures on, otherwise 1)
save_stats FILE.npz: Write the statistics of the real items, to compare with later.
processes: Processes to plan the run for. (default: those that a launcher started, or 1)
trust: Run the code that a run or checkpoint from elsewhere names: dotted paths and pipes.
"""


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


@command(app, HELP)
def presets(name: Word = None) -> None:
    """List the presets by family: what each is, hardware, time, expected result.

    name: Print the file of this preset.
    """
    from kineograph.run.presets import print_preset, print_presets

    if name is None:
        print_presets()
    else:
        print_preset(name)


@command(app, HELP)
def train(
    what: Words = None,
    run: Path | None = None,
    resume: Literal["auto", "never", "must"] = "auto",
    resume_from: list[str] | None = None,
    dry_run: bool = False,
    processes: MaybeCount = None,
    trust: Trust = False,
) -> None:
    """Train all stages; run the same command again to resume.

    Example: kineo train muse-tiny data.source=folder data.folder=photos train.steps=500

    what PRESET|FILE.yaml … [key=value …]: A preset, YAML or JSON files, then overrides.
    run: Run folder. (default: runs/<name>)
    resume: An existing run: auto continues it, never refuses it, must requires it.
    resume_from SOURCE: Continue from a checkpoint elsewhere: a folder, a tar, their URL, or wandb:ENTITY/PROJECT/NAME:VERSION.
    dry_run: Resolve the config, check the data, build, estimate; do not train.
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


@command(app, HELP)
def sample(
    run: Path,
    prompts: Words = None,
    prompts_file: Annotated[Path | None, typer.Option("--prompts")] = None,
    out: Path | None = None,
    count: Count = 1,
    seed: Natural = 0,
    guidance: float | None = None,
    steps: MaybeCount = None,
    frames: MaybeCount = None,
    fps: float | None = None,
    prime: Path | None = None,
    sketch: Path | None = None,
    mask: Path | None = None,
    negative: str | None = None,
    checkpoint: str = "last",
    format: str | None = None,
    stage: str | None = None,
    options: Annotated[list[str] | None, typer.Option("--set")] = None,
    size: str | None = None,
    batch: MaybeCount = None,
    ema: Switch = True,
    compile: bool = False,
    device: str = "auto",
    trust: Trust = False,
) -> None:
    """Draw prompts with a trained run: media named by caption, each with a JSON file that reproduces it.

    Example: kineo sample runs/clips --prompts prompts.txt --count 2

    prompts: Captions; none for an unconditional model.
    prompts_file FILE: Captions from a file: one per line, or caption@@picture; or .jsonl (docs/sampling.md).
    out: Folder for the media. (default: RUN/drawn)
    count: Samples per prompt.
    frames: Frames per clip, those of --prime included.
    prime: A picture or clip to continue (a long clip: its last frames), or a picture to enlarge or, with --mask, to inpaint.
    sketch: A picture or clip to draw from, for stages trained with sketches.
    mask: A picture, white where the one of --prime is inpainted.
    format: gif, mp4, or png (a film strip of a clip). (default: gif for clips, mp4 with sound, png for pictures)
    size HxW: Height and width in pixels. (default: as trained)
    """
    flags = locals()  # the parameters above are the fields of SampleRequest, and where and how to write
    del flags["trust"]
    from kineograph.run.launch import NO_TIMEOUT, process_group
    from kineograph.sample.command import write_samples

    with process_group(timeout=NO_TIMEOUT):
        paths = write_samples(**flags, note=_print_to_stderr)
    _print_each(paths)


@command(app, HELP)
def story(
    run: Path,
    scenes: Path,
    overlap: MaybeCount = None,
    out: Path | None = None,
    seed: Natural = 0,
    guidance: float | None = None,
    steps: MaybeCount = None,
    frames: MaybeCount = None,
    fps: float | None = None,
    prime: Path | None = None,
    sketch: Path | None = None,
    negative: str | None = None,
    checkpoint: str = "last",
    format: str | None = None,
    stage: str | None = None,
    options: Annotated[list[str] | None, typer.Option("--set")] = None,
    ema: Switch = True,
    compile: bool = False,
    device: str = "auto",
    trust: Trust = False,
) -> None:
    """Draw one long video, a scene per line, each continuing the last; with a sheet of the scenes and a JSON file that reproduces it.

    Frames are written as they are drawn, so a story can have any length.

    scenes SCENES.txt: One scene per line; blank lines and lines that begin with # are skipped.
        Or .jsonl: prompt, frames, overlap, negative, seed.
    overlap: Frames of the previous scene that a scene continues. (default: the stage's sample.overlap, or about half a scene)
    out: Folder for the video. (default: RUN/drawn)
    frames: Frames drawn per scene. The first scene shows all of them, later ones only the new: FRAMES − OVERLAP.
        (default: as trained)
    prime: A picture or clip that the first scene continues.
    sketch: A picture or clip to draw the whole story from, for stages trained with sketches.
    format: gif or mp4. (default: gif; mp4 with sound)
    """
    flags = locals()
    del flags["trust"]
    from kineograph.sample.command import write_story

    _print_each(write_story(**flags, note=_print_to_stderr))


@command(app, HELP)
def evaluate(
    run: Path,
    moved: Words = None,
    metrics: str | None = None,
    samples: MaybeCount = None,
    split: str | None = None,
    prompts: Path | None = None,
    batch: MaybeCount = None,
    checkpoint: str = "last",
    stage: str | None = None,
    seed: Natural = 0,
    extractor: list[str] | None = None,
    fid_mode: Literal["tensorflow", "clean", "pytorch"] | None = None,
    fid_features: int | None = None,
    fvd_mode: Literal["tensorflow", "pytorch"] | None = None,
    fvd_frames: Annotated[int | None, typer.Option(min=10)] = None,
    kid_subsets: Count = 100,
    kid_subset_size: Annotated[int | None, typer.Option(min=2)] = None,
    is_splits: MaybeCount = None,
    from_items: bool = False,
    reference: str | None = None,
    reference_items: MaybeCount = None,
    save_stats: Path | None = None,
    compile: bool = False,
    device: str = "auto",
    trust: Trust = False,
) -> None:
    """Evaluate a run: a table, evaluation.json and a sheet of samples.

    Exit code 4: a metric that --metrics names could not be computed; the others are written.

    moved [data.folder=NEW]: Where the run's data lie now.
    samples: How many samples to evaluate. (default: 256)
    split: validation or test. (default: validation)
    prompts FILE: Draw and judge these prompts instead of held-out items (docs/sampling.md).
    batch: Samples at a time; fewer take less memory. (default: evaluate.batch, or as many as fit)
    from_items: Judge a decoder or upsampler alone: draw from the real items' embeddings or smaller copies, not through other stages.
    reference train|DIR|FILE.npz: What fid, kid and fvd compare samples with: the training split, a folder, or saved statistics.
        (default: the items of --split)
    reference_items: Items of the reference. (default: all, at most 50,000 of a split)
    """
    options = _parse_metric_options(locals())
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


def _parse_metric_options(flags: dict[str, Any]) -> Any:
    """The MetricOptions among the values of a command's flags."""
    from kineograph.core.config import parse
    from kineograph.core.metric_options import MetricOptions

    return parse(MetricOptions, {key: flags[key] for key in MetricOptions.model_fields if key in flags})


@command(app, HELP, name="metrics")
def compare_folders(
    drawn: Path,
    reference: Annotated[Path | None, typer.Argument()] = None,
    metrics: str | None = None,
    size: str | None = None,
    frames: MaybeCount = None,
    fps: Annotated[float | None, typer.Option(min=0.01)] = None,
    split: Split | None = None,
    samples: MaybeCount = None,
    extractor: list[str] | None = None,
    fid_mode: Literal["tensorflow", "clean", "pytorch"] | None = None,
    fid_features: int | None = None,
    fvd_mode: Literal["tensorflow", "pytorch"] | None = None,
    fvd_frames: Annotated[int | None, typer.Option(min=10)] = None,
    kid_subsets: Count = 100,
    kid_subset_size: Annotated[int | None, typer.Option(min=2)] = None,
    is_splits: MaybeCount = None,
    save_stats: Path | None = None,
    out: Path | None = None,
    device: str = "auto",
    trust: Trust = False,
) -> None:
    """Compare two sets of pictures or clips: FID, KID, IS, FVD, and PSNR, SSIM, LPIPS of pairs.

    Example: kineo metrics drawn photos --fid-mode clean --save-stats photos.npz

    Exit code 4: a metric that --metrics names could not be computed; the others are shown.

    drawn A: What was drawn: a folder, or statistics (.npz).
    reference B: What to compare with: a folder, statistics (.npz), or a run, for its data.
    metrics: Comma-separated: fid, kid, fvd, is; paired, paired_lpips for files of equal names.
        (default: fid, kid, is, and fvd of clips)
    size N|HxW: Scale and crop files to this size first. (default: their own size)
    frames: Read the first N frames of each clip. (default: all)
    fps: Read clips at this rate. (default: their own)
    split: Which items of B. (default: train of a run, all of a folder)
    samples: Read at most N items of each set. (default: all)
    out FILE.json: Also write the results here.
    """
    options = _parse_metric_options(locals())
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


@command(app, HELP)
def compare(runs: list[Path], out: Path | None = None, trust: Trust = False) -> None:
    """Compare runs side by side.

    runs: Run folders.
    out: Write comparison.json and comparison.png here.
    """
    from kineograph.evaluate.compare import compare as compare_runs

    comparison = compare_runs(runs)
    comparison.show()
    if out is not None:
        _print_each(comparison.write(out))


@command(app, HELP)
def race(
    data: str,
    setting: Words = None,
    run: Path | None = None,
    families: str | None = None,
    minutes: Annotated[float, typer.Option(min=0.001)] = 5,
    seeds: Annotated[int, typer.Option(min=1, max=100)] = 1,
    metrics: str | None = None,
    samples: Count = 256,
    extractor: list[str] | None = None,
    frames: MaybeCount = None,
    size: Annotated[int | None, typer.Option(min=8)] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64)] = 1,
    board: Path | None = None,
    plan: bool = False,
    trust: Trust = False,
) -> None:
    """Race families on the same data, in the same minutes, before the same judge: one table, one sheet.

    Run the same command again to go on. Exit code 1: a family failed; the others are in the table.

    Example: kineo race digits --families muse,dalle2 --frames 1 --minutes 5

    data DATA: digits, a folder, or a YAML with a data section.
    setting [key=value …]: How a folder is read: keys of data.*, such as split_by=folder.
    run: Folder of the race. (default: runs/race-<data>)
    families: Comma-separated families. (default: all that have presets)
    minutes: Training time of each family, compilation included.
    seeds: Runs of each family.
    samples: Held-out prompts that each family is judged on.
    frames: Frames of a clip; 1 races on pictures. (default: as the data have)
    size: Height and width in pixels. (default: 64; on a CPU 32)
    jobs: Families that run side by side.
    board FILE.md: Write the table to this board, or replace it there.
    plan: Write the plans and stop, to look at them or edit them.
    """
    from kineograph.race.command import race as run_race

    print(
        run_race(
            data, setting or [], run=run, families=_split_names(families), minutes=minutes, seeds=seeds, metrics=metrics,
            samples=samples, extractors=extractor or [], frames=frames, size=size, jobs=jobs, board=board, plan_only=plan,
            trust=trust, command=f"kineo {shlex.join(sys.argv[1:])}", note=_print_to_stderr,
        )
    )  # fmt: skip


@command(app, HELP)
def cache(what: list[str], run: Path | None = None, prune: bool = False, trust: Trust = False) -> None:
    """Encode the data once with the trained codecs and frozen text encoders; training then reads it from disk.

    Only new and changed items are encoded.

    what RUN|FILE.yaml [key=value …]: A run folder; or a preset or file with overrides.
    run: Run folder, for a file or preset.
    prune: Then remove what no stage reads any more.
    """
    from kineograph.run.cache import cache_run
    from kineograph.run.launch import NO_TIMEOUT, is_main_process, process_group

    with process_group(timeout=NO_TIMEOUT):
        paths = cache_run(what, run, remove=prune)
    _print_each(paths if is_main_process() else ())


@command(data_app, HELP, name="make")
def data_make(
    what: str,
    out: Annotated[Path, typer.Option()],
    count: MaybeCount = None,
    as_: Annotated[str | None, typer.Option("--as")] = None,
    setting: Words = None,
    from_: Files = None,
    split: str = "train",
    embeddings: str | None = None,
    trust: Trust = False,
) -> None:
    """Write a dataset: moving digits, small crops of large pictures such as wallpapers, or 3,700 emoji with their names.

    what: moving-digits; crops of pictures of yours; or emoji, with their names.
    out: A new or empty folder.
    count: How many items. (default: 100; emoji: all)
    as_: gif, mp4, png, memmap or webdataset. (default: gif; crops and emoji: png)
    setting [key=value …]: Digits: keys of data.*, such as size=64 frames=16 digits=2. Crops: size, zoom, smallest.
    from_ FOLDER: Crops: a folder of large pictures; may be repeated. Emoji: the package (.tgz or folder), if npm cannot get it.
    split: train, validation or test.
    embeddings RUN: Write CLIP embeddings beside the shards, with this run's CLIP stage.
    """
    from kineograph.run.dataset_writer import write_dataset

    print(write_dataset(what, out, count, as_, setting or [], split, embeddings, from_ or []))


@command(data_app, HELP, name="check")
def data_check(folder: Path, setting: Words = None) -> None:
    """List what a folder holds and every problem with it (exit 1 if there is any); with buckets, which items go where.

    folder: A dataset folder.
    setting [key=value …]: Keys of data.*, such as flip=0.5 or size=256 frames=17 fps=8 'buckets={}'.
    """
    from kineograph.data.check import bucket_lines, check_folder, parse_settings

    settings = parse_settings(folder, setting) if setting else None  # before hours of decoding: it may have a typo
    report = check_folder(folder, settings)
    _print_each([*report.lines(), *(bucket_lines(settings) if settings is not None else [])])
    if report.problems:
        raise typer.Exit(1)


@command(data_app, HELP, name="show")
def data_show(
    path: Path,
    what: Words = None,
    out: Path = Path("data.png"),
    count: Annotated[int, typer.Option(min=1, max=400)] = 16,
    split: Split = "train",
    stage: str | None = None,
) -> None:
    """Write a contact sheet of items as the model will see them: sampled, cropped, resized, with their captions.

    Example: kineo data show clips phenaki-tiny data.frames=9 --out clips.png

    path DIR|FILE.yaml: A folder of pictures, clips, shards or arrays; or a config that names its data.
    what [PRESET|FILE.yaml] [key=value …]: How to read them: a preset's data keys, and keys of data.*, such as size=64 frames=9 fps=8.
    out: The picture to write.
    count: How many items.
    split: Of which split.
    stage: Whose data keys. (default: the last stage)
    """
    from kineograph.run.data_sheet import show_data

    print(show_data(path, what or [], out, count, split, stage))


@command(app, HELP, name="import")
def import_(
    what: list[Path],
    from_: Annotated[str, typer.Option("--from")],
    run: Path | None = None,
    link: bool = False,
    lora: Path | None = None,
) -> None:
    """Make a run from released weights, to sample from and to fine-tune; or print another project's config as Kineograph YAML.

    Configs: SAT's, DALLE2-pytorch's JSON, and scripts that call the trainers of phenaki-pytorch, nuwa-pytorch or
    muse-maskgit-pytorch; these are parsed, never run.

    Example: kineo import CogVideoX-2b --from diffusers --run runs/cogvideox-2b

    what DIR|FILE …: A folder of weights; or a config; sat-config: several, later ones over earlier ones.
    from_: diffusers, sat; or of configs: sat-config, dalle2-config, phenaki, nuwa, muse.
    run: Run folder to create. (default: runs/<DIR>)
    link: diffusers: refer to the folder instead of copying its weights.
    lora: diffusers: a LoRA file or folder; the run refers to DIR and holds the adapters.
    """
    from kineograph.interop.import_run import import_weights

    print(import_weights(what, from_, run, link, lora, _print_to_stderr))


@command(app, HELP)
def export(
    run: Path,
    out: Path,
    to: Annotated[str, typer.Option("--to")],
    checkpoint: str = "last",
    online: bool = False,
    lora: bool = False,
    dtype: str | None = None,
    trust: Trust = False,
) -> None:
    """Write a run's weights for other tools: a diffusers folder (CogVideoX), or plain safetensors (every family).

    out DIR: A new or empty folder.
    to: diffusers or safetensors.
    online: The weights of the last step instead of the averaged ones.
    lora: diffusers: only the adapters, as a LoRA file, instead of merged weights.
    dtype: diffusers: fp32, bf16 or fp16. (default: as saved in the run)
    """
    from kineograph.interop.export_run import export_weights

    _print_each(export_weights(run, out, to, checkpoint, online, lora, dtype, _print_to_stderr))


@command(weights_app, HELP, name="get")
def weights_get(name: Word = None, from_: Files = None, accept_hash: list[str] | None = None) -> None:
    """Download weights (or the kernels flash-attention-3) to the cache ($KINEO_CACHE, or ~/.cache/kineograph) and check their hash.

    name: Such as inception-v3; without a name, lists them.
    from_ FILE: A file that you already have, instead of a download.
    accept_hash SHA256: Accept a file of --from with this hash, which is not a known one.
    """
    if name is None:
        weights_list()
        return
    from kineograph.evaluate.weights import get_weights

    weights = get_weights(name, from_ or [], note=_print_to_stderr, accepted=accept_hash or [])
    print(f"{weights.path}  sha256 {weights.sha256}")


@command(weights_app, HELP, name="list")
def weights_list() -> None:
    """List the weights that can be downloaded, and those in the cache."""
    from kineograph.core.console import open_console
    from kineograph.evaluate.weights import weights_table

    open_console().print(weights_table())


@command(app, HELP)
def doctor(
    what: Words = None,
    memory: Annotated[float | None, typer.Option(min=0.001)] = None,
    processes: MaybeCount = None,
    trust: Trust = False,
) -> None:
    """Check the machine, and estimate what a preset needs: whether it fits, and which setting helps.

    what [PRESET|FILE.yaml] [key=value …]: What to estimate; nothing: check the machine alone.
    memory: Memory of the GPU to plan for, in GiB, instead of this machine's.
    """
    from kineograph.run.dry_run import examine

    examine(what or [], memory=memory, processes=processes)


@command(app, HELP)
def runs(folder: Annotated[Path, typer.Argument()] = Path("runs")) -> None:
    """List runs: stage, step, state, best score.

    folder: Folder of the runs.
    """
    from kineograph.run.listing import print_runs

    print_runs(folder)


@command(app, HELP)
def studio(
    folders: Annotated[list[Path] | None, typer.Argument()] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535)] = None,
    host: str = "127.0.0.1",
    data: list[Path] | None = None,
    trust: Trust = False,
) -> None:
    """Show runs in a browser: curves, samples over steps, evaluations, comparisons; draw with them; look at data; plan a run.

    Prints the address to open. Needs the extra `studio`.

    folders [RUNS …]: Folders of runs, or run folders. (default: runs)
    port: Port to listen on. (default: 8765, or the next free one)
    host: Address to listen on; others can reach any but 127.0.0.1.
    data DIR: A folder of pictures or clips to show and check; may be repeated.
    """
    from kineograph.studio.server import serve

    serve(folders or [], host, port, _print_to_stderr, trust, data or [])


@command(app, HELP)
def report(runs: list[Path], out: Annotated[Path, typer.Option("--out", "-o")] = Path("report.html")) -> None:
    """Write curves, samples over steps, evaluations and configs of runs as one HTML file, to open anywhere or to mail.

    runs: Run folders.
    out: The file to write.
    """
    from kineograph.studio.report import write_report

    print(write_report(runs, out, note=_print_to_stderr))


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _print_each(lines: Sequence[object]) -> None:
    for line in lines:
        print(line)


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
            print(f"{prefix}{error}", file=sys.stderr)
        elif not rank:
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    on_gpu = type(error).__name__ == "OutOfMemoryError"
    if on_gpu or isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's message on a CPU
        remedy = next((_OUT_OF_MEMORY[word] for word in words if word in _OUT_OF_MEMORY), _LESS_TRAINING_MEMORY)
        print(f"{prefix}the {'GPU' if on_gpu else 'machine'} is out of memory: {remedy}\n{error}", file=sys.stderr)
        sys.exit(1)
    if isinstance(error, OSError) and error.filename is not None:  # a file that is gone, protected, too long …
        print(f"{prefix}{error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2 if error.errno == errno.ENAMETOOLONG else 1)
    print(f"{prefix}unexpected {type(error).__name__}: {error} (kineo --debug … shows where)", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
