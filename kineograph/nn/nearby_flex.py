"""Nearby attention by FlexAttention: blocks of keys that no query of a block sees are skipped.

In raster order a window of a few rows touches most blocks. Two changes of order make the touched ones few and full. With dilation d, tokens of
different residues modulo d never see each other, so each residue's tokens are put together: d³ small grids of their own. Inside them, tokens
go by tiles (t, y, x), of the shape that touches the fewest blocks. Keys are put in the same order as queries: token p is at input position
p + 1, and BOS takes the last place, whose token is never read. Blocks touched, of 128, at 10 × 16 × 16 tokens and window 5 × 3 × 3 with
dilation 1, 2, 4: 96, 63, 47; in raster order 169, 129, 81; a whole causal triangle has 210.
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

from kineograph.nn.window import Grid, Neighbours, Shelf, Window, places

BLOCK = 128


@dataclass(frozen=True)
class Order:
    """Queries and keys in an order of their own. Each is a permutation of input positions with its inverse, N."""

    queries: Tensor
    queries_back: Tensor
    keys: Tensor
    keys_back: Tensor
    blocks: BlockMask


def tiled(grid: Grid, dilation: int, tile: tuple[int, int, int]) -> Tensor:
    """Places by residue modulo the dilation, then by tile, then inside the tile: a permutation of raster order, N."""
    where = places(torch.arange(prod(grid)), grid)  # N 3
    coarse, sizes = where // dilation, torch.tensor(tile)
    keys = torch.cat([where % dilation, coarse // sizes, coarse % sizes], dim=1)  # N 9, the first column first
    order = torch.arange(len(where))
    for column in reversed(range(keys.shape[1])):
        order = order[keys[order, column].argsort(stable=True)]
    return order


def touched(order: Tensor, pairs: tuple[Tensor, Tensor], block: int) -> int:
    """Blocks of queries × keys that hold at least one pair. BOS, at the last place, is seen by all."""
    rank = order.argsort() // block
    count = -(-len(order) // block)
    queries, keys = (torch.cat([part, every]) for part, every in zip(pairs, _bos(len(order))))
    return len(torch.unique(rank[queries] * count + rank[keys]))


def _bos(length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length), torch.full((length,), length - 1)


def best_order(grid: Grid, window: Window, block: int = BLOCK) -> Tensor:
    """The order of places that touches the fewest blocks; raster order if none is better."""
    length = prod(grid)
    tokens, seen = Neighbours.of(grid, window).seen(torch.arange(length))
    queries, _ = seen.nonzero(as_tuple=True)
    pairs = (queries, tokens[seen])
    fine = [-(-size // window.dilation) for size in grid]
    powers = [sorted({min(size, 2**n) for n in range(size.bit_length() + 1)}) for size in fine]
    tiles = [
        tile for tile in product(*powers) if block // 2 <= prod(tile) <= block or prod(tile) == prod(fine) <= block
    ]
    orders = [torch.arange(length), tiled(grid, window.dilation, (1, fine[1], fine[2]))]
    orders += [tiled(grid, window.dilation, tile) for tile in tiles]
    return min(orders, key=lambda order: touched(order, pairs, block))


def make_order(grid: Grid, window: Window, device: torch.device | str, block: int = BLOCK, best: bool = True) -> Order:
    length = prod(grid)
    queries = (best_order(grid, window, block) if best else torch.arange(length)).to(device)
    keys = (queries + 1) % length  # token p is at input position p + 1, BOS (position 0) at place N − 1
    t, y, x = (axis.contiguous() for axis in places(queries, grid).int().unbind(-1))
    d, (_, rows, columns) = window.dilation, window.size
    residue = ((t % d) * d + y % d) * d + x % d
    raster = queries.int()

    def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (t[q] - t[k] < window.frames) & ((y[q] - y[k]).abs() <= rows // 2 * d)
        near = near & ((x[q] - x[k]).abs() <= columns // 2 * d) & (residue[q] == residue[k])
        return (near & (raster[k] < raster[q])) | (raster[k] == length - 1)

    blocks = create_block_mask(visible, None, None, length, length, device=device, BLOCK_SIZE=block)
    return Order(queries, queries.argsort(), keys, keys.argsort(), blocks)


_orders = Shelf()


@torch.compiler.assume_constant_result
def _shelve(grid: Grid, size: tuple[int, int, int], dilation: int, device: torch.device) -> str:
    """Make an order unless it is there, and say its name. Plain numbers: torch.compile of torch 2.11 cannot hand over a frozen dataclass."""
    name = f"{grid} {size} {dilation} {device}"
    if not hasattr(_orders, name):
        with torch.inference_mode(False), torch.no_grad():
            setattr(_orders, name, make_order(grid, Window(size, dilation), device))
    return name


class _Reorder(torch.autograd.Function):
    """A permutation of positions. Its gradient is the inverse permutation: read in order, not added up atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:  # B h N d
        ctx.save_for_backward(order, back)
        return x.index_select(2, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, back = ctx.saved_tensors
        return grads[0].index_select(2, back), None, None


def flex_nearby(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, window: Window, mask: Tensor | None = None, order: Order | None = None
) -> Tensor:
    """q, k and v are B h N d by input position; mask is B N, True = a real token. Fast under torch.compile only."""
    if order is None:
        order = getattr(_orders, _shelve(grid, window.size, window.dilation, q.device))
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
