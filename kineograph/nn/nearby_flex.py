"""Nearby attention with FlexAttention, which skips blocks of keys that no query of a block sees.

In raster order a window of a few rows touches most blocks, so positions are reordered. With dilation d, tokens of different
residues modulo d never see each other: each residue's tokens form one of d³ small grids. Inside them tokens are ordered by
tiles (t, y, x) of the shape that touches the fewest blocks. Keys follow the queries' order: token p is at input position
p + 1, and BOS takes the last slot, whose token is never read. Blocks of 128 touched at 10 × 16 × 16 tokens, window
5 × 3 × 3, dilation 1, 2, 4: 96, 63, 47; in raster order 169, 129, 81; a full causal triangle has 210.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kineograph.nn.window import Grid, Neighbours, TableCache, Window, grid_coordinates

BLOCK = 128


@dataclass(frozen=True)
class BlockOrder:
    """Permutations of queries and keys with their inverses, N, and the block mask in that order."""

    queries: Tensor
    queries_back: Tensor
    keys: Tensor
    keys_back: Tensor
    blocks: BlockMask


def tile_order(grid: Grid, dilation: int, tile: tuple[int, int, int]) -> Tensor:
    """Order positions by residue modulo the dilation, then tile, then inside the tile: a permutation, N."""
    where = grid_coordinates(torch.arange(prod(grid)), grid)  # N 3
    coarse, sizes = where // dilation, torch.tensor(tile)
    keys = torch.cat([where % dilation, coarse // sizes, coarse % sizes], dim=1)  # N 9, the first column first
    order = torch.arange(len(where))
    for column in reversed(range(keys.shape[1])):
        order = order[keys[order, column].argsort(stable=True)]
    return order


def count_touched_blocks(order: Tensor, pairs: tuple[Tensor, Tensor], block: int) -> int:
    """Count the blocks of queries × keys with at least one visible pair. BOS, the last, is visible to all."""
    rank = order.argsort() // block
    count = -(-len(order) // block)
    queries, keys = (torch.cat([part, every]) for part, every in zip(pairs, _bos_pairs(len(order))))
    return len(torch.unique(rank[queries] * count + rank[keys]))


def _bos_pairs(length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length), torch.full((length,), length - 1)


def find_best_order(grid: Grid, window: Window, block: int = BLOCK) -> Tensor:
    """The order that touches the fewest blocks; raster order if none is better."""
    length = prod(grid)
    tokens, seen = Neighbours.build(grid, window).visible(torch.arange(length))
    queries, _ = seen.nonzero(as_tuple=True)
    pairs = (queries, tokens[seen])
    fine = [-(-size // window.dilation) for size in grid]
    powers = [sorted({min(size, 2**n) for n in range(size.bit_length() + 1)}) for size in fine]
    tiles = [
        tile for tile in product(*powers) if block // 2 <= prod(tile) <= block or prod(tile) == prod(fine) <= block
    ]
    orders = [torch.arange(length), tile_order(grid, window.dilation, (1, fine[1], fine[2]))]
    orders += [tile_order(grid, window.dilation, tile) for tile in tiles]
    return min(orders, key=lambda order: count_touched_blocks(order, pairs, block))


def make_order(grid: Grid, window: Window, device: torch.device | str, block: int = BLOCK) -> BlockOrder:
    length = prod(grid)
    queries = find_best_order(grid, window, block).to(device)
    keys = (queries + 1) % length  # token p is at input position p + 1, BOS (position 0) at index N − 1
    t, y, x = (axis.contiguous() for axis in grid_coordinates(queries, grid).int().unbind(-1))
    d, (_, rows, columns) = window.dilation, window.size
    residue = ((t % d) * d + y % d) * d + x % d
    raster = queries.int()

    def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (t[q] - t[k] < window.frames) & ((y[q] - y[k]).abs() <= rows // 2 * d)
        near = near & ((x[q] - x[k]).abs() <= columns // 2 * d) & (residue[q] == residue[k])
        return (near & (raster[k] < raster[q])) | (raster[k] == length - 1)

    blocks = create_block_mask(visible, None, None, length, length, device=device, BLOCK_SIZE=block)
    return BlockOrder(queries, queries.argsort(), keys, keys.argsort(), blocks)


_orders = TableCache()


@torch.compiler.assume_constant_result
def _cache_order(grid: Grid, size: tuple[int, int, int], dilation: int, device: torch.device) -> str:
    """Create the order if needed. → its attribute name. Takes plain numbers: torch 2.11 cannot pass a frozen dataclass."""
    name = f"{grid} {size} {dilation} {device}"
    if not hasattr(_orders, name):
        with torch.inference_mode(False), torch.no_grad():
            setattr(_orders, name, make_order(grid, Window(size, dilation), device))
    return name


class _Reorder(torch.autograd.Function):
    """Permute positions. Its gradient is the inverse permutation, a gather instead of an atomic scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:  # B h N d
        ctx.save_for_backward(order, back)
        return x.index_select(2, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, back = ctx.saved_tensors
        return grads[0].index_select(2, back), None, None


def flex_nearby(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    window: Window,
    mask: Tensor | None = None,
    order: BlockOrder | None = None,
) -> Tensor:
    """Nearby attention of q, k, v (B h N d); mask is B N, True = real token. Fast only under torch.compile."""
    if order is None:
        order = getattr(_orders, _cache_order(grid, window.size, window.dilation, q.device))
    assert order is not None
    q = _Reorder.apply(q, order.queries, order.queries_back)
    k = _Reorder.apply(k, order.keys, order.keys_back)
    v = _Reorder.apply(v, order.keys, order.keys_back)
    real = None if mask is None else F.pad(mask[:, 1:], (1, 0), value=True).index_select(1, order.keys)

    def hide(score: Tensor, batch: Tensor, _head: Tensor, _q: Tensor, key: Tensor) -> Tensor:
        assert real is not None
        return torch.where(real[batch, key], score, -float("inf"))

    mixed = flex_attention(q, k, v, score_mod=None if real is None else hide, block_mask=order.blocks)
    assert isinstance(mixed, Tensor)
    return _Reorder.apply(mixed, order.queries_back, order.queries)
