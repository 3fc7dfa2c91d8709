"""`--sketch`: a sketch to draw from, in the run's size and frame rate and in the colours of its sketches.

Its first frame lies under the first frame of the clip. A picture holds for the whole clip; after the end of a shorter sketch nothing is
sketched. A story has one sketch from its first frame to its last; each scene sees its own part.
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
from kineograph.core.task import Codec, Task
from kineograph.data.open_source import DataConfig
from kineograph.data.transforms import GIF_TOLERANCE, TOLERANCE
from kineograph.media.clips import read_frames
from kineograph.sample.prime import Size, check_clip, fit_images, fit_tensor, identify


@dataclass(frozen=True)
class Sketch:
    frames: Tensor  # T C H W, uint8
    codec: Codec  # of the sketches
    record: dict[str, Any]  # for the sidecar

    def to_batch(self, rows: int, first: int = 0, count: int | None = None) -> Batch | None:
        """`count` frames from `first` on, the same for every row; None where nothing is sketched."""
        part = self.frames[first : None if count is None else first + count]
        if not len(part):
            return None
        part = part[: _longest_length(self.codec, len(part), (part.shape[2], part.shape[3]))]
        return Batch(slots=torch.arange(rows), extra={"sketch": part[None].expand(rows, *part.shape).contiguous()})


def read_sketch(
    source: str | Path | Tensor,
    task: Task,
    name: str,
    data: DataConfig,
    frames: int,
    size: Size,
    note: Callable[[str], None],
    story: bool = False,
) -> Sketch:
    """Read the sketch of a clip of `frames` frames; a `story` cuts it into scenes later."""
    if "sketch" not in task.reads or "sketch" not in task.stages:
        remedy = (
            "train it with them (the stage's key sketch)"
            if "sketch" in type(task).Config.model_fields
            else "use a run (or with --stage a stage) of nuwa that was trained with them"
        )
        raise InputError(f"--sketch: {name} was trained without sketches: {remedy}")
    codec = task.stage("sketch", Codec)
    data = data.model_copy(update={"channels": codec.shape.channels})
    if isinstance(source, Tensor):
        clip = _to_uint8(fit_tensor(check_clip(source, "sketch")[:frames], data, size))
    else:
        clip = _read_first_frames(source, data.fps, frames, lambda image: _to_uint8(fit_images([image], data, size)))
    if len(clip) == 1:
        clip = clip.expand(frames, -1, -1, -1)
    used = len(clip) if story else _longest_length(codec, len(clip), size)
    if used < frames:
        note(f"--sketch: {used} of {frames} frames are sketched; the last {frames - used} are not")
    return Sketch(clip[:used], codec, {**identify(source), "frames": used})


def _to_uint8(clip: Tensor) -> Tensor:
    return (clip * 255).round().to(torch.uint8)


def _read_first_frames(path: str | Path, fps: float | None, most: int, fit: Callable[[Image.Image], Tensor]) -> Tensor:
    """At most `most` frames from the first on, T C H W, chosen as in training: by timestamps at `fps`, or all of them without one.

    Each is fitted as it is decoded, so that memory holds the sketch in the run's size only.
    """
    fitted: list[Tensor] = []  # 1 C H W each
    starts: list[float] = []
    kind = ""
    for frame in read_frames(path):
        if fps is None and len(fitted) == most:
            break
        fitted.append(fit(frame.image))
        starts.append(frame.start)
        kind = frame.kind
        if fps is not None and frame.start - starts[0] > most / fps:
            break
    if fps is None or len(fitted) == 1:
        return torch.cat(fitted)
    tolerance = GIF_TOLERANCE if kind == "GIF" else TOLERANCE
    since = np.array(starts) - starts[0]
    times = np.arange(most) / fps
    times = times[times <= since[-1] + tolerance]
    indices = np.searchsorted(since, times + tolerance, side="right") - 1
    return torch.cat([fitted[index] for index in indices])


def _longest_length(codec: Codec, frames: int, size: Size) -> int:
    """The largest number of frames, up to `frames`, that the codec of the sketches can encode."""
    for length in range(frames, 0, -1):
        try:
            codec.shape_for(length, *size)
        except ConfigError:
            if length == 1:
                raise
            continue
        return length
    raise InputError("--sketch holds no frames")
