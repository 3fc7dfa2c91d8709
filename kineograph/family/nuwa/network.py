"""NUWA's transformer: [BOS, token 0, …, token N − 2] → hidden states of tokens 0 … N − 1. For training all at once, for drawing one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from kineograph.family.nuwa.config import NuwaConfig
from kineograph.family.nuwa.sketch import Around, SketchAttention, SketchGlance, SketchTokens
from kineograph.nn.attention import CrossAttention, Memory
from kineograph.nn.nearby import CacheSlots, NearbyAttention, NearbyCache, RotaryPair
from kineograph.nn.norms import norm_layer
from kineograph.nn.positions import LearnedPositions, Rotation, grid_positions, sincos_embedding
from kineograph.nn.token_shift import ShiftCache, TokenShift
from kineograph.nn.transformer import Mlp, cast_residual, init_weights
from kineograph.nn.window import Grid, Window


@dataclass
class Condition:
    """What a batch of clips is drawn from. A part that the model does not have is None."""

    text: Tensor | None = None  # B L D
    mask: Tensor | None = None  # B L
    sketch: Tensor | None = None  # B M, tokens

    def clone(self) -> Condition:
        return Condition(*(None if part is None else part.clone() for part in (self.text, self.mask, self.sketch)))


class Heard(NamedTuple):
    """A condition as one block attends to it: keys and values of the text, with its mask, and of the sketch."""

    text: Memory | None
    mask: Tensor | None
    sketch: Memory | None

    def tensors(self) -> list[Tensor]:
        return [*(self.text or ()), *((self.mask,) if self.mask is not None else ()), *(self.sketch or ())]


class BlockCache(NamedTuple):
    """What a block keeps of the positions that it has passed."""

    attention: NearbyCache
    shift_attention: ShiftCache | None
    shift_mlp: ShiftCache | None

    def clear(self) -> None:
        for part in self:
            if part is not None:
                part.clear()


class Block(nn.Module):
    """Nearby attention, text, sketch, MLP; attention and MLP read shifted tokens."""

    def __init__(self, config: NuwaConfig, window: Window | None, cross: bool, around: Around | None = None) -> None:
        super().__init__()
        width, heads, kind = config.width, config.heads, config.norm
        given = {"qk_norm": config.qk_norm, "dropout": config.dropout}
        self.shift = TokenShift() if config.token_shift else None
        self.norm_attention = norm_layer(kind, width)
        self.attention = NearbyAttention(width, heads, window, qk_norm=config.qk_norm, dropout=config.dropout)
        self.norm_cross = norm_layer(kind, width) if cross else None
        self.cross = CrossAttention(width, heads, **given) if cross else None  # type: ignore[arg-type]
        self.norm_sketch = norm_layer(kind, width) if around is not None else None
        self.sketch = SketchAttention(width, heads, around, **given) if around is not None else None  # type: ignore[arg-type]
        self.norm_mlp = norm_layer(kind, width)
        self.mlp = Mlp(width, config.mlp_ratio, config.mlp)
        self.drop = nn.Dropout(config.dropout)

    def hear(self, text: Tensor | None, mask: Tensor | None, sketch: Tensor | None) -> Heard:
        """Keys and values of the text, B L D, and of the sketch, B M D."""
        return Heard(
            self.cross.memory(text) if self.cross is not None and text is not None else None,
            mask,
            self.sketch.memory(sketch) if self.sketch is not None and sketch is not None else None,
        )

    def cache(self, rows: int, grid: Grid) -> BlockCache:
        """Empty, for a clip of this grid."""
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
        heard: Heard | None = None,  # instead of text and sketch
        cache: BlockCache | None = None,  # filled, for `step` to go on
    ) -> Tensor:
        heard = heard or self.hear(text, mask, sketch)
        y = self.norm_attention(x)
        if self.shift is not None:
            y = self.shift(y, grid, cache.shift_attention if cache is not None else None)
        x = x + self.drop(self.attention(y, grid, rotary, cache=cache.attention if cache is not None else None))
        if self.cross is not None and self.norm_cross is not None and heard.text is not None:
            x = x + self.drop(self.cross(self.norm_cross(x), heard.text, heard.mask))
        if self.sketch is not None and self.norm_sketch is not None and heard.sketch is not None:
            x = x + self.drop(self.sketch(self.norm_sketch(x), heard.sketch))
        y = self.norm_mlp(x)
        if self.shift is not None:
            y = self.shift(y, grid, cache.shift_mlp if cache is not None else None)
        return x + self.drop(self.mlp(y))

    def step(
        self, x: Tensor, index: Tensor, at: CacheSlots, rotary: RotaryPair | None, heard: Heard, cache: BlockCache
    ) -> Tensor:
        """One position, B 1 D."""
        y = self.norm_attention(x)
        if self.shift is not None and cache.shift_attention is not None:
            y = self.shift.step(y, index, cache.shift_attention)
        x = x + self.attention.step(y, at, cache.attention, rotary)
        if self.cross is not None and self.norm_cross is not None and heard.text is not None:
            x = x + self.cross(self.norm_cross(x), heard.text, heard.mask)
        if self.sketch is not None and self.norm_sketch is not None and heard.sketch is not None:
            x = x + self.sketch.step(self.norm_sketch(x), index, heard.sketch)
        y = self.norm_mlp(x)
        if self.shift is not None and cache.shift_mlp is not None:
            y = self.shift.step(y, index, cache.shift_mlp)
        return x + self.mlp(y)


class Decoding(NamedTuple):
    """A batch of clips that is being drawn: where positions are, what each block hears and what it keeps."""

    added: Tensor  # 1 N D; B N D where there is a sketch
    turns: Tensor | None  # 4 N d/2
    heard: list[Heard]
    caches: list[BlockCache]


class Places(nn.Module):
    """Where a position is: it stands at the place of the token that it predicts. axial: learned tables, added. rotary: sines and cosines added,
    and queries and keys turn; a key turns by the place of the token that it holds, one before, and BOS lies a time before the first."""

    table: Tensor
    turns: Tensor

    def __init__(self, config: NuwaConfig, grid: Grid) -> None:
        super().__init__()
        self.learned = LearnedPositions(grid, config.width) if config.positions == "axial" else None
        if self.learned is None:
            places = grid_positions(grid)  # N 3
            held = torch.cat([torch.tensor([[-1, 0, 0]]), places[:-1]])
            turns = [Rotation.at_positions(at, config.width // config.heads) for at in (places, held)]
            self.register_buffer("table", sincos_embedding(places, config.width), persistent=False)  # N D
            self.register_buffer(
                "turns", torch.stack([part for turn in turns for part in (turn.cos, turn.sin)]), persistent=False
            )  # 4 N d/2

    def forward(self, first: int) -> tuple[Tensor, Tensor | None]:
        """Of the first positions: what is added, n D, and the cosines and sines of the turns, 4 n d/2."""
        if self.learned is not None:
            return self.learned()[:first], None
        return self.table[:first], self.turns[:, :first]


def turn_by(parts: Tensor | None) -> RotaryPair | None:
    """How queries and keys turn."""
    if parts is None:
        return None
    cos_q, sin_q, cos_k, sin_k = parts
    return Rotation(cos_q, sin_q), Rotation(cos_k, sin_k)


class NuwaNetwork(nn.Module):
    """BOS has an id of its own, after the codec's."""

    def __init__(
        self,
        config: NuwaConfig,
        vocabulary: int,
        grid: Grid,
        text_width: int | None,
        sketch: tuple[int, Grid] | None = None,
    ) -> None:
        super().__init__()
        width = config.width
        self.grid, self.bos = grid, vocabulary
        self.gradient, self.residual = config.embedding_gradient, config.residual
        self.tokens = nn.Embedding(vocabulary + 1, width)
        self.text = nn.Linear(text_width, width, bias=False) if text_width is not None else None
        init_weights(self, 1)
        self.places = Places(config, grid)
        self.sketch = SketchTokens(*sketch, width) if sketch is not None else None
        head_width = width // config.heads
        around = Around(grid, sketch[1], config.sketch_window, head_width) if sketch is not None else None
        self.glance = SketchGlance(width, around) if around is not None else None
        self.blocks = nn.ModuleList(
            Block(config, self._window(config, layer), text_width is not None, around) for layer in range(config.depth)
        )
        init_weights(self.blocks, config.depth)
        self.norm = norm_layer(config.norm, width)

    @staticmethod
    def _window(config: NuwaConfig, layer: int) -> Window | None:
        if config.window is None:
            return None
        return Window(config.window, config.dilations[layer % len(config.dilations)])

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return x if self.gradient == 1 else x * self.gradient + x.detach() * (1 - self.gradient)

    def _context(self, text: Tensor | None, sketch: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What every block attends to: the text, B L D, and the sketch, B M D."""
        if self.text is not None:
            assert text is not None
            text = self.text(text.to(self.text.weight.dtype))
        if self.sketch is not None:
            assert sketch is not None
            sketch = self.sketch(sketch)
        return text, sketch

    def _places(self, first: int, sketch: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Of the first positions: what is added to the tokens that they hold, where they are and what is sketched there, 1 n D or B n D; and
        how they turn."""
        added, turns = self.places(first)
        if self.glance is not None and sketch is not None:
            return added + self.glance(sketch, first), turns
        return added[None], turns

    def _shifted(self, tokens: Tensor) -> Tensor:
        """Tokens B N → what the positions hold, B N: BOS and all but the last."""
        return torch.cat([torch.full_like(tokens[:, :1], self.bos), tokens[:, :-1]], dim=1)

    def _frames(self, tokens: Tensor) -> Grid:
        _, rows, columns = self.grid
        return tokens.shape[1] // (rows * columns), rows, columns

    def forward(
        self,
        tokens: Tensor,  # B N, whole times
        text: Tensor | None = None,  # B L D
        mask: Tensor | None = None,  # B L
        sketch: Tensor | None = None,  # B M
    ) -> Tensor:
        """Hidden states from which each token is predicted, B N D; no token is seen by its own."""
        text, sketch = self._context(text, sketch)
        added, turns = self._places(tokens.shape[1], sketch)
        x = cast_residual(self._embed(self._shifted(tokens)) + added, self.residual)
        for block in self.blocks:
            x = block(x, self._frames(tokens), turn_by(turns), text, mask, sketch)
        return self.norm(x)

    # drawing ---------------------------------------------------------------------------------------------------------

    def start(self, condition: Condition, rows: int, frames: int) -> Decoding:
        """Nothing is drawn yet. What is heard is made here, once for all tokens."""
        text, sketch = self._context(condition.text, condition.sketch)
        grid = (frames, *self.grid[1:])
        blocks = [cast(Block, block) for block in self.blocks]
        heard = [block.hear(text, condition.mask, sketch) for block in blocks]
        added, turns = self._places(frames * grid[1] * grid[2], sketch)
        return Decoding(added, turns, heard, [block.cache(rows, grid) for block in blocks])

    def restart(self, condition: Condition, state: Decoding) -> None:
        """As `start`, in the memory of a state of the same shape: what has recorded its places goes on with it."""
        text, sketch = self._context(condition.text, condition.sketch)
        state.added.copy_(self._places(state.added.shape[1], sketch)[0])
        for block, heard, cache in zip(self.blocks, state.heard, state.caches, strict=True):
            fresh = cast(Block, block).hear(text, condition.mask, sketch)
            for kept, value in zip(heard.tensors(), fresh.tensors(), strict=True):
                kept.copy_(value)
            cache.clear()  # nothing there is seen, but no masked number may be other than finite

    def fill(self, tokens: Tensor, state: Decoding) -> None:
        """Pass the positions before token N in one go, for whole times B N of given tokens."""
        first = tokens.shape[1]
        turns = None if state.turns is None else state.turns[:, :first]
        x = cast_residual(self._embed(self._shifted(tokens)) + state.added[:, :first], self.residual)
        for block, heard, cache in zip(self.blocks, state.heard, state.caches, strict=True):
            x = block(x, self._frames(tokens), turn_by(turns), heard=heard, cache=cache)

    def step(self, token: Tensor, index: Tensor, state: Decoding) -> Tensor:
        """The hidden state from which token `index` (1, on the device) is predicted, B 1 D; `token` (B 1) is the one before it."""
        x = cast_residual(self._embed(token) + state.added.index_select(1, index), self.residual)
        rotary = turn_by(None if state.turns is None else state.turns.index_select(1, index))
        located: dict[int, CacheSlots] = {}  # blocks of one dilation look to the same places
        for module, heard, cache in zip(self.blocks, state.heard, state.caches, strict=True):
            block = cast(Block, module)
            spacing = block.attention.window.dilation if block.attention.window is not None else 0
            if spacing not in located:
                located[spacing] = cache.attention.locate(index)
            x = block.step(x, index, located[spacing], rotary, heard, cache)
        return self.norm(x)


class OneStep(nn.Module):
    """`NuwaNetwork.step` as a module without weights of its own: it is compiled as it stands, since drawing records its own graph around it.
    The network is given: the one that trains, or a copy of it (canvas.py)."""

    def forward(self, network: NuwaNetwork, token: Tensor, index: Tensor, state: Decoding) -> Tensor:
        return network.step(token, index, state)
