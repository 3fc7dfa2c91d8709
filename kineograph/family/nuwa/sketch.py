"""Drawing after a sketch: the places of a clip take in the sketch's tokens around the same place, in time, height and width: by a sum of
projections when they enter the network, and by attention in every block.

Unlike the clip the sketch is known as a whole, so that a place sees it on all sides, later times included.
"""

from __future__ import annotations

from itertools import product
from math import prod

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.nn.attention import Memory, attend
from kineograph.nn.norms import norm_layer
from kineograph.nn.positions import LearnedPositions, Rotation, grid_positions
from kineograph.nn.transformer import init_weights
from kineograph.nn.window import Grid

BASE = 100.0  # wavelengths of the turns reach from 2π to 2π · BASE tokens: a window is a few tokens wide


class SketchTokens(nn.Module):
    """Tokens of a sketch → what the places attend to. The id after the last means that nothing is drawn there: padding, or no sketch at all."""

    def __init__(self, vocabulary: int, grid: Grid, width: int) -> None:
        super().__init__()
        self.grid, self.nothing = grid, vocabulary
        self.tokens = nn.Embedding(vocabulary + 1, width)
        init_weights(self, 1)
        self.positions = LearnedPositions(grid, width)

    def cut(self, tokens: Tensor, first: int = 0) -> Tensor:
        """B t h w of any length → as many times as the grid has, from `first` on, B M; nothing is drawn after the sketch's end."""
        tokens = tokens[:, first : first + self.grid[0]]
        missing = self.grid[0] - tokens.shape[1]
        return nn.functional.pad(tokens, (0, 0, 0, 0, 0, missing), value=self.nothing).flatten(1)

    def forward(self, tokens: Tensor) -> Tensor:
        """B M → B M D"""
        return self.tokens(tokens) + self.positions()


def around(grid: Grid, sketch: Grid, window: Grid) -> tuple[Tensor, Tensor]:
    """For each place of a grid the sketch's tokens in a window around the same place, N W, and which of them exist. The place itself always does.

    Grids of different sizes lie on the same picture: place p of P is where token ⌊(p + ½) S / P⌋ of S is.
    """
    sizes = torch.tensor(sketch)
    middle = (2 * grid_positions(grid) + 1) * sizes // (2 * torch.tensor(grid))  # N 3
    steps = torch.tensor(list(product(*(range(-(size // 2), size // 2 + 1) for size in window))))  # W 3
    there = middle[:, None] + steps  # N W 3
    exists = ((there >= 0) & (there < sizes)).all(dim=-1)
    t, y, x = there.clamp(min=torch.zeros_like(sizes), max=sizes - 1).unbind(-1)
    return (t * sketch[1] + y) * sketch[2] + x, exists


class Around(nn.Module):
    """`around` as tables that all blocks share, and how queries and keys turn by where they lie on the sketch's grid: without turns a block
    would have to learn for every place anew which token of its window lies right there."""

    near: Tensor
    exists: Tensor
    mask: Tensor
    places: Tensor
    tokens: Tensor

    def __init__(self, grid: Grid, sketch: Grid, window: Grid, head_width: int) -> None:
        super().__init__()
        near, exists = around(grid, sketch, window)
        there = torch.where(exists, near, near[:, near.shape[1] // 2, None])  # the middle always exists
        mask = torch.zeros(prod(grid), prod(sketch), dtype=torch.bool).scatter(1, there, True)  # N M
        scale = torch.tensor(sketch) / torch.tensor(grid)
        turns = [
            Rotation.at_positions(at, head_width, BASE)
            for at in ((grid_positions(grid) + 0.5) * scale - 0.5, grid_positions(sketch))
        ]
        places, tokens = (torch.stack([turn.cos, turn.sin]) for turn in turns)  # 2 N d/2, 2 M d/2
        tables = {"near": near, "exists": exists, "mask": mask, "places": places, "tokens": tokens}
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)


class SketchGlance(nn.Module):
    """What a place takes in of the sketch before the first block: Σ over the window of W_offset · token; a convolution where both grids are
    the same. Attention alone must first learn which token of its window lies where: 250 steps of the preset's generator, 0.19 of 96 clips right
    without this sum, 0.48 with it."""

    def __init__(self, width: int, around: Around) -> None:
        super().__init__()
        self.around = around
        offsets = around.near.shape[1]
        self.offsets = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(offsets))
        for linear in self.offsets:
            nn.init.normal_(linear.weight, std=(width * offsets) ** -0.5)  # type: ignore[arg-type]

    def forward(self, sketch: Tensor, first: int) -> Tensor:
        """A sketch, B M D, for the first n places, B n D. Offset by offset: all at once would hold a window for every place."""
        near, exists = self.around.near[:first], self.around.exists[:first]  # n W
        total = sketch.new_zeros(())
        for at, linear in enumerate(self.offsets):
            total = total + linear(sketch).index_select(1, near[:, at]) * exists[:, at, None]
        return total


class SketchAttention(nn.Module):
    """Queries from the clip's places, keys and values from the sketch around each."""

    def __init__(
        self,
        width: int,
        heads: int,
        around: Around,
        *,
        qk_norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.around = around
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.norm_q = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.norm_k = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=False)

    def memory(self, sketch: Tensor) -> Memory:
        """Keys and values of a sketch, B M D."""
        k, v = rearrange(self.kv(sketch), "b m (two h d) -> two b h m d", two=2, h=self.heads)
        return Rotation(*self.around.tokens)(self.norm_k(k)).to(v.dtype), v

    def _query(self, x: Tensor, turns: Tensor) -> Tensor:
        """`turns` are those of the places of x, 2 N d/2."""
        return Rotation(*turns)(self.norm_q(rearrange(self.q(x), "b n (h d) -> b h n d", h=self.heads)))

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """The first N places, B N D."""
        k, v = memory
        places, mask = self.around.places[:, : x.shape[1]], self.around.mask[: x.shape[1]]  # 2 N d/2, N M
        mixed = attend(self._query(x, places).to(v.dtype), k, v, mask, self.dropout if self.training else 0.0)
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))

    def step(self, x: Tensor, index: Tensor, memory: Memory) -> Tensor:
        """One place, B 1 D; `index` is its number on the device."""
        near = self.around.near.index_select(0, index)[0]  # W
        k, v = (part.index_select(2, near) for part in memory)
        query = self._query(x, self.around.places.index_select(1, index))
        mixed = attend(query.to(v.dtype), k, v, self.around.exists.index_select(0, index))
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))
