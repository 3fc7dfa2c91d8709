"""Phenaki's transformer: tokens of a clip attend to one another and to the text. No weight depends on the size of the clip."""

from __future__ import annotations

from dataclasses import dataclass, replace

from einops import rearrange, repeat
from torch import Tensor, nn

from kineograph.nn.attention import Memory, RotaryFn
from kineograph.nn.positions import Rotary, Rotation, SincosPositions, grid_positions, sincos_embedding
from kineograph.nn.transformer import Transformer, TransformerConfig, init_weights
from kineograph.text.conditioning import TextEmbeddings

Grid = tuple[int, int, int]  # latent frames, rows, columns

# Position wavelengths from 2π to 2π · BASE tokens. With the usual 10,000, made for long texts, most channels would hardly
# change over a grid of some tens of tokens.
BASE = 100.0


@dataclass(frozen=True)
class Clips:
    """Tokens of a batch of clips in raster order."""

    tokens: Tensor  # B N
    grid: Grid
    keep: Tensor | None = None  # B N, False = padding; None: no padding

    @staticmethod
    def flatten(tokens: Tensor, frame_mask: Tensor | None = None) -> Clips:
        """Tokens B t h w, and which latent frames are real, B t."""
        _, t, height, width = tokens.shape
        keep = None if frame_mask is None else repeat(frame_mask, "b t -> b (t n)", n=height * width)
        return Clips(rearrange(tokens, "b t h w -> b (t h w)"), (t, height, width), keep)

    def replace_tokens(self, tokens: Tensor) -> Clips:
        return replace(self, tokens=tokens)


class PhenakiNetwork(nn.Module):
    """Tokens → hidden states, B N D. The mask id is the size of the vocabulary.

    No weight belongs to a position, so that a network trained on images can start a video model. Tables of positions are
    stored for the trained grid and computed for any other.
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

    def positions_for(self, grid: Grid) -> tuple[Tensor, RotaryFn | None]:
        """→ position embedding N D, and the rotation of queries and keys"""
        if grid == self.grid:
            return self.positions(), self.rotary
        positions = grid_positions(grid, self.tokens.weight.device)
        rotary = Rotation.at_positions(positions, self.head_width, BASE) if self.rotary is not None else None
        return sincos_embedding(positions, self.width, BASE), rotary

    def project_text(self, text: Tensor | None) -> Tensor | None:
        """Text embeddings in the network's width, B L D."""
        if self.text is None:
            return None
        assert text is not None
        return self.text(text.to(self.text.weight.dtype))

    def memory(self, text: TextEmbeddings) -> list[Memory] | None:
        """Keys and values of the text for every block, to be computed once per sampling call."""
        context = self.project_text(text.embeddings)
        return None if context is None else self.transformer.memory(context)

    def forward(
        self,
        tokens: Tensor,  # B N
        grid: Grid | None = None,  # None: as trained
        text: Tensor | None = None,  # B L D
        text_mask: Tensor | None = None,  # B L
        keep: Tensor | None = None,  # B N
        memory: list[Memory] | None = None,  # replaces the text
    ) -> Tensor:
        embedding, rotary = self.positions_for(grid or self.grid)
        return self.transformer(
            self.tokens(tokens) + embedding,  # B N D
            mask=keep,
            context=self.project_text(text) if memory is None else None,
            context_mask=text_mask if self.text is not None else None,
            memory=memory,
            rotary=rotary,
        )


class TokenCritic(nn.Module):
    """A separate network that scores how wrong each token looks."""

    def __init__(
        self, config: TransformerConfig, rotary: bool, vocabulary: int, grid: Grid, text_width: int | None
    ) -> None:
        super().__init__()
        self.network = PhenakiNetwork(config, rotary, vocabulary, grid, text_width)
        self.score = nn.Linear(config.width, 1)
        init_weights(self.score, 1)

    def forward(self, clips: Clips, text: TextEmbeddings, memory: list[Memory] | None = None) -> Tensor:
        """B N 1, high = looks wrong."""
        return self.score(self.network(clips.tokens, clips.grid, *text, clips.keep, memory))
