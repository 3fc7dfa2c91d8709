"""Muse's transformer: self-attention over image tokens, cross-attention to text and to the tokens of a smaller image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kineograph.family.muse.config import CriticConfig, MuseConfig
from kineograph.nn.attention import Memory
from kineograph.nn.positions import LearnedPositions, Rotary, SincosPositions
from kineograph.nn.transformer import Transformer, init_weights

Grid = tuple[int, int]


class Condition(NamedTuple):
    """The conditions of a batch; None for those that the model does not read."""

    text: Tensor | None = None  # B L D
    mask: Tensor | None = None  # B L
    low_res: Tensor | None = None  # B M, tokens of the smaller image

    def concat(self, other: Condition) -> Condition:
        """Concatenate the rows of both."""
        pairs = zip(self, other, strict=True)
        return Condition(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs))


class LowRes(nn.Module):
    """Embeds the smaller image's tokens twice: added to the tokens of the larger grid that they cover, and as context."""

    indices: Tensor

    def __init__(self, vocabulary: int, small: Grid, large: Grid, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = LearnedPositions(small, width)
        rows = torch.arange(large[0]) * small[0] // large[0]
        columns = torch.arange(large[1]) * small[1] // large[1]
        self.register_buffer("indices", (rows[:, None] * small[1] + columns).flatten(), persistent=False)  # N

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """B M → embeddings to add, B N D, and the context, B M D."""
        x = self.tokens(tokens)
        return x[:, self.indices], x + self.positions()


class MuseNetwork(nn.Module):
    """Tokens → hidden states, B N D. The mask id is the size of the vocabulary."""

    def __init__(
        self,
        config: MuseConfig | CriticConfig,
        vocabulary: int,
        grid: Grid,
        text_width: int | None,
        low_res: tuple[int, Grid] | None = None,  # vocabulary and grid of the smaller image
        self_conditioning: bool = False,
    ) -> None:
        super().__init__()
        width = config.width
        self.tokens = nn.Embedding(vocabulary + 1, width)
        self.text = nn.Linear(text_width, width, bias=False) if text_width is not None else None
        self.recall = nn.Linear(width, width, bias=False) if self_conditioning else None
        self.low_res = LowRes(*low_res, grid, width) if low_res is not None else None
        init_weights(self, 1)
        self.positions = (
            LearnedPositions(grid, width) if config.positions == "learned" else SincosPositions(grid, width)
        )
        rotary = Rotary(grid, width // config.heads) if config.rotary else None
        reads_context = text_width is not None or low_res is not None
        self.transformer = Transformer(config, cross=reads_context, rotary=rotary)

    def build_context(self, condition: Condition) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """→ context B M D, its mask B M, and embeddings to add to the tokens, B N D"""
        parts, masks, added = [], [], None
        if self.text is not None:
            assert condition.text is not None and condition.mask is not None
            parts.append(self.text(condition.text.to(self.text.weight.dtype)))
            masks.append(condition.mask)
        if self.low_res is not None:
            assert condition.low_res is not None
            added, small = self.low_res(condition.low_res)
            parts.append(small)
            masks.append(torch.ones_like(condition.low_res, dtype=torch.bool))
        if not parts:
            return None, None, None
        return torch.cat([part.to(parts[0].dtype) for part in parts], dim=1), torch.cat(masks, dim=1), added

    def memory(self, condition: Condition) -> list[Memory] | None:
        """Keys and values of the context for every block, computed once per sampling call."""
        context = self.build_context(condition)[0]
        return None if context is None else self.transformer.memory(context)

    def forward(
        self,
        tokens: Tensor,  # B N
        text: Tensor | None = None,  # B L D
        text_mask: Tensor | None = None,  # B L
        low_res: Tensor | None = None,  # B M
        previous: Tensor | None = None,  # B N D: hidden states of the previous step
        memory: list[Memory] | None = None,
    ) -> Tensor:
        x = self.tokens(tokens) + self.positions()  # B N D
        if self.recall is not None and previous is not None:
            x = x + self.recall(previous)
        context, mask, added = self.build_context(Condition(text, text_mask, low_res))
        if added is not None:
            x = x + added
        return self.transformer(x, context=context if memory is None else None, context_mask=mask, memory=memory)
