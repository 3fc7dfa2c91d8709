"""What generators over a codec's tokens ask of it: that it has a codebook, and the tokens of a batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError


def with_codebook(stage: Any, name: str, key: str, family: str) -> Any:
    """The stage that `key` names, if it gives tokens."""
    if not hasattr(stage, "encode") or getattr(stage, "vocabulary", None) is None:
        raise ConfigError(
            f"{key}={name} gives no tokens: {family} needs a codec with a codebook, such as vqgan or cvivit"
        )
    return stage


def read_tokens(codec: Any, batch: Batch, grid: tuple[int, int, int], family: str) -> Tensor:
    """B t h w: from a cache, or from the codec; of as many times as the grid has, or fewer."""
    tokens = batch.tokens
    if tokens is None:
        with torch.no_grad():
            tokens = cast(Tensor, codec.encode(batch.video, batch.frame_mask))
    if tokens.shape[1] > grid[0] or tuple(tokens.shape[2:]) != grid[1:]:
        raise InputError(
            f"tokens of shape {tuple(tokens.shape[1:])} do not fit {family}'s grid {grid}: "
            "were they cached at another data.size or data.frames?"
        )
    return tokens
