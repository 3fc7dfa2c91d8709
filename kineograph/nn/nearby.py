"""3D nearby attention: each place of a clip sees a window of what was drawn before it. For training all at once, and for drawing one by one."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kineograph.nn.attention import Turn, attend
from kineograph.nn.norms import norm_layer
from kineograph.nn.window import Grid, Neighbours, Shelf, Window, nearby_mask, places

__all__ = ["Grid", "NearbyAttention", "NearbyCache", "Window", "nearby_attend", "nearby_mask", "places"]

Backend = Literal["causal", "dense", "flex"]
Turns = Turn | tuple[Turn, Turn]  # one for queries and keys, or one each


# All places at once -----------------------------------------------------------------------------------------------


def nearby_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    window: Window | None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: Backend | None = None,
) -> Tensor:
    """Attention of the places of a grid, B h N d, to the input positions that they may see (window null: all before them).

    `mask` is B N, True where an input position holds a real token; BOS always does. Clips that are padded at their end need none: nothing real
    comes after padding.
    """
    assert q.shape[2] == prod(grid)
    if window is None or window.covers(grid):
        if mask is None:
            return attend(q, k, v, dropout=dropout, causal=True)
        window = None
    backend = backend or choose(q, window, dropout)
    if backend == "flex":
        from kineograph.nn.nearby_flex import flex_nearby

        assert window is not None
        return flex_nearby(q, k.to(q.dtype), v.to(q.dtype), grid, window, mask)
    seen: Tensor = getattr(_masks, _shelve(grid, *_parts(window), q.device))  # N N
    if mask is not None:
        seen = seen & F.pad(mask[:, 1:], (1, 0), value=True)[:, None, None, :]  # B 1 N N
    return attend(q, k, v, seen, dropout)


FLEX_FROM = 1024  # tokens, between the two sizes that were measured


def choose(q: Tensor, window: Window | None, dropout: float) -> Backend:
    """FlexAttention for long sequences where it is compiled for a GPU (it has no dropout, no CPU gradient, and heads from 16 channels on), else a
    dense mask. Forward and backward on an H200, bf16, batch 8, 8 heads of 64, dilations 1, 2, 4: 1.46, 1.34, 1.33 against 1.79, 1.70, 1.80 ms at
    10 × 16 × 16 tokens; 0.94 against 0.31 ms at 5 × 8 × 8.

    A third way, gathering the keys of each query, was slower on a CPU at every size tried: forward and backward on one core, 4 heads of 32,
    batch 2: 50 against 8 ms at 5 × 8 × 8 tokens, 600 against 490 ms at 10 × 16 × 16; batch 8 at 5 × 8 × 8: 320 against 27 ms.
    """
    fit = q.is_cuda and torch.compiler.is_compiling() and window is not None
    return "flex" if fit and dropout == 0 and q.shape[3] >= 16 and q.shape[2] >= FLEX_FROM else "dense"


_masks = Shelf()


def _parts(window: Window | None) -> tuple[tuple[int, int, int] | None, int]:
    """A window in plain numbers: torch.compile of torch 2.11 cannot hand a frozen dataclass to a function that it calls."""
    return (None, 1) if window is None else (window.size, window.dilation)


@torch.compiler.assume_constant_result
def _shelve(grid: Grid, size: tuple[int, int, int] | None, dilation: int, device: torch.device) -> str:
    """Make a mask unless it is there, and say its name."""
    name = f"{grid} {size} {dilation} {device}"
    if not hasattr(_masks, name):
        with torch.inference_mode(False):  # one first met while sampling serves training too
            setattr(_masks, name, nearby_mask(grid, None if size is None else Window(size, dilation), device))
    return name


# One place at a time ----------------------------------------------------------------------------------------------


class Located(NamedTuple):
    """Where a position's key is written in a cache, and which are read for it."""

    write: Tensor  # 1
    read: Tensor | None  # W; None: the whole cache
    mask: Tensor  # 1 W, bool


