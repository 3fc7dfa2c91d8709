"""Samples to files: named by caption, never overwriting, each with a JSON sidecar from which it can be drawn again."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kineograph
from kineograph.core.run_folder import write_json
from kineograph.media.clips import write_clip
from kineograph.media.filenames import reserve_path, slugify
from kineograph.media.grids import make_grid
from kineograph.sample.request import check_format

if TYPE_CHECKING:
    from kineograph.sample.sampler import Samples

SHEET = 64  # samples on a contact sheet at most


def save_samples(samples: Samples, folder: Path, format: str | None = None) -> list[Path]:
    """Write `a-red-3-moves-left-0001.gif` and its `.json` for each row, and a contact sheet of several. → the media, then the sheet.

    The default format is png for pictures and gif for clips.
    """
    check_format(format)
    _, frames, channels, height, width = samples.pixels.shape
    suffix = f".{format or ('png' if frames == 1 else 'gif')}"
    shared = {
        "command": samples.request.to_command("sample", samples.request.prompts or [], folder, format),
        **samples.sidecar,
        "drawn": {"frames": frames, "size": [height, width], "channels": channels, "fps": samples.fps},
        "versions": library_versions(),
    }
    numbers: Counter[str | None] = Counter()
    paths = []
    for row, (clip, caption) in enumerate(zip(samples.pixels, samples.captions, strict=True)):
        numbers[caption] += 1
        path = reserve_path(folder, slugify(caption), numbers[caption], suffix)
        try:
            write_clip(path, clip, samples.fps)
        except BaseException:
            path.unlink(missing_ok=True)  # the empty file that reserves the name
            raise
        # `row` counts within the whole call, which `command` repeats.
        write_json(path.with_suffix(".json"), {"file": path.name, "caption": caption, "row": row, **shared})
        paths.append(path)
    if len(samples) > 1:
        sheet = reserve_path(folder, "sheet", 1, ".png")
        make_grid(list(samples.pixels[:SHEET]), captions=samples.captions[:SHEET]).save(sheet)
        paths.append(sheet)
    return paths


def library_versions() -> dict[str, Any]:
    return {"kineograph": kineograph.__version__, "torch": torch.__version__, "python": platform.python_version()}
