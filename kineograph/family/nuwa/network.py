"""NUWA's transformer: [BOS, token 0, …, token N − 2] → hidden states that predict tokens 0 … N − 1.

All positions at once for training, one at a time with caches for sampling.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from kineograph.family.nuwa.config import NuwaConfig
from kineograph.family.nuwa.sketch import SketchAttention, SketchEmbedding, SketchProjection, SketchWindow
from kineograph.nn.attention import CrossAttention, Memory
from kineograph.nn.nearby import CacheSlots, NearbyAttention, NearbyCache, RotaryPair
from kineograph.nn.norms import norm_layer
from kineograph.nn.positions import LearnedPositions, Rotation, grid_positions, sincos_embedding
from kineograph.nn.token_shift import ShiftCache, TokenShift
from kineograph.nn.transformer import Mlp, cast_residual, init_weights
from kineograph.nn.window import Grid, Window


class Condition(NamedTuple):
    """The conditions of a batch; None for those that the model does not read."""

    text: Tensor | None = None  # B L D
    mask: Tensor | None = None  # B L
    sketch: Tensor | None = None  # B M, tokens

    def clone(self) -> Condition:
        return Condition(*(None if part is None else part.clone() for part in self))


class BlockMemory(NamedTuple):
    """Keys and values of the conditions for one block."""

    text: Memory | None
    mask: Tensor | None  # of the text, B L
    sketch: Memory | None

    def tensors(self) -> list[Tensor]:
        return [*(self.text or ()), *((self.mask,) if self.mask is not None else ()), *(self.sketch or ())]


class BlockCache(NamedTuple):
    """What a block stores of earlier positions."""

    attention: NearbyCache
    shift_attention: ShiftCache | None
    shift_mlp: ShiftCache | None

    def clear(self) -> None:
        for part in self:
            if part is not None:
                part.clear()


class Block(nn.Module):
    """Nearby attention, cross-attention to text and sketch, MLP. Attention and MLP read shifted tokens."""

    def __init__(
        self, config: NuwaConfig, window: Window | None, cross: bool, sketch_window: SketchWindow | None = None
    ) -> None:
        super().__init__()
        width, heads, norm = config.width, config.heads, config.norm
        qk_norm, dropout = config.qk_norm, config.dropout
        self.shift = TokenShift() if config.token_shift else None
        self.norm_attention = norm_layer(norm, width)
        self.attention = NearbyAttention(width, heads, window, qk_norm=qk_norm, dropout=dropout)
        self.norm_cross = norm_layer(norm, width) if cross else None
        self.cross = CrossAttention(width, heads, qk_norm=qk_norm, dropout=dropout) if cross else None
        self.norm_sketch, self.sketch = None, None
        if sketch_window is not None:
            self.norm_sketch = norm_layer(norm, width)
            self.sketch = SketchAttention(width, heads, sketch_window, qk_norm=qk_norm, dropout=dropout)
        self.norm_mlp = norm_layer(norm, width)
        self.mlp = Mlp(width, config.mlp_ratio, config.mlp)
        self.drop = nn.Dropout(dropout)

    def memory(self, text: Tensor | None, mask: Tensor | None, sketch: Tensor | None) -> BlockMemory:
        """Keys and values of the text, B L D, and of the sketch, B M D."""
        return BlockMemory(
            self.cross.memory(text) if self.cross is not None and text is not None else None,
            mask,
            self.sketch.memory(sketch) if self.sketch is not None and sketch is not None else None,
        )

    def cache(self, rows: int, grid: Grid) -> BlockCache:
        """Create empty caches for a clip of this grid."""
        weight = self.attention.qkv.weight
        width = weight.shape[1]
        attention = self.attention.cache(rows, grid)
        if self.shift is None:
            return BlockCache(attention, None, None)
        first, second = (
            self.shift.cache(rows, width, grid, device=weight.device, dtype=weight.dtype) for _ in range(2)
        )
        return BlockCache(attention, first, second)

    def forward(
        self,
        x: Tensor,  # B N D
        grid: Grid,
        rotary: RotaryPair | None = None,
        text: Tensor | None = None,  # B L D
        mask: Tensor | None = None,  # B L
        sketch: Tensor | None = None,  # B M D
        memory: BlockMemory | None = None,  # replaces text, mask and sketch
        cache: BlockCache | None = None,  # is filled, for `step` to continue
    ) -> Tensor:
        memory = memory or self.memory(text, mask, sketch)
        y = self.norm_attention(x)
        if self.shift is not None:
            y = self.shift(y, grid, cache.shift_attention if cache is not None else None)
        x = x + self.drop(self.attention(y, grid, rotary, cache=cache.attention if cache is not None else None))
        if self.cross is not None and self.norm_cross is not None and memory.text is not None:
            x = x + self.drop(self.cross(self.norm_cross(x), memory.text, memory.mask))
        if self.sketch is not None and self.norm_sketch is not None and memory.sketch is not None:
            x = x + self.drop(self.sketch(self.norm_sketch(x), memory.sketch))
        y = self.norm_mlp(x)
        if self.shift is not None:
            y = self.shift(y, grid, cache.shift_mlp if cache is not None else None)
        return x + self.drop(self.mlp(y))

    def step(
        self,
        x: Tensor,
        index: Tensor,
        slots: CacheSlots,
        rotary: RotaryPair | None,
        memory: BlockMemory,
        cache: BlockCache,
    ) -> Tensor:
        """Advance one position, B 1 D."""
        y = self.norm_attention(x)
        if self.shift is not None and cache.shift_attention is not None:
            y = self.shift.step(y, index, cache.shift_attention)
        x = x + self.attention.step(y, slots, cache.attention, rotary)
        if self.cross is not None and self.norm_cross is not None and memory.text is not None:
            x = x + self.cross(self.norm_cross(x), memory.text, memory.mask)
        if self.sketch is not None and self.norm_sketch is not None and memory.sketch is not None:
            x = x + self.sketch.step(self.norm_sketch(x), index, memory.sketch)
        y = self.norm_mlp(x)
        if self.shift is not None and cache.shift_mlp is not None:
            y = self.shift.step(y, index, cache.shift_mlp)
        return x + self.mlp(y)


class DecodingState(NamedTuple):
    """State of a batch of clips that is being sampled. Its tensors never move, so that a CUDA graph may read them."""

    embedding: Tensor  # of positions, 1 N D; with a sketch B N D
    rotation: Tensor | None  # 4 N d/2
    memories: list[BlockMemory]
    caches: list[BlockCache]


class PositionEmbedding(nn.Module):
    """Positions of the tokens to predict. axial: learned tables, added. rotary: sines and cosines added, queries and keys rotated.

    A key is rotated by the position of its input token, one before the predicted one; BOS lies a frame before the first.
    """

    table: Tensor
    rotation: Tensor

    def __init__(self, config: NuwaConfig, grid: Grid) -> None:
        super().__init__()
        self.learned = LearnedPositions(grid, config.width) if config.positions == "axial" else None
        if self.learned is None:
            targets = grid_positions(grid)  # N 3
            inputs = torch.cat([torch.tensor([[-1, 0, 0]]), targets[:-1]])
            rotations = [Rotation.at_positions(at, config.width // config.heads) for at in (targets, inputs)]
            rotation = torch.stack([part for each in rotations for part in (each.cos, each.sin)])  # 4 N d/2
            self.register_buffer("table", sincos_embedding(targets, config.width), persistent=False)  # N D
            self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, count: int) -> tuple[Tensor, Tensor | None]:
        """→ embedding n D, and rotation 4 n d/2, of the first n positions."""
        if self.learned is not None:
            return self.learned()[:count], None
        return self.table[:count], self.rotation[:, :count]


def split_rotation(rotation: Tensor | None) -> RotaryPair | None:
    """4 n d/2 → the rotations of queries and keys."""
    if rotation is None:
        return None
    cos_q, sin_q, cos_k, sin_k = rotation
    return Rotation(cos_q, sin_q), Rotation(cos_k, sin_k)


class NuwaNetwork(nn.Module):
    """The id of BOS follows those of the codec."""

    def __init__(
        self,
        config: NuwaConfig,
        vocabulary: int,
        grid: Grid,
        text_width: int | None,
        sketch: tuple[int, Grid] | None = None,  # vocabulary and grid
        sound_rows: int = 0,  # at the end of each frame of `grid`
    ) -> None:
        super().__init__()
        width = config.width
        self.grid, self.bos = grid, vocabulary
        self.embedding_gradient, self.residual = config.embedding_gradient, config.residual
        self.tokens = nn.Embedding(vocabulary + 1, width)
        self.text = nn.Linear(text_width, width, bias=False) if text_width is not None else None
        init_weights(self, 1)
        # Checkpoints hold the names `places` and `glance`.
        self.places = PositionEmbedding(config, grid)
        self.sketch, self.glance, sketch_window = None, None, None
        if sketch is not None:
            self.sketch = SketchEmbedding(*sketch, width)
            sketch_window = SketchWindow(grid, sketch[1], config.sketch_window, width // config.heads)
            self.glance = SketchProjection(width, sketch_window)
        windows = [
            None if config.window is None else Window(config.window, dilation, sound_rows)
            for dilation in config.dilations
        ]
        self.blocks = nn.ModuleList(
            Block(config, windows[layer % len(windows)], text_width is not None, sketch_window)
            for layer in range(config.depth)
        )
        init_weights(self.blocks, config.depth)
        self.norm = norm_layer(config.norm, width)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Input of the first block: token embeddings, B N D, plus those of the positions."""
        x = self.tokens(tokens)
        if self.embedding_gradient != 1:
            x = x * self.embedding_gradient + x.detach() * (1 - self.embedding_gradient)
        return cast_residual(x + positions, self.residual)

    def _embed_conditions(self, text: Tensor | None, sketch: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """→ text B L D and sketch B M D, which every block attends to."""
        if self.text is not None:
            assert text is not None
            text = self.text(text.to(self.text.weight.dtype))
        if self.sketch is not None:
            assert sketch is not None
            sketch = self.sketch(sketch)
        return text, sketch

    def _embed_positions(self, count: int, sketch: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """→ embedding of the first n positions with the sketch around them, 1 n D or B n D, and their rotation."""
        embedding, rotation = self.places(count)
        if self.glance is not None and sketch is not None:
            return embedding + self.glance(sketch, count), rotation
        return embedding[None], rotation

    def _shift_right(self, tokens: Tensor) -> Tensor:
        """Tokens to predict → input tokens, B N: BOS, then all but the last."""
        return torch.cat([torch.full_like(tokens[:, :1], self.bos), tokens[:, :-1]], dim=1)

    def _token_grid(self, tokens: Tensor) -> Grid:
        _, rows, columns = self.grid
        return tokens.shape[1] // (rows * columns), rows, columns

    def forward(
        self,
        tokens: Tensor,  # B N, whole frames
        text: Tensor | None = None,  # B L D
        mask: Tensor | None = None,  # B L
        sketch: Tensor | None = None,  # B M
    ) -> Tensor:
        """Hidden states B N D, from which each token is predicted; they depend on earlier tokens only."""
        text, sketch = self._embed_conditions(text, sketch)
        embedding, rotation = self._embed_positions(tokens.shape[1], sketch)
        x = self._embed(self._shift_right(tokens), embedding)
        for block in self.blocks:
            x = block(x, self._token_grid(tokens), split_rotation(rotation), text, mask, sketch)
        return self.norm(x)

    # sampling --------------------------------------------------------------------------------------------------------

    def init_state(self, condition: Condition, rows: int, frames: int) -> DecodingState:
        """Create empty caches, and compute keys and values of the conditions once for all tokens."""
        text, sketch = self._embed_conditions(condition.text, condition.sketch)
        grid = (frames, *self.grid[1:])
        blocks = [cast(Block, block) for block in self.blocks]
        memories = [block.memory(text, condition.mask, sketch) for block in blocks]
        embedding, rotation = self._embed_positions(frames * grid[1] * grid[2], sketch)
        return DecodingState(embedding, rotation, memories, [block.cache(rows, grid) for block in blocks])

    def reset_state(self, condition: Condition, state: DecodingState) -> None:
        """`init_state` in the memory of a state of the same shape, so that a captured graph stays valid."""
        text, sketch = self._embed_conditions(condition.text, condition.sketch)
        state.embedding.copy_(self._embed_positions(state.embedding.shape[1], sketch)[0])
        for block, memory, cache in zip(self.blocks, state.memories, state.caches, strict=True):
            fresh = cast(Block, block).memory(text, condition.mask, sketch)
            for static, value in zip(memory.tensors(), fresh.tensors(), strict=True):
                static.copy_(value)
            cache.clear()  # a NaN would pass through the attention mask

    def prefill(self, tokens: Tensor, state: DecodingState) -> None:
        """Fill the caches with known tokens, B N, whole frames, in one pass."""
        count = tokens.shape[1]
        rotary = split_rotation(None if state.rotation is None else state.rotation[:, :count])
        x = self._embed(self._shift_right(tokens), state.embedding[:, :count])
        for block, memory, cache in zip(self.blocks, state.memories, state.caches, strict=True):
            x = block(x, self._token_grid(tokens), rotary, memory=memory, cache=cache)

    def step(self, token: Tensor, index: Tensor, state: DecodingState) -> Tensor:
        """Hidden state B 1 D that predicts token `index` (1, on the device); `token` (B 1) is the one before it."""
        x = self._embed(token, state.embedding.index_select(1, index))
        rotary = split_rotation(None if state.rotation is None else state.rotation.index_select(1, index))
        slots: dict[int, CacheSlots] = {}  # by dilation: blocks of one dilation share them
        for module, memory, cache in zip(self.blocks, state.memories, state.caches, strict=True):
            block = cast(Block, module)
            dilation = block.attention.window.dilation if block.attention.window is not None else 0
            if dilation not in slots:
                slots[dilation] = cache.attention.locate(index)
            x = block.step(x, index, slots[dilation], rotary, memory, cache)
        return self.norm(x)


class DecodeStep(nn.Module):
    """`NuwaNetwork.step` as a compile target without weights, for the trained network or the copy in decoding.py."""

    def forward(self, network: NuwaNetwork, token: Tensor, index: Tensor, state: DecodingState) -> Tensor:
        return network.step(token, index, state)
