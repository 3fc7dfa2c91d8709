"""3D nearby attention (3DNA): all positions at once for training, one at a time with a KV cache for sampling."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kineograph.nn.attention import RotaryFn, attend
from kineograph.nn.norms import norm_layer
from kineograph.nn.window import Grid, Neighbours, TableCache, Window, nearby_mask

__all__ = ["Grid", "NearbyAttention", "NearbyCache", "Window", "nearby_attend", "nearby_mask"]

Backend = Literal["causal", "dense", "flex"]
RotaryPair = RotaryFn | tuple[RotaryFn, RotaryFn]  # one for queries and keys, or one each


# All positions at once -----------------------------------------------------------------------------------------------


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
    """Attention of the N positions of a grid, B h N d, within a window (None: causal).

    `mask` (B N) is True for real tokens; BOS always counts. Padding at the end of a clip needs no mask.
    """
    assert q.shape[2] == prod(grid)
    if window is None or window.covers(grid):
        if mask is None:
            return attend(q, k, v, dropout=dropout, causal=True)
        window = None
    backend = backend or choose_backend(q, window, dropout)
    if backend == "flex":
        from kineograph.nn.nearby_flex import flex_nearby

        assert window is not None
        return flex_nearby(q, k.to(q.dtype), v.to(q.dtype), grid, window, mask)
    seen: Tensor = getattr(_masks, _cache_mask(grid, *_window_numbers(window), q.device))  # N N
    if mask is not None:
        seen = seen & F.pad(mask[:, 1:], (1, 0), value=True)[:, None, None, :]  # B 1 N N
    return attend(q, k, v, seen, dropout)


FLEX_MIN_TOKENS = 1024  # tokens; between the two sizes measured below


def choose_backend(q: Tensor, window: Window | None, dropout: float) -> Backend:
    """FlexAttention for long sequences when compiled for a GPU, else a dense mask.

    FlexAttention has no dropout, no CPU backward, and needs head sizes of at least 16; its order of tokens leaves out sound.
    Forward + backward on an H200,
    bf16, batch 8, 8 heads of 64, dilations 1, 2, 4: 1.46, 1.34, 1.33 ms against 1.79, 1.70, 1.80 ms dense at
    10 × 16 × 16 tokens; 0.94 against 0.31 ms at 5 × 8 × 8. Gathering each query's keys was slower on a CPU at every size.
    """
    fit = q.is_cuda and torch.compiler.is_compiling() and window is not None and not window.sound_rows
    return "flex" if fit and dropout == 0 and q.shape[3] >= 16 and q.shape[2] >= FLEX_MIN_TOKENS else "dense"


_masks = TableCache()


def _window_numbers(window: Window | None) -> tuple[tuple[int, int, int] | None, int, int]:
    """Window as plain numbers: torch 2.11 cannot pass a frozen dataclass to a function with a constant result."""
    return (None, 1, 0) if window is None else (window.size, window.dilation, window.sound_rows)


@torch.compiler.assume_constant_result
def _cache_mask(
    grid: Grid, size: tuple[int, int, int] | None, dilation: int, sound_rows: int, device: torch.device
) -> str:
    """Create the mask if needed. → its attribute name."""
    name = f"{grid} {size} {dilation} {sound_rows} {device}"
    if not hasattr(_masks, name):
        with torch.inference_mode(False):  # created while sampling, it must serve training too
            window = None if size is None else Window(size, dilation, sound_rows)
            setattr(_masks, name, nearby_mask(grid, window, device))
    return name


# One position at a time ----------------------------------------------------------------------------------------------


class CacheSlots(NamedTuple):
    """Cache slots of a position: where its key is written and which keys it reads."""

    write: Tensor  # 1
    read: Tensor | None  # W; None: the whole cache
    mask: Tensor  # 1 W, bool


@dataclass(frozen=True)
class NearbyCache:
    """KV cache. Slot 0 is BOS; token k is in slot 1 + k mod ring, a ring of frames.

    A ring of `window.frames` frames holds everything visible, however long the clip. Without a window the cache holds a
    whole clip.
    """

    keys: Tensor  # B h S d
    values: Tensor
    grid: Grid
    neighbours: Neighbours | None

    @property
    def ring(self) -> int:
        """Tokens in the ring, without BOS."""
        return self.keys.shape[2] - 1

    def clear(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def locate(self, index: Tensor) -> CacheSlots:
        """Slots of an input position (int64, one element). Layers with the same window and grid may share the result."""
        index = index.view(1)
        if self.neighbours is None:
            slots = torch.arange(self.keys.shape[2], device=index.device)
            return CacheSlots(index, None, (slots <= index)[None])
        tokens, seen = self.neighbours.visible(index)  # 1 W
        write = torch.where(index == 0, index, 1 + (index - 1) % self.ring)
        read = F.pad(1 + tokens[0] % self.ring, (1, 0))  # BOS, then the window
        return CacheSlots(write, read, F.pad(seen, (1, 0), value=True))

    def write(self, at: CacheSlots, keys: Tensor, values: Tensor) -> None:
        self.keys.index_copy_(2, at.write, keys.to(self.keys.dtype))
        self.values.index_copy_(2, at.write, values.to(self.values.dtype))

    def read(self, at: CacheSlots) -> tuple[Tensor, Tensor]:
        if at.read is None:
            return self.keys, self.values
        return self.keys.index_select(2, at.read), self.values.index_select(2, at.read)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of the first n input positions, B h n d; of tokens, the last that fit the ring."""
        length = keys.shape[2]
        first = max(1, length - self.ring)
        positions = torch.arange(first, length, device=keys.device)
        slots = 1 + (positions - 1) % self.ring if self.ring else positions
        for kept, new in ((self.keys, keys), (self.values, values)):
            kept[:, :, :1] = new[:, :, :1].to(kept.dtype)
            kept.index_copy_(2, slots, new[:, :, first:].to(kept.dtype))


