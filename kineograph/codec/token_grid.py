"""Grids of tokens: their size for clips, their mask, and the tokens of a batch."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import Codec


def grid_size(codec: str, height: int, width: int, patch: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of tokens, each of `patch` pixels."""
    for name, size, side in (("height", height, patch[0]), ("width", width, patch[1])):
        if size % side or not size:
            below, above = size // side * side, (size // side + 1) * side
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"data.size=[{height}, {width}] does not fit this {codec}: a token covers {patch[0]} × {patch[1]} pixels, "
                f"so the {name} must be a multiple of {side} ({near})"
            )
    return height // patch[0], width // patch[1]


def latent_frames(codec: str, frames: int, step: int) -> int:
    """Latent frames of a clip: one for the first frame, then one for every `step` frames."""
    count, rest = divmod(frames - 1, step)
    if rest or frames < 1:
        near = [1 + step * k for k in (count, count + 1) if k >= 0]
        raise ConfigError(f"frames={frames} does not fit this {codec}: use 1 + {step}k ({', '.join(map(str, near))} …)")
    return 1 + count


def latent_frame_mask(frame_mask: Tensor, step: int) -> Tensor:
    """B T → B t: a latent frame is real if any of its frames is."""
    rest = rearrange(frame_mask[:, 1:], "b (t s) -> b t s", s=step)
    return torch.cat([frame_mask[:, :1], rest.any(-1)], dim=1)


def encode_tokens(codec: Codec, batch: Batch, grid: tuple[int, int, int], family: str) -> Tensor:
    """B t h w from the cache or the codec; t may be less than the grid's."""
    tokens = batch.tokens
    if tokens is None:
        with torch.no_grad():
            tokens = codec.encode(batch.video, batch.frame_mask)
    if tokens.shape[1] > grid[0] or tuple(tokens.shape[2:]) != grid[1:]:
        raise InputError(
            f"tokens of shape {tuple(tokens.shape[1:])} do not fit {family}'s grid {grid}: "
            "were they cached at another data.size or data.frames?"
        )
    return tokens
