"""Drawn pictures to files: named by caption, never overwriting, each with a JSON file that tells how to draw it again."""

from __future__ import annotations

import platform
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

import kineograph
from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_json
from kineograph.media.clips import write_clip
from kineograph.media.filenames import reserve_path, slugify
from kineograph.media.grids import make_grid
from kineograph.sample.sampler import Drawn, Origin

FORMATS = ("gif", "mp4", "png")
SHEET = 64  # pictures on a contact sheet at most


def check_format(format: str | None) -> None:
    """Before anything is drawn."""
    if format is not None and format not in FORMATS:
        raise InputError(f"--format {format} is not written: use {', '.join(FORMATS)}")


def write(drawn: Drawn, folder: str | Path, format: str | None = None) -> list[Path]:
    """`a-red-3-moves-left-0001.gif` and `….json` for each row, and a contact sheet of several. → the media, then the sheet.

    The format is png for single pictures and gif for clips unless told.
    """
    check_format(format)
    suffix = f".{format or ('png' if drawn.pixels.shape[1] == 1 else 'gif')}"
    folder = Path(folder)
    command = command_for(drawn.origin, folder, format)
    numbers: Counter[str | None] = Counter()
    written = []
    for row, (clip, caption) in enumerate(zip(drawn.pixels, drawn.captions, strict=True)):
        numbers[caption] += 1
        path = reserve_path(folder, slugify(caption), numbers[caption], suffix)
        try:
            write_clip(path, clip, drawn.fps)
        except BaseException:
            path.unlink(missing_ok=True)  # the empty file that holds the name
            raise
        write_json(path.with_suffix(".json"), _sidecar(drawn, row, path, command))
        written.append(path)
    if len(drawn) > 1:
        sheet = reserve_path(folder, "sheet", 1, ".png")
        make_grid(list(drawn.pixels[:SHEET]), captions=drawn.captions[:SHEET]).save(sheet)
        written.append(sheet)
    return written


def _sidecar(drawn: Drawn, row: int, path: Path, command: str) -> dict[str, Any]:
    origin = asdict(drawn.origin)
    changed = origin.pop("changed")
    _, _, channels, height, width = drawn.pixels.shape
    return {
        "file": path.name,
        "caption": drawn.captions[row],
        "row": row,  # of the whole call, which `command` repeats
        "command": command,
        **origin,
        "changed_options": changed,
        "drawn": {"frames": drawn.pixels.shape[1], "size": [height, width], "channels": channels, "fps": drawn.fps},
        "versions": versions(),
    }


def command_for(origin: Origin, out: Path, format: str | None = None) -> str:
    """The command line that draws the same rows again, from the same checkpoint."""
    captions = origin.captions or []
    dashed = any(
        caption.startswith("-") for caption in captions
    )  # would be taken for options unless they come after --
    words = ["kineo", "sample", origin.run, *([] if dashed else captions), "--count", str(origin.count)]
    words += option_words(origin, out, format)
    return shlex.join([*words, *(["--", *captions] if dashed else [])])


def option_words(origin: Origin, out: Path, format: str | None) -> list[str]:
    """The options that every drawing command has."""
    words = ["--stage", origin.stage, "--checkpoint", str(origin.step), "--seed", str(origin.seed)]
    if not origin.ema:
        words.append("--no-ema")
    if origin.compiled:
        words.append("--compile")
    if origin.frames is not None:
        words += ["--frames", str(origin.frames)]
    if origin.size is not None:
        words += ["--size", f"{origin.size[0]}x{origin.size[1]}"]
    if origin.fps is not None:
        words += ["--fps", f"{origin.fps:g}"]
    if origin.negative is not None:
        words += ["--negative", origin.negative]
    if origin.prime is not None:
        words += ["--prime", origin.prime.get("file", "FILE")]
    if origin.sketch is not None:
        words += ["--sketch", origin.sketch.get("file", "FILE")]
    if origin.mask is not None:
        words += ["--mask", origin.mask.get("file", "FILE")]
    for key, value in origin.changed.items():
        words += ["--set", f"sample.{key}={_yaml(value)}"]
    if format is not None:
        words += ["--format", format]
    return [*words, "--out", str(out)]


def versions() -> dict[str, str]:
    return {"kineograph": kineograph.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _yaml(value: Any) -> str:
    """A value as an override writes it, on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