class NearbyAttention(nn.Module):
    """Self-attention over [BOS, token 0, …]. Its parameters are named like those of SelfAttention."""

    def __init__(
        self, width: int, heads: int, window: Window | None, *, qk_norm: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.window, self.dropout = heads, window, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm_q = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.norm_k = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=False)

    def _project(self, x: Tensor, rotary: RotaryPair | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, B h N d, of one dtype."""
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
        rotary: RotaryPair | None = None,
        mask: Tensor | None = None,  # B N
        cache: NearbyCache | None = None,
    ) -> Tensor:
        """Attend at all positions of a grid. Fills `cache`, if given, for `step` to continue at index N."""
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
        """Create an empty cache for `frames` frames (None: the grid's); with a window, no more than it needs.

        `dtype` None: autocast's, else the weights'."""
        weight = self.qkv.weight
        device = torch.device(device) if device is not None else weight.device
        if dtype is None:
            auto = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if auto else weight.dtype
        frames = frames or grid[0]
        kept = frames if self.window is None else min(frames, self.window.frames)
        shape = (batch, self.heads, 1 + kept * grid[1] * grid[2], weight.shape[1] // self.heads)
        neighbours = None if self.window is None else Neighbours.build(grid, self.window, device)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return NearbyCache(keys, values, grid, neighbours)

    def step(
        self, x: Tensor, index: Tensor | CacheSlots, cache: NearbyCache, rotary: RotaryPair | None = None
    ) -> Tensor:
        """Attend at one position, B 1 D. `index` is its number on the device, or its slots. Its value is never read on
        the host, so a CUDA graph of one step serves every position."""
        at = cache.locate(index) if isinstance(index, Tensor) else index
        q, k, v = self._project(x, rotary)
        cache.write(at, k, v)
        keys, values = cache.read(at)
        mixed = attend(q, keys, values, at.mask)  # B h 1 d
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))
