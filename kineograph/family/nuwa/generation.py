"""Drawing clips with NUWA: token after token, window after window.

A clip longer than trained is drawn in windows of the trained length. The last times of a window become the first of the next, as if the clip
began there: they pass the network again in one go, at positions that it knows, and what follows is drawn after them. (A cache that rolls on
would be cheaper by that one pass, but would put learned positions, and the distance to BOS, where training never was.) By default all times but
one are kept, so that every new one sees as much as the last one of a trained clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from kineograph.core.batch import Prompts
from kineograph.core.errors import ConfigError, InputError
from kineograph.family.nuwa.config import NuwaSample
from kineograph.family.nuwa.network import Condition
from kineograph.text.conditioning import TextEmbeddings, encode_prompts

if TYPE_CHECKING:
    from kineograph.family.nuwa.task import Nuwa


def draw(task: Nuwa, prompts: Prompts, options: NuwaSample) -> Tensor:
    """Pixels for prompts, B T C H W: all frames that are asked for, those given among them."""
    task.easel.prepare(task)
    try:
        return _draw(task, prompts, options)
    finally:
        if any(p.requires_grad for p in task.head.parameters()):  # training wants the memory back
            task.easel.clear()


def _draw(task: Nuwa, prompts: Prompts, options: NuwaSample) -> Tensor:
    frames = prompts.frames or task.shape.frames
    window = _given(task, prompts, frames)  # B k h w: tokens of the present window
    total, first, shown = _times(task, prompts, frames), 0, 0
    again, kept = (
        overlap(task, options) if total > task.grid[0] else (0, 0)
    )  # what cannot slide is said before anything is drawn
    words, guide = _words(task, prompts, options)
    sketch = task.prompted_sketch(prompts)
    clip: list[Tensor] = []
    while True:
        length = min(task.grid[0], total - first)
        if window.shape[1] < length:
            condition = Condition(*words, _sketch_at(task, sketch, first, guide))
            room = min(task.grid[0], total)
            window = _draw_window(task, window, length, room, condition, prompts, options, guide, first)
        pixels = task.codec.decode(window)
        clip.append(pixels[:, shown:])
        end = first + window.shape[1]
        if end >= total:
            return torch.cat(clip, dim=1)
        # Where a time is one frame the tokens stay as they are; else the first time of a clip is unlike the others, and frames are encoded anew.
        framewise = task.grid[0] == task.shape.frames
        window = window[:, -kept:] if framewise else task.codec.encode(pixels[:, -again:])
        first, shown = end - kept, again


def _draw_window(
    task: Nuwa,
    given: Tensor,  # B k h w
    length: int,
    room: int,
    condition: Condition,
    prompts: Prompts,
    options: NuwaSample,
    guide: bool,
    first: int,
) -> Tensor:
    """`length` times of tokens of which the first are given, B t h w; `first` is where they stand in the clip.

    The canvas has room for the longest window of the clip, so that all of them share it.
    """
    _, height, width = task.grid
    canvas = task.easel.canvas(task, condition, prompts.noise, room, guide, options)
    area = height * width  # tokens a time
    drawn = canvas.draw(condition, prompts.noise, given.flatten(1), first * area, length * area)
    return rearrange(drawn, "b (t h w) -> b t h w", h=height, w=width)


def _words(task: Nuwa, prompts: Prompts, options: NuwaSample) -> tuple[TextEmbeddings, bool]:
    """The texts of all rows that run: those asked for, and after them those to be guided away from, where there is guidance."""
    wanted, other = encode_prompts(task.text, prompts)
    if options.guidance == 1 or other is None:
        return wanted, False
    return wanted.join(other), True


def _sketch_at(task: Nuwa, sketch: Tensor | None, first: int, guide: bool) -> Tensor | None:
    """The sketch of a window that begins at time `first`, B M, for all rows that run."""
    if sketch is None or task.network.sketch is None:
        return None
    part = task.network.sketch.cut(sketch, first * task.network.sketch.grid[0] // task.grid[0])
    return torch.cat([part, part]) if guide else part


# What is asked for -----------------------------------------------------------------------------------------------


def _times(task: Nuwa, prompts: Prompts, frames: int) -> int:
    """Token times of the clip."""
    shape = task.shape
    size = (prompts.height or shape.height, prompts.width or shape.width)
    if size != (shape.height, shape.width):
        raise InputError(
            f"height × width = {size} cannot be drawn: this nuwa was trained for {(shape.height, shape.width)}"
        )
    if frames > shape.frames and task.grid[0] == 1:
        raise InputError(
            f"frames={frames}: this nuwa was trained on clips of one token time and cannot continue them; train with more data.frames"
        )
    return int(task.codec.shape_for(frames, *size)[0])


def _given(task: Nuwa, prompts: Prompts, frames: int) -> Tensor:
    """Tokens of the frames to begin with, B k h w; none: k = 0."""
    if prompts.prime is None:
        return torch.zeros(len(prompts), 0, *task.grid[1:], dtype=torch.int64, device=prompts.noise.device)
    if prompts.prime.shape[1] >= frames:
        raise InputError(
            f"{prompts.prime.shape[1]} frames are given and {frames} are asked for: nothing is left to draw; ask for more (--frames)"
        )
    return task.codec.encode(prompts.prime)


def overlap(task: Nuwa, options: NuwaSample) -> tuple[int, int]:
    """How much of a window the next one begins with: frames, and the token times that they make."""
    most = task.grid[0] - 1
    if options.overlap is None:
        return _frames_of(task, most), most
    times = int(task.codec.shape_for(options.overlap, task.shape.height, task.shape.width)[0])
    if times > most:
        raise InputError(
            f"sample.overlap={options.overlap} leaves nothing to draw in a window of {task.shape.frames} frames: use {_frames_of(task, most)} or fewer"
        )
    return options.overlap, times


def _frames_of(task: Nuwa, times: int) -> int:
    """Frames that make so many token times."""
    for frames in range(1, task.shape.frames + 1):
        try:
            if task.codec.shape_for(frames, task.shape.height, task.shape.width)[0] == times:
                return frames
        except ConfigError:  # a number of frames that the codec does not take
            continue
    raise InputError(f"no number of frames makes {times} token times")