@dataclass(frozen=True)
class NearbyCache:
    """Keys and values of input positions. Slot 0 is BOS; token k is in slot 1 + k mod (ring · Y · X), so the frames form a ring.

    A place sees `window.frames` frames and no further back, so that a ring of this many holds all that it may see, however long the clip.
    Without a window the cache holds a whole clip and cannot go round.
    """

    keys: Tensor  # B h S d
    values: Tensor
    grid: Grid
    neighbours: Neighbours | None

    @property
    def ring(self) -> int:
        """Tokens that are kept beside BOS."""
        return self.keys.shape[2] - 1

    def clear(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def locate(self, index: Tensor) -> Located:
        """Of an input position, an int64 tensor with one element. Layers of one window and grid may share what this gives."""
        index = index.view(1)
        if self.neighbours is None:
            slots = torch.arange(self.keys.shape[2], device=index.device)
            return Located(index, None, (slots <= index)[None])
        tokens, seen = self.neighbours.seen(index)  # 1 W
        write = torch.where(index == 0, index, 1 + (index - 1) % self.ring)
        read = F.pad(1 + tokens[0] % self.ring, (1, 0))  # BOS, then the window
        return Located(write, read, F.pad(seen, (1, 0), value=True))

    def write(self, at: Located, keys: Tensor, values: Tensor) -> None:
        self.keys.index_copy_(2, at.write, keys.to(self.keys.dtype))
        self.values.index_copy_(2, at.write, values.to(self.values.dtype))

    def read(self, at: Located) -> tuple[Tensor, Tensor]:
        if at.read is None:
            return self.keys, self.values
        return self.keys.index_select(2, at.read), self.values.index_select(2, at.read)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """With those of the first n input positions, B h n d; of tokens, the last that the ring holds."""
        length = keys.shape[2]
        first = max(1, length - self.ring)
        positions = torch.arange(first, length, device=keys.device)
        slots = 1 + (positions - 1) % self.ring if self.ring else positions
        for kept, given in ((self.keys, keys), (self.values, values)):
            kept[:, :, :1] = given[:, :, :1].to(kept.dtype)
            kept.index_copy_(2, slots, given[:, :, first:].to(kept.dtype))


class NearbyAttention(nn.Module):
    """Self-attention of a clip's places, in [BOS, token 0, …] order. Parameters are named as those of SelfAttention."""

    def __init__(
        self, width: int, heads: int, window: Window | None, *, qk_norm: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.window, self.dropout = heads, window, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm_q = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.norm_k = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=False)

    def _project(self, x: Tensor, rotary: Turns | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, B h N d, of one type."""
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        q, k = self.norm_q(q), self.norm_k(k)
        if rotary is not None:
            turn_q, turn_k = rotary if isinstance(rotary, tuple) else (rotary, rotary)
            q, k = turn_q(q), turn_k(k)
        return q.to(v.dtype), k.to(v.dtype), v

    def forward(
        self,
        x: Tensor,  # B N D
        grid: Grid,
        rotary: Turns | None = None,
        mask: Tensor | None = None,  # B N
        cache: NearbyCache | None = None,
    ) -> Tensor:
        """All positions of a grid. A cache is filled with their keys and values, for `step` to go on after them: `grid` is then that of the
        frames given, and the next index is N."""
        q, k, v = self._project(x, rotary)
        if cache is not None:
            cache.fill(k, v)
        mixed = nearby_attend(q, k, v, grid, self.window, mask, self.dropout if self.training else 0.0)
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))

    def cache(
        self,
        batch: int,
        grid: Grid,
        frames: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> NearbyCache:
        """An empty cache for `frames` frames (null: the grid's) of Y × X tokens; with a window, a ring of no more than the window needs.

        `dtype` null: what autocast would compute in, else the weights'."""
        weight = self.qkv.weight
        device = torch.device(device) if device is not None else weight.device
        if dtype is None:
            auto = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if auto else weight.dtype
        frames = frames or grid[0]
        kept = frames if self.window is None else min(frames, self.window.frames)
        shape = (batch, self.heads, 1 + kept * grid[1] * grid[2], weight.shape[1] // self.heads)
        neighbours = None if self.window is None else Neighbours.of(grid, self.window, device)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return NearbyCache(keys, values, grid, neighbours)

    def step(self, x: Tensor, index: Tensor | Located, cache: NearbyCache, rotary: Turns | None = None) -> Tensor:
        """One position, B 1 D. `index` is its number on the device (or where the cache located it): nothing here asks for its value, so a CUDA
        graph of one step serves every position. `rotary` turns this position's query and key."""
        at = cache.locate(index) if isinstance(index, Tensor) else index
        q, k, v = self._project(x, rotary)
        cache.write(at, k, v)
        keys, values = cache.read(at)
        mixed = attend(q, keys, values, at.mask)  # B h 1 d
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))
