"""`kineo data make`, `check` and `show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option, Typer

from kineograph.cli.options import Trust
from kineograph.core.text_file import escape_controls

app = Typer(name="data", help="Make a dataset to experiment with, or check your own.", no_args_is_help=True)


@app.command("make")
def data_make(
    what: Annotated[str, Argument(help="moving-digits; crops of pictures of yours; or emoji, with their names.")],
    out: Annotated[Path, Option(help="A new or empty folder.")],
    count: Annotated[int | None, Option(min=1, help="How many items.", show_default="100; emoji: all")] = None,
    as_: Annotated[
        str | None,
        Option("--as", help="gif, mp4, png, memmap or webdataset.", show_default="gif; crops and emoji: png"),
    ] = None,
    setting: Annotated[
        list[str] | None,
        Argument(
            metavar="[key=value …]",
            help="Digits: keys of data.*, such as size=64 frames=16 digits=2. Crops: size, zoom, smallest.",
        ),
    ] = None,
    from_: Annotated[
        list[Path] | None,
        Option(
            "--from",
            metavar="FOLDER",
            help="Crops: a folder of large pictures; may be repeated. Emoji: the package (.tgz or folder), if npm cannot get it.",
        ),
    ] = None,
    split: Annotated[str, Option(help="train, validation or test.")] = "train",
    embeddings: Annotated[
        str | None, Option(metavar="RUN", help="Write CLIP embeddings beside the shards, with this run's CLIP stage.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Write a dataset: moving digits, small crops of large pictures such as wallpapers, or 3,700 emoji with their names."""
    from kineograph.run.dataset_writer import write_dataset

    print(write_dataset(what, out, count, as_, setting or [], split, embeddings, from_ or []))


@app.command("check")
def data_check(
    folder: Annotated[Path, Argument(help="A dataset folder.")],
    setting: Annotated[
        list[str] | None,
        Argument(metavar="[key=value …]", help="Keys of data.*, such as flip=0.5 or size=256 frames=17 'buckets={}'."),
    ] = None,
    everything: Annotated[bool, Option("--all", help="List every problem, also many of one kind.")] = False,
) -> None:
    """List what a folder holds and every problem with it (exit 1 if there is any); with buckets, which items go where."""
    from kineograph.data.check import bucket_lines, check_folder, parse_settings

    settings = parse_settings(folder, setting) if setting else None  # before hours of decoding: it may have a typo
    report = check_folder(folder, settings)
    for line in [*report.lines(everything), *(bucket_lines(settings) if settings is not None else [])]:
        print(escape_controls(line))
    if report.problems:
        raise Exit(1)


@app.command("show")
def data_show(
    path: Annotated[
        Path,
        Argument(
            metavar="DIR|FILE.yaml", help="A folder of pictures, clips, shards or arrays; or a config that names it."
        ),
    ],
    what: Annotated[
        list[str] | None,
        Argument(
            metavar="[PRESET|FILE.yaml] [key=value …]",
            help="How to read them: a preset's data keys, and keys of data.*, such as size=64 frames=9 fps=8.",
        ),
    ] = None,
    out: Annotated[Path, Option(help="The picture to write.")] = Path("data.png"),
    count: Annotated[int, Option(min=1, max=400, help="How many items.")] = 16,
    split: Annotated[Literal["train", "validation", "test"], Option(help="Of which split.")] = "train",
    stage: Annotated[str | None, Option(help="Whose data keys.", show_default="the last stage")] = None,
) -> None:
    """Write a contact sheet of items as the model will see them: sampled, cropped, resized, with their captions.

    Example: kineo data show clips phenaki-tiny data.frames=9 --out clips.png
    """
    from kineograph.run.data_sheet import show_data

    print(show_data(path, what or [], out, count, split, stage))
