"""A sketch to draw after: from a picture, a clip or a tensor, in the run's own size and speed and in the colours of its sketches.

Unlike frames to continue from it begins with the clip: its first frame lies under the first that is drawn. A picture is held for the whole clip;
after the end of a sketch that is shorter, nothing is sketched. A story has one sketch from its first frame to its last, of which every scene
sees the part that lies under it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import Task
from kineograph.data.config import DataConfig
from kineograph.data.timing import GIF_TOLERANCE, TOLERANCE
from kineograph.media.clips import read_frames
from kineograph.sample.prime import checked, digest, file_digest, fitted, fitted_tensor


@dataclass(frozen=True)
class Sketch:
    frames: Tensor  # T C H W, uint8; of a picture that is held for the whole clip all frames are one
    codec: Any  # of the sketches
    told: dict[str, Any]  # what a sidecar says about it

    def batch(self, rows: int, first: int = 0, count: int | None = None) -> Batch | None:
        """The same `count` frames from `first` on beside every prompt; None: nothing is sketched there."""
        part = self.frames[first : None if count is None else first + count]
        if not len(part):
            return None
        part = part[: _most(self.codec, len(part), (part.shape[2], part.shape[3]))]
        return Batch(slots=torch.arange(rows), extra={"sketch": part[None].expand(rows, *part.shape).contiguous()})


def read_sketch(
    sketch: str | Path | Tensor,
    task: Task,
    name: str,
    data: DataConfig,
    frames: int,
    size: tuple[int, int],
    note: Callable[[str], None],
    scenes: bool = False,
) -> Sketch:
    """What a clip of `frames` frames is drawn after; `note` hears what is left out. With `scenes` it is drawn in parts, each with its own of the sketch."""
    if "sketch" not in task.reads or "sketch" not in task.stages:
        remedy = (
            "train it with them (the stage's key sketch)"
            if "sketch" in type(task).Config.model_fields
            else "it draws after none; name a run (or with --stage a stage) of nuwa that was"
        )
        raise InputError(f"--sketch: {name} was trained without sketches: {remedy}")
    codec: Any = task.stages["sketch"]
    like = data.model_copy(update={"channels": codec.shape.channels})
    if isinstance(sketch, Tensor):
        clip, told = (
            _in_bytes(fitted_tensor(checked(sketch, "sketch")[:frames], like, size)),
            {"sha256": digest(sketch)},
        )
    else:
        clip = _first(sketch, data.fps, frames, lambda image: _in_bytes(fitted([image], like, size)))
        told = {"file": str(sketch), "sha256": file_digest(sketch)}
    if len(clip) == 1:
        clip = clip.expand(frames, -1, -1, -1)
    used = len(clip) if scenes else _most(codec, len(clip), size)
    if used < frames:
        note(f"--sketch: {used} frames are sketched, and nothing in the {frames - used} after them")
    return Sketch(clip[:used], codec, {**told, "frames": used})


def _in_bytes(clip: Tensor) -> Tensor:
    return (clip * 255).round().to(torch.uint8)


def _first(path: str | Path, fps: float | None, most: int, fit: Callable[[Image.Image], Tensor]) -> Tensor:
    """At most `most` frames from the first on, taken as training takes them: `fps` a second by timestamps, or without a `data.fps` one after
    another. Each is fitted as it is decoded, so that memory holds the sketch in the run's size only. → T C H W"""
    found: list[Tensor] = []  # 1 C H W
    starts: list[float] = []
    kind = ""
    for shown in read_frames(path):
        if fps is None and len(found) == most:
            break
        found.append(fit(shown.image))
        starts.append(shown.start)
        kind = shown.kind
        if fps is not None and shown.start - starts[0] > most / fps:
            break
    if fps is None or len(found) == 1:
        return torch.cat(found)
    late = GIF_TOLERANCE if kind == "GIF" else TOLERANCE
    since = np.array(starts) - starts[0]
    times = np.arange(most) / fps
    times = times[times <= since[-1] + late]
    places = np.searchsorted(since, times + late, side="right") - 1
    return torch.cat([found[place] for place in places])


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
