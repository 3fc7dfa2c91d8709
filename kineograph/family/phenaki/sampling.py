"""Drawing clips: all hidden tokens of a window at once, from given frames or from none, and window after window for long clips."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.batch import Prompts, Shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import Codec
from kineograph.family.phenaki.config import PhenakiSample
from kineograph.family.phenaki.network import Clips, Grid, TokenCritic, full, rows_of
from kineograph.process.masking import Critic, sample_tokens_guided
from kineograph.text.conditioning import encode_prompts

if TYPE_CHECKING:
    from kineograph.family.phenaki.task import Phenaki


@torch.no_grad()
def draw(task: Phenaki, prompts: Prompts, options: PhenakiSample, critic: nn.Linear | TokenCritic | None) -> Tensor:
    """Clips for prompts, B T C H W.

    The first frames are those of `prompts.prime`, as the codec gives them back; there may be at most one window's less something to draw.
    A clip longer than the trained one is drawn in windows of the trained length. Each begins with the last frames so far, encoded anew
    (`overlap` of them; the last window takes more, so that all windows are alike). Only one window is on the device at a time: the frames
    of a long clip are given on the CPU. What is drawn first does not depend on how long the clip goes on.
    """
    shape = task.shape
    frames, height, width = prompts.frames or shape.frames, prompts.height or shape.height, prompts.width or shape.width
    task.codec.shape_for(frames, height, width)  # says what fits where this does not
    window = min(frames, shape.frames)
    overlap = overlap_of(task.codec, shape, options) if frames > window else 0
    drawing = Drawing(task, prompts, options, critic, (height, width))
    clip = drawing.window(window, checked(task.codec, prompts, window, height, width), prompts.noise)
    if frames == window:
        return clip
    parts = [clip.cpu()]
    for index, new in enumerate(lengths(frames, window, overlap), 1):
        drawn = drawing.window(window, clip[:, new - window :], later(prompts.noise, index))
        fresh = drawn[:, window - new :]
        parts.append(fresh.cpu())
        clip = torch.cat([clip[:, new:], fresh], dim=1)  # the last `window` frames of what is given back
    return torch.cat(parts, dim=1)


def lengths(frames: int, window: int, overlap: int) -> list[int]:
    """New frames of each window after the first."""
    full_windows, rest = divmod(frames - window, window - overlap)
    return [window - overlap] * full_windows + [rest] * (rest > 0)


def later(noise: Noise, window: int) -> Noise:
    """The draws of a later window of the same clips."""
    return Noise(key_of(noise.seed, "window", window), noise.step, noise.slots)


def fits(codec: Codec, frames: int, shape: Shape) -> bool:
    try:
        codec.shape_for(frames, shape.height, shape.width)
    except ConfigError:
        return False
    return True


def overlap_of(codec: Codec, shape: Shape, options: PhenakiSample) -> int:
    """Frames that a window begins with, checked against the codec and the trained length."""
    fitting = [frames for frames in range(1, shape.frames) if fits(codec, frames, shape)]
    if not fitting:
        raise InputError(
            f"this phenaki draws {shape.frames} frame{'s' * (shape.frames > 1)} at a time, as trained, and cannot go on from fewer: "
            "ask for no more, or train on longer clips (data.frames)"
        )
    if options.overlap is None:
        return max([frames for frames in fitting if 2 * frames <= shape.frames], default=fitting[0])
    if options.overlap not in fitting:
        shown = fitting if len(fitting) <= 8 else [*fitting[:7], "…", fitting[-1]]
        raise ConfigError(
            f"sample.overlap={options.overlap} does not fit windows of {shape.frames} frames and this codec: use {', '.join(map(str, shown))}"
        )
    return options.overlap


def checked(codec: Codec, prompts: Prompts, window: int, height: int, width: int) -> Tensor | None:
    """The prime, if a window can begin with it."""
    prime = prompts.prime
    if prime is None:
        return None
    if prime.shape[0] != len(prompts) or tuple(prime.shape[3:]) != (height, width):
        raise InputError(
            f"prime has shape {tuple(prime.shape)}, and {len(prompts)} clips of {height} × {width} pixels are to be drawn: make them alike"
        )
    if prime.shape[1] >= window:
        raise InputError(
            f"prime has {prime.shape[1]} frames and {window} are drawn at a time: give fewer (its last ones), so that something is left to draw"
        )
    codec.shape_for(prime.shape[1], height, width)
    return prime


class Drawing:
    """One sampling call. What is asked for is read once, and serves every step of every window."""

    def __init__(
        self,
        task: Phenaki,
        prompts: Prompts,
        options: PhenakiSample,
        critic: nn.Linear | TokenCritic | None,
        size: tuple[int, int],
    ) -> None:
        self.task, self.options, self.size = task, options, size
        self.rows, self.device = len(prompts), prompts.noise.device
        self.words, other = encode_prompts(task.text, prompts)
        self.guide = options.guidance != 1 and other is not None
        self.both = self.words.join(other) if self.guide and other is not None else self.words
        self.memory = task.network.memory(self.both)
        self.critic = critic if options.critic else None
        self.critic_memory = (
            critic.network.memory(self.words) if isinstance(critic, TokenCritic) else rows_of(self.memory, self.rows)
        )

    def window(self, frames: int, prime: Tensor | None, noise: Noise) -> Tensor:
        """B T C H W, beginning with the prime."""
        task = self.task
        grid: Grid = task.codec.shape_for(frames, *self.size)
        tokens, given = full(self.rows, grid, task.mask_id, self.device), None
        if prime is not None:
            start = task.codec.encode(prime).flatten(1)  # B m
            tokens[:, : start.shape[1]] = start
            given = torch.arange(tokens.shape[1]) < start.shape[1]
        found = sample_tokens_guided(
            lambda tokens, step: task.network(tokens, grid, None, self.both.mask, None, self.memory),
            task.head.logits,
            tokens,
            self.options,
            guide=self.guide,
            mask_id=task.mask_id,
            noise=noise,
            fixed=given,
            critic=self.judge(grid),
        )
        return task.codec.decode(rearrange(found, "b (t h w) -> b t h w", t=grid[0], h=grid[1]))

    def judge(self, grid: Grid) -> Critic | None:
        """The critic's scores of whole clips; None: the generator's own confidence decides."""
        critic, network, words, memory = self.critic, self.task.network, self.words, self.critic_memory
        if critic is None:
            return None
        if isinstance(critic, TokenCritic):
            return lambda tokens, step: critic(Clips(tokens, grid), words, memory)[..., 0]
        return lambda tokens, step: critic(network(tokens, grid, None, words.mask, None, memory))[..., 0]
