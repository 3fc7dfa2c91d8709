"""Phenaki's transformer: the tokens of a clip attend to one another and to the text. Nothing in it depends on the clip's size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from kineograph.nn.attention import Memory, RotaryFn
from kineograph.nn.positions import Rotary, Rotation, SincosPositions, grid_positions, sincos_embedding
from kineograph.nn.transformer import Transformer, TransformerConfig, init_weights
from kineograph.text.conditioning import TextEmbeddings

Grid = tuple[int, int, int]  # token times, rows, columns

# Wavelengths of the positions reach from 2π to 2π · BASE tokens. The usual 10,000 is made for long texts: on grids of some tens of tokens
# most channels would hardly tell neighbours apart.
BASE = 100.0


@dataclass(frozen=True)
class Clips:
    """Tokens of a batch of clips in raster order."""

    tokens: Tensor  # B N
    grid: Grid
    keep: Tensor | None = None  # B N, True = no padding; None: nothing is padding

    @staticmethod
    def of(tokens: Tensor, times: Tensor | None = None) -> Clips:
        """B t h w, and which times hold a real frame, B t."""
        _, t, height, width = tokens.shape
        keep = None if times is None else repeat(times, "b t -> b (t n)", n=height * width)
        return Clips(rearrange(tokens, "b t h w -> b (t h w)"), (t, height, width), keep)

    def of_tokens(self, tokens: Tensor) -> Clips:
        """Other tokens in the same places."""
        return Clips(tokens, self.grid, self.keep)


class PhenakiNetwork(nn.Module):
    """Tokens → hidden states, B N D. The mask id is the vocabulary's size.

    No weight belongs to a place, so that what was learned on images serves clips. The tables of the trained grid are kept; for any other
    they are made on the way.
    """

    def __init__(
        self, config: TransformerConfig, rotary: bool, vocabulary: int, grid: Grid, text_width: int | None
    ) -> None:
        super().__init__()
        self.width, self.head_width, self.grid = config.width, config.width // config.heads, grid
        self.tokens = nn.Embedding(vocabulary + 1, config.width)
        self.text = nn.Linear(text_width, config.width, bias=False) if text_width is not None else None
        init_weights(self, 1)
        self.positions = SincosPositions(grid, config.width, BASE)
        self.rotary = Rotary(grid, self.head_width, BASE) if rotary else None
        self.transformer = Transformer(config, cross=text_width is not None)

    def places(self, grid: Grid) -> tuple[Tensor, RotaryFn | None]:
        """What is added to the tokens, N D, and what turns queries and keys."""
        if grid == self.grid:
            return self.positions(), self.rotary
        positions = grid_positions(grid, self.tokens.weight.device)
        turn = Rotation.at_positions(positions, self.head_width, BASE) if self.rotary is not None else None
        return sincos_embedding(positions, self.width, BASE), turn

    def context(self, text: Tensor | None) -> Tensor | None:
        """The text as it is attended to, B L D."""
        if self.text is None:
            return None
        assert text is not None
        return self.text(text.to(self.text.weight.dtype))

    def memory(self, words: TextEmbeddings) -> list[Memory] | None:
        """Keys and values of the text for every block, made once a sampling call."""
        context = self.context(words.embeddings)
        return None if context is None else self.transformer.memory(context)

    def forward(
        self,
        tokens: Tensor,  # B N
        grid: Grid | None = None,  # None: as trained
        text: Tensor | None = None,  # B L D
        text_mask: Tensor | None = None,  # B L
        keep: Tensor | None = None,  # B N
        memory: list[Memory] | None = None,  # instead of the text: its keys and values
    ) -> Tensor:
        added, turn = self.places(grid or self.grid)
        return self.transformer(
            self.tokens(tokens) + added,  # B N D
            mask=keep,
            context=self.context(text) if memory is None else None,
            context_mask=text_mask if self.text is not None else None,
            memory=memory,
            rotary=turn,
        )


class TokenCritic(nn.Module):
    """A network of its own that says how wrong each token looks."""

    def __init__(
        self, config: TransformerConfig, rotary: bool, vocabulary: int, grid: Grid, text_width: int | None
    ) -> None:
        super().__init__()
        self.network = PhenakiNetwork(config, rotary, vocabulary, grid, text_width)
        self.score = nn.Linear(config.width, 1)
        init_weights(self.score, 1)

    def forward(self, clips: Clips, words: TextEmbeddings, memory: list[Memory] | None = None) -> Tensor:
        """B N 1, high = looks wrong."""
        return self.score(self.network(clips.tokens, clips.grid, *words, clips.keep, memory))


def rows_of(memory: list[Memory] | None, rows: int) -> list[Memory] | None:
    """The first rows of a memory."""
    return None if memory is None else [(keys[:rows], values[:rows]) for keys, values in memory]


def full(rows: int, grid: Grid, token: int, device: torch.device) -> Tensor:
    """The same token everywhere, B N."""
    return torch.full((rows, grid[0] * grid[1] * grid[2]), token, device=device)
