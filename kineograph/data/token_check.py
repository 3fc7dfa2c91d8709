"""Codebook ids in a user's own data, checked against the stage's codec and padded to a whole clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import repeat
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.task import Codec


@dataclass(frozen=True)
class TokenGrid:
    """The token shapes that a codec gives for the stage's clips and shorter ones."""

    vocabulary: int
    shape: tuple[int, int, int]  # t h w of a whole clip
    frames: int  # of a whole clip
    lengths: dict[int, int]  # token times → the most frames that they encode

    @staticmethod
    def of(codec: Codec, frames: int, size: tuple[int, int]) -> TokenGrid:
        """Raises ConfigError where the whole clip does not fit the codec."""
        shape = codec.shape_for(frames, *size)
        lengths = {latent: fewer for fewer, latent in codec.clip_lengths(frames, *size).items()}
        return TokenGrid(int(codec.vocabulary or 0), shape, frames, lengths)

    def fit(self, tokens: Tensor, mask: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
        """Pad tokens (t h w) and their frame mask to a whole clip by repeating the last time; without a mask all frames are real."""
        if tuple(tokens.shape[1:]) != self.shape[1:] or tokens.shape[0] not in self.lengths:
            times = ", ".join(map(str, sorted(self.lengths)))
            raise InputError(
                f"{name}: codebook ids of shape {tuple(tokens.shape)} do not fit the codec, which makes {self.shape} of data.frames={self.frames} "
                f"at this data.size (t h w, with t of {times})"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocabulary:
            raise InputError(
                f"{name}: codebook ids from {low} to {high}, and the codec has {self.vocabulary} codes: 0 to {self.vocabulary - 1} "
                "(were they made by another codec?)"
            )
        covered = self.lengths[tokens.shape[0]]
        if mask is not None and (len(mask) not in (covered, self.frames) or int(mask.sum()) > covered):
            hint = " (frames are counted, not token times)" if len(mask) == tokens.shape[0] else ""
            raise InputError(
                f"{name}: a frame mask of {len(mask)} with {int(mask.sum())} real frames beside codebook ids of {covered} frames: "
                f"give {covered} or data.frames={self.frames}{hint}"
            )
        real = covered if mask is None else int(mask.sum())
        missing = self.shape[0] - tokens.shape[0]
        if missing:
            tokens = torch.cat([tokens, repeat(tokens[-1], "h w -> t h w", t=missing)])
        return tokens, torch.arange(self.frames) < real
