"""A sketch to draw after: from a picture, a clip or a tensor, in the run's own size and speed and in the colours of its sketches.

Unlike frames to continue from it begins with the clip: its first frame lies under the first that is drawn. A picture is held for the whole clip;
after the end of a sketch that is shorter, nothing is sketched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import Task
from kineograph.data.config import DataConfig
from kineograph.data.timing import GIF_TOLERANCE, TOLERANCE
from kineograph.media.clips import Shown, frames_of
from kineograph.sample.prime import checked, digest, file_digest, fitted, fitted_tensor


@dataclass(frozen=True)
class Sketch:
    frames: Tensor  # T C H W, uint8
    told: dict[str, Any]  # what a sidecar says about it

    def batch(self, rows: int) -> Batch:
        """The same sketch beside every prompt."""
        return Batch(
            slots=torch.arange(rows), extra={"sketch": self.frames[None].expand(rows, *self.frames.shape).contiguous()}
        )


def read_sketch(
    sketch: str | Path | Tensor,
    task: Task,
    name: str,
    data: DataConfig,
    frames: int,
    size: tuple[int, int],
    note: Callable[[str], None],
) -> Sketch:
    """What a call for `frames` frames draws after; `note` hears what is left out."""
    if "sketch" not in task.reads or "sketch" not in task.stages:
        raise InputError(f"--sketch: {name} was trained without sketches: set stages.x.sketch and train with them")
    codec: Any = task.stages["sketch"]
    like = data.model_copy(update={"channels": codec.shape.channels})
    if isinstance(sketch, Tensor):
        clip, told = fitted_tensor(checked(sketch, "sketch")[:frames], like, size), {"sha256": digest(sketch)}
    else:
        images = _first(sketch, data.fps, frames)
        clip = fitted([shown.image for shown in images], like, size)
        told = {"file": str(sketch), "sha256": file_digest(sketch)}
    if len(clip) == 1:
        clip = clip.expand(frames, -1, -1, -1)
    used = _most(codec, len(clip), size)
    if used < frames:
        note(f"--sketch: {used} frames are sketched, and nothing in the {frames - used} after them")
    return Sketch((clip[:used] * 255).round().to(torch.uint8), {**told, "frames": used})


def _first(path: str | Path, fps: float | None, most: int) -> list[Shown]:
    """At most `most` frames from the first on, taken as training takes them: `fps` a second by timestamps, or without a `data.fps` one after
    another."""
    found: list[Shown] = []
    for shown in frames_of(path):
        if fps is None and len(found) == most:
            break
        found.append(shown)
        if fps is not None and shown.start - found[0].start > most / fps:
            break
    if fps is None or len(found) == 1:
        return found
    late = GIF_TOLERANCE if found[0].kind == "GIF" else TOLERANCE
    starts = np.array([shown.start for shown in found]) - found[0].start
    times = np.arange(most) / fps
    times = times[times <= starts[-1] + late]
    places = np.searchsorted(starts, times + late, side="right") - 1
    return [found[place] for place in places]


def _most(codec: Any, frames: int, size: tuple[int, int]) -> int:
    """The largest number of frames, up to this one, that the codec of the sketches takes."""
    for fewer in range(frames, 0, -1):
        try:
            codec.shape_for(fewer, *size)
        except ConfigError:
            if fewer == 1:
                raise
            continue
        return fewer
    raise InputError("--sketch holds no frames")
