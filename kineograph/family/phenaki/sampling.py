"""Sampling clips with Phenaki: masked tokens of a window over some steps, and window by window for longer clips."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.batch import Prompts, Shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.task import Codec
from kineograph.family.phenaki.config import PhenakiSample
from kineograph.family.phenaki.network import Clips, Grid, TokenCritic
from kineograph.process.masking import Critic, sample_tokens_guided
from kineograph.text.conditioning import encode_prompts

if TYPE_CHECKING:
    from kineograph.family.phenaki.task import Phenaki


@torch.no_grad()
def sample_clips(
    task: Phenaki, prompts: Prompts, options: PhenakiSample, critic: nn.Linear | TokenCritic | None
) -> Tensor:
    """B T C H W, beginning with the frames of `prompts.prime` as the codec reconstructs them.

    A clip longer than trained is sampled in windows of the trained length. Each begins with the last frames so far, encoded
    again: `overlap` of them, more in the last window, so that all windows have the same length. Earlier frames do not depend
    on the length of the clip. Only one window is on the device at a time; a long clip is returned on the CPU.
    """
    shape, noise = task.shape, prompts.noise
    frames, height, width = prompts.frames or shape.frames, prompts.height or shape.height, prompts.width or shape.width
    task.codec.shape_for(frames, height, width)  # a ConfigError names sizes that fit
    window = min(frames, shape.frames)
    overlap = choose_overlap(task.codec, shape, options) if frames > window else 0
    check_prime(task.codec, prompts, window, height, width)
    sampler = WindowSampler(task, prompts, options, critic, (height, width))
    clip = sampler.sample(window, prompts.prime, noise)
    if frames == window:
        return clip
    parts = [clip.cpu()]
    for index, new in enumerate(count_new_frames(frames, window, overlap), 1):
        fresh = sampler.sample(window, clip[:, new - window :], noise.keyed_by("window", index))[:, window - new :]
        parts.append(fresh.cpu())
        clip = torch.cat([clip[:, new:], fresh], dim=1)  # the last `window` frames so far
    return torch.cat(parts, dim=1)


def count_new_frames(frames: int, window: int, overlap: int) -> list[int]:
    """New frames of each window after the first."""
    whole, rest = divmod(frames - window, window - overlap)
    return [window - overlap] * whole + [rest] * (rest > 0)


def choose_overlap(codec: Codec, shape: Shape, options: PhenakiSample) -> int:
    """Frames shared by successive windows: `sample.overlap`, or as many as fit in half a window."""
    allowed = list(codec.clip_lengths(shape.frames - 1, shape.height, shape.width))
    if not allowed:
        raise InputError(
            f"this phenaki was trained on clips of {shape.frames} frame{'s' * (shape.frames > 1)} and cannot continue them: "
            f"set frames={shape.frames}, or train on longer clips (data.frames)"
        )
    if options.overlap is None:
        return max([frames for frames in allowed if 2 * frames <= shape.frames], default=allowed[0])
    if options.overlap not in allowed:
        shown = allowed if len(allowed) <= 8 else [*allowed[:7], "…", allowed[-1]]
        raise ConfigError(
            f"sample.overlap={options.overlap} does not fit windows of {shape.frames} frames and this codec: "
            f"use {', '.join(map(str, shown))}"
        )
    return options.overlap


def check_prime(codec: Codec, prompts: Prompts, window: int, height: int, width: int) -> None:
    """Refuse a prime that no window can begin with."""
    prime = prompts.prime
    if prime is None:
        return
    if prime.shape[0] != len(prompts) or tuple(prime.shape[3:]) != (height, width):
        raise InputError(
            f"prime has shape {tuple(prime.shape)} and does not fit {len(prompts)} clips of {height} × {width} pixels: "
            "give one prime of this size per prompt"
        )
    if prime.shape[1] >= window:
        raise InputError(
            f"prime has {prime.shape[1]} frames and a window has {window}: "
            "give fewer (the last ones), so that something is left to draw"
        )
    codec.shape_for(prime.shape[1], height, width)


class WindowSampler:
    """Samples the windows of one call. The text is encoded once for all steps and windows."""

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
        self.critic = critic if options.critic else None
        self.text, negative = encode_prompts(task.text, prompts)
        self.guide = options.guidance != 1 and negative is not None
        text = self.text.join(negative) if self.guide and negative is not None else self.text
        self.text_mask, self.memory = text.mask, task.network.memory(text)
        if isinstance(self.critic, TokenCritic):
            self.critic_memory = self.critic.network.memory(self.text)
        else:
            # A self-critic reads the prompts' half of the generator's memory.
            rows, memory = self.rows, self.memory
            self.critic_memory = None if memory is None else [(k[:rows], v[:rows]) for k, v in memory]

    def sample(self, frames: int, prime: Tensor | None, noise: Noise) -> Tensor:
        """Sample one window, B T C H W, that begins with `prime`."""
        task = self.task
        grid: Grid = task.codec.shape_for(frames, *self.size)
        tokens, fixed = torch.full((self.rows, prod(grid)), task.mask_id, device=self.device), None
        if prime is not None:
            known = task.codec.encode(prime).flatten(1)  # B K
            tokens[:, : known.shape[1]] = known
            fixed = torch.arange(tokens.shape[1]) < known.shape[1]
        tokens = sample_tokens_guided(
            lambda tokens, step: task.network(tokens, grid, None, self.text_mask, None, self.memory),
            task.head.logits,
            tokens,
            self.options,
            guide=self.guide,
            mask_id=task.mask_id,
            noise=noise,
            fixed=fixed,
            critic=self.make_critic(grid),
        )
        return task.codec.decode(rearrange(tokens, "b (t h w) -> b t h w", t=grid[0], h=grid[1]))

    def make_critic(self, grid: Grid) -> Critic | None:
        """The critic's scores as a function of tokens; None: the generator's confidence selects tokens."""
        critic, network, text, memory = self.critic, self.task.network, self.text, self.critic_memory
        if critic is None:
            return None
        if isinstance(critic, TokenCritic):
            return lambda tokens, step: critic(Clips(tokens, grid), text, memory)[..., 0]
        return lambda tokens, step: critic(network(tokens, grid, None, text.mask, None, memory))[..., 0]
