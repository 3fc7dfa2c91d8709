"""Sampling clips with NUWA: token by token, and window by window for clips longer than trained.

The last frames of a window become the first of the next, as if the clip began there: they pass the network again in one
prefill, at positions seen in training. (A rolling cache would save that pass, but would put learned positions and the
distance to BOS out of the trained range.) By default all latent frames but one are kept, so that each new one has as much
context as the last one of a trained clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from kineograph.core.batch import Prompts
from kineograph.core.errors import InputError
from kineograph.family.nuwa.config import NuwaSample
from kineograph.family.nuwa.network import Condition
from kineograph.text.conditioning import encode_prompts

if TYPE_CHECKING:
    from kineograph.family.nuwa.task import Nuwa


def sample_clips(task: Nuwa, prompts: Prompts, options: NuwaSample) -> tuple[Tensor, Tensor | None]:
    """Pixels B T C H W, beginning with the frames of `prompts.prime`, and their sound B T S, where there is any."""
    task.sessions.update_weights(task)
    try:
        return _sample_windows(task, prompts, options)
    finally:
        # Free the memory for training.
        if any(p.requires_grad for p in task.head.parameters()):
            task.sessions.sessions.clear()


def _sample_windows(task: Nuwa, prompts: Prompts, options: NuwaSample) -> tuple[Tensor, Tensor | None]:
    frames = prompts.frames or task.shape.frames
    window = _encode_prime(task, prompts, frames)  # tokens of the current window, B k h w
    trained, height, width = task.grid
    total = _count_latent_frames(task, prompts, frames)
    overlap_frames, overlap = _choose_overlap(task, options) if total > trained else (0, 0)
    text, negative = encode_prompts(task.text, prompts)
    guide = options.guidance != 1 and negative is not None
    if guide and negative is not None:
        text = text.join(negative)
    sketch = task.encode_prompt_sketch(prompts)
    clip: list[Tensor] = []
    sounds: list[Tensor] = []  # tokens; the codec builds on earlier ones, so all are decoded together
    # A prime comes without sound: the sound of its frames is drawn.
    is_complete = task.sound is None or prompts.prime is None
    first, repeated = 0, 0  # latent frame at which the window begins, and its frames that are in the clip already
    while True:
        length = min(trained, total - first)
        if window.shape[1] < length or not is_complete:
            condition = Condition(*text, _crop_sketch(task, sketch, first, guide))
            # Sized for the longest window, so that all windows share one session.
            room = min(trained, total)
            session = task.sessions.get_session(task, condition, prompts.noise, room, guide, options)
            area = height * width
            tokens = session.sample(
                condition, prompts.noise, window.flatten(1), first * area, length * area, is_complete
            )
            window, is_complete = rearrange(tokens, "b (t h w) -> b t h w", h=height, w=width), True
        pixels, sound = task.decode(window)
        clip.append(pixels[:, repeated:])
        if sound is not None:
            sounds.append(sound[:, repeated:])
        end = first + window.shape[1]
        if end >= total:
            heard = task.sound.codec.decode(torch.cat(sounds, dim=1)) if task.sound is not None else None
            return torch.cat(clip, dim=1), heard
        # If the first latent frame of a clip covers fewer frames than the others, tokens cannot slide: encode again.
        framewise = trained == task.shape.frames
        window = window[:, -overlap:] if framewise else task.codec.encode(pixels[:, -overlap_frames:])
        first, repeated = end - overlap, overlap_frames


def _crop_sketch(task: Nuwa, sketch: Tensor | None, first: int, guide: bool) -> Tensor | None:
    """Sketch tokens of the window that begins at latent frame `first`, B M, or 2B M with guidance."""
    if sketch is None or task.network.sketch is None:
        return None
    part = task.network.sketch.crop(sketch, first * task.network.sketch.grid[0] // task.grid[0])
    return torch.cat([part, part]) if guide else part


def _count_latent_frames(task: Nuwa, prompts: Prompts, frames: int) -> int:
    """Latent frames of the clip to sample."""
    shape = task.shape
    size = (prompts.height or shape.height, prompts.width or shape.width)
    if size != (shape.height, shape.width):
        raise InputError(
            f"height × width = {size} cannot be drawn: this nuwa was trained at {(shape.height, shape.width)}; "
            "leave out the size"
        )
    return int(task.codec.shape_for(frames, *size)[0])


def _encode_prime(task: Nuwa, prompts: Prompts, frames: int) -> Tensor:
    """Tokens of the given first frames, B k h w; k = 0 without any."""
    if prompts.prime is None:
        return torch.zeros(len(prompts), 0, *task.grid[1:], dtype=torch.int64, device=prompts.noise.device)
    if prompts.prime.shape[1] >= frames:
        raise InputError(
            f"--prime has {prompts.prime.shape[1]} frames and the clip has {frames}: nothing is left to draw; raise --frames"
        )
    tokens = task.codec.encode(prompts.prime)
    if task.sound is None:
        return tokens
    if tokens.shape[1] > task.grid[0]:
        raise InputError(
            f"--prime has {tokens.shape[1]} frames: this nuwa draws the sound of at most {task.grid[0]} given frames; give fewer"
        )
    return task.sound.leave_unknown(tokens)


def _choose_overlap(task: Nuwa, options: NuwaSample) -> tuple[int, int]:
    """→ frames of a window that the next one begins with, and their number of latent frames."""
    shape = task.shape
    lengths = task.codec.clip_lengths(shape.frames, shape.height, shape.width)
    shorter = [frames for frames, latent in lengths.items() if latent < task.grid[0]]
    if not shorter:
        raise InputError(
            f"this nuwa was trained on clips of {shape.frames} frame{'s' * (shape.frames > 1)} and cannot continue them: "
            f"set frames={shape.frames}, or train on longer clips (data.frames)"
        )
    if options.overlap is None:
        return shorter[-1], lengths[shorter[-1]]
    latent = int(task.codec.shape_for(options.overlap, shape.height, shape.width)[0])
    if latent >= task.grid[0]:
        raise InputError(
            f"sample.overlap={options.overlap} leaves nothing to draw in a window of {shape.frames} frames: "
            f"use {shorter[-1]} or fewer"
        )
    return options.overlap, latent
