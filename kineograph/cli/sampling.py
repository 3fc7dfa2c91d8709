"""`kineo sample` and `kineo story`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

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

Negative = Annotated[str | None, Option(help="What not to draw.")]
Ema = Annotated[bool, Option("--ema/--no-ema", help="Averaged weights, or those of the last step.")]
Fps = Annotated[float | None, Option(help="Playback speed, frames per second.", show_default="as trained or --prime")]


@app.command()
def sample(
    run: Run,
    prompts: Annotated[
        list[str] | None, Argument(help='Captions; none for an unconditional model; "" for the null text.')
    ] = None,
    prompts_file: Annotated[
        Path | None,
        Option(
            "--prompts",
            metavar="FILE",
            help="Captions from a file: one per line, or caption@@picture; or .jsonl (docs/sampling.md).",
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for the media.", show_default="RUN/drawn")] = None,
    count: Annotated[int, Option(min=1, help="Samples per prompt.")] = 1,
    seed: Seed = 0,
    guidance: Guidance = None,
    steps: Steps = None,
    frames: Annotated[int | None, Option(min=1, help="Frames per clip, those of --prime included.")] = None,
    fps: Fps = None,
    prime: Annotated[
        Path | None,
        Option(
            help="A picture or clip to continue (a long clip: its last frames), or a picture to enlarge or, with --mask, to inpaint."
        ),
    ] = None,
    sketch: Annotated[Path | None, Option(help="A picture or clip to draw from, if trained with sketches.")] = None,
    mask: Annotated[Path | None, Option(help="A picture, white where the one of --prime is inpainted.")] = None,
    negative: Negative = None,
    checkpoint: Checkpoint = "last",
    format: Annotated[
        str | None,
        Option(help="gif, mp4, or png (a film strip).", show_default="gif for clips, mp4 with sound, png for pictures"),
    ] = None,
    stage: Stage = None,
    options: SamplingOptions = None,
    size: Annotated[
        str | None, Option(metavar="HxW", help="Height and width, pixels.", show_default="as trained")
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
        paths = write_samples(**flags, note=print_to_stderr)
    for path in paths:
        print(path)


@app.command()
def story(
    run: Run,
    scenes: Annotated[
        Path,
        Argument(
            metavar="SCENES.txt",
            help="One scene per line; blank lines and lines that begin with # are skipped. Or .jsonl: prompt, frames, overlap, negative, seed.",
        ),
    ],
    overlap: Annotated[
        int | None,
        Option(
            min=1,
            help="Frames of the previous scene that a scene continues.",
            show_default="the stage's sample.overlap, or about half a scene",
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for the video.", show_default="RUN/drawn")] = None,
    seed: Seed = 0,
    guidance: Guidance = None,
    steps: Steps = None,
    frames: Annotated[
        int | None,
        Option(
            min=1,
            help="Frames drawn per scene. The first scene shows all of them, later ones only the new: FRAMES − OVERLAP.",
            show_default="as trained",
        ),
    ] = None,
    fps: Fps = None,
    prime: Annotated[Path | None, Option(help="A picture or clip that the first scene continues.")] = None,
    sketch: Annotated[
        Path | None, Option(help="A picture or clip to draw the whole story from, for stages trained with sketches.")
    ] = None,
    negative: Negative = None,
    checkpoint: Checkpoint = "last",
    format: Annotated[str | None, Option(help="gif or mp4.", show_default="gif; mp4 with sound")] = None,
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

    for path in write_story(**flags, note=print_to_stderr):
        print(path)
