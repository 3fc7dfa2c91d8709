"""Samples to files: named by caption, never overwriting, each with a JSON sidecar from which it can be drawn again."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import kineograph
from kineograph.core.batch import Sound
from kineograph.core.run_folder import write_json
from kineograph.media.clips import choose_format, write_clip
from kineograph.media.filenames import reserve_path, slugify
from kineograph.media.frames import to_uint8
from kineograph.media.grids import make_grid, select_evenly
from kineograph.sample.prompt_file import write_prompts
from kineograph.sample.request import check_format

if TYPE_CHECKING:
    from kineograph.sample.sampler import Drawing

SHEET = 64  # samples on a contact sheet at most
STRIP = 4  # frames of a clip there


class SampleWriter:
    """Writes `a-red-3-moves-left-0001.gif` and its `.json` for each row, and a contact sheet of several.

    The default format is png for pictures, gif for clips and mp4 for clips with sound, which is written as `.wav` too. Prompts with
    inputs of their own are written beside them, as `prompts-0001.jsonl`, which the command in the sidecars reads.
    """

    def __init__(self, drawing: Drawing, folder: Path, format: str | None = None) -> None:
        check_format(format)
        self.drawing, self.folder, self.format = drawing, folder, format
        self.paths: dict[int, Path] = {}  # by row
        self._numbers: Counter[str | None] = Counter()
        self._sheet: dict[int, Tensor] = {}
        self._prompts_file: Path | None = None

    def write(self, row: int, clip: Tensor, sound: Sound | None = None) -> None:
        """Write a row, T C H W, and its sound."""
        request = self.drawing.request
        if request.is_from_file and self._prompts_file is None:
            self._prompts_file = reserve_path(self.folder, "prompts", 1, ".jsonl")
            write_prompts(self._prompts_file, request.entries or ())
        caption = self.drawing.rows[row].caption
        self._numbers[caption] += 1
        suffix = f".{self.format or choose_format(clip, sound)}"
        path = reserve_path(self.folder, slugify(caption), self._numbers[caption], suffix)
        try:
            write_clip(path, clip, self.drawing.fps[row], sound)
        except BaseException:
            path.unlink(missing_ok=True)  # the empty file that reserves the name
            raise
        heard = (
            {"sound": {"file": path.with_suffix(".wav").name, "sample_rate": sound.rate}} if sound is not None else {}
        )
        write_json(path.with_suffix(".json"), {"file": path.name, **heard, **self._build_sidecar(row, clip)})
        self.paths[row] = path
        if row < SHEET:
            self._sheet[row] = to_uint8(clip[select_evenly(len(clip), STRIP)])

    def finish(self) -> list[Path]:
        """→ the media by row, then the sheet."""
        paths = [self.paths[row] for row in sorted(self.paths)]
        if len(paths) > 1:
            rows = sorted(self._sheet)
            sheet = reserve_path(self.folder, "sheet", 1, ".png")
            captions = [self.drawing.rows[row].caption for row in rows]
            make_grid([self._sheet[row] for row in rows], captions=captions).save(sheet)
            paths.append(sheet)
        return paths

    def _build_sidecar(self, number: int, clip: Tensor) -> dict[str, Any]:
        """`row` counts within the whole call, which `command` repeats."""
        request, row = self.drawing.request, self.drawing.rows[number]
        arguments = [] if request.is_from_file else request.captions or []
        frames, channels, height, width = clip.shape
        own = {}
        if row.prompt is not None and request.is_from_file:
            own = {
                "prompt": row.prompt.to_json(),
                "captions": [row.caption],
                "seed": row.seed,
                "negative": row.negative,
                "frames": row.frames,
            }
        return {
            "caption": row.caption,
            "row": number,
            "command": request.to_command("sample", arguments, self.folder, self.format, self._prompts_file),
            **self.drawing.sidecar,
            "prime": row.prime.record if row.prime is not None else None,
            "mask": row.mask.record if row.mask is not None else None,
            **own,
            "drawn": {"frames": frames, "size": [height, width], "channels": channels, "fps": self.drawing.fps[number]},
            "versions": library_versions(),
        }


def library_versions() -> dict[str, Any]:
    return {"kineograph": kineograph.__version__, "torch": torch.__version__, "python": platform.python_version()}
