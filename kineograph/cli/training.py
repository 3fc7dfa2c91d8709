"""`kineo presets`, `train`, `cache`, `doctor` and `runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, BadParameter, Option, Typer

from kineograph.cli.options import Trust

app = Typer()

Processes = Annotated[
    int | None, Option(min=1, help="Processes to plan the run for.", show_default="those that a launcher started, or 1")
]


@app.command()
def presets(name: Annotated[str | None, Argument(help="Print the file of this preset.")] = None) -> None:
    """List the presets by family: what each is, hardware, time, expected result."""
    from kineograph.run.presets import print_preset, print_presets

    if name is None:
        print_presets()
    else:
        print_preset(name)


@app.command()
def train(
    what: Annotated[
        list[str] | None,
        Argument(metavar="PRESET|FILE.yaml … [key=value …]", help="A preset, YAML or JSON files, then overrides."),
    ] = None,
    run: Annotated[Path | None, Option(help="Run folder.", show_default="runs/<name>")] = None,
    resume: Annotated[
        Literal["auto", "never", "must"],
        Option(help="An existing run: auto continues it, never refuses it, must requires it."),
    ] = "auto",
    resume_from: Annotated[
        list[str] | None,
        Option(
            metavar="SOURCE",
            help="Continue from a checkpoint elsewhere: a folder, a tar, their URL, or wandb:ENTITY/PROJECT/NAME:VERSION.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Resolve the config, check the data, build, estimate; do not train.")
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
            raise BadParameter("has no effect with --dry-run: leave one out", param_hint="--resume-from")
        check(what or [], run, resume, processes=processes)
        return
    if processes is not None:
        raise BadParameter(
            "needs --dry-run; to train with several processes, start them with torchrun", param_hint="--processes"
        )
    from kineograph.run.train import train as run_training

    folder = run_training(what or [], run=run, resume=resume, resume_from=resume_from or ())
    if is_main_process():
        print(f"done: {folder}")


@app.command()
def cache(
    what: Annotated[list[str], Argument(metavar="RUN|FILE.yaml [key=value …]")],
    run: Annotated[Path | None, Option(help="Run folder, for a file or preset.")] = None,
    prune: Annotated[bool, Option("--prune", help="Then remove what no stage reads any more.")] = False,
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


@app.command()
def doctor(
    what: Annotated[list[str] | None, Argument(metavar="[PRESET|FILE.yaml] [key=value …]")] = None,
    memory: Annotated[
        float | None, Option(min=0.001, help="Memory of the GPU to plan for, in GiB, instead of this machine's.")
    ] = None,
    processes: Processes = None,
    trust: Trust = False,
) -> None:
    """Check the machine, and estimate what a preset needs: whether it fits, and which setting helps."""
    from kineograph.run.dry_run import examine

    examine(what or [], memory=memory, processes=processes)


@app.command()
def runs(folder: Annotated[Path, Argument(help="Folder of the runs.")] = Path("runs")) -> None:
    """List runs: stage, step, state, best score."""
    from kineograph.run.listing import print_runs

    print_runs(folder)
