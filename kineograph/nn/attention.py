"""Attention. Every network calls `attend`, the one place where a kernel is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kineograph.core import kernels
from kineograph.nn.norms import norm_layer

Memory = tuple[Tensor, Tensor]  # keys and values, B h M d


Turn = Callable[[Tensor], Tensor]  # queries or keys, B h N d, turned by their positions

_OTHERS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_HALVES = (torch.bfloat16, torch.float16)
_flash = torch.ops.aten._scaled_dot_product_flash_attention
MOST_SEQUENCES = 65_535
"""In one call of a fused kernel, which gives them the second axis of a CUDA grid. Attention over time has h · w of them a clip."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / √d) v by torch's fused kernels. q is B h N d, k and v are B h M d.

    `mask` is bool, True where a key may be seen, and broadcasts to B h N M. Each query must see at least one key. No number stands for
    "minus infinity", so nothing can overflow in half precision. `causal` lets each query see the keys up to its own place, and takes no mask.
    """
    if q.shape[0] > MOST_SEQUENCES:
        parts = [slice(start, start + MOST_SEQUENCES) for start in range(0, q.shape[0], MOST_SEQUENCES)]
        seen = [mask if mask is None or mask.shape[0] == 1 else mask[rows] for rows in parts]
        return torch.cat([attend(q[rows], k[rows], v[rows], keys, dropout, causal) for rows, keys in zip(parts, seen)])
    k, v = k.to(q.dtype), v.to(q.dtype)
    if kernels.flash3 and q.is_cuda:
        if dropout:  # which FlashAttention 3 has not
            with sdpa_kernel(_OTHERS):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        if mask is None and _for_flash3(q, k, v, causal):
            return _flash(q, k, v, 0.0, causal)[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)


def _for_flash3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Long sequences in 16 bits. Where there are fewer queries than keys it counts causal places from the end, and torch from the beginning."""
    fits = q.dtype in _HALVES and q.shape[3] == v.shape[3] <= 256 and q.shape[3] % 8 == 0
    return fits and min(q.shape[2], k.shape[2]) >= kernels.LONG and (not causal or q.shape[2] == k.shape[2])


def key_mask(mask: Tensor | None) -> Tensor | None:
    """B M, True = a real token → B 1 1 M for `attend`."""
    return None if mask is None else mask[:, None, None, :]


class SelfAttention(nn.Module):
    """Queries, keys and values from one sequence, by one matrix."""

    def __init__(
        self, width: int, heads: int, *, qk_norm: bool = True, dropout: float = 0.0, causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm_q = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.norm_k = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: Turn | None = None) -> Tensor:
        """x is B N D, mask is B N."""
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        q, k = self.norm_q(q), self.norm_k(k)
        if rotary is not None:
            q, k = rotary(q), rotary(k)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q.to(v.dtype), k, v, key_mask(mask), dropout, self.causal)
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another. Those of the other are its memory: made once, read by every sampling step."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        qk_norm: bool = True,
        dropout: float = 0.0,
        context_width: int | None = None,  # None: as wide as the queries' sequence
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(context_width or width, 2 * width, bias=False)
        self.norm_q = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.norm_k = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=False)

    def memory(self, context: Tensor) -> Memory:
        """Keys and values of a context, B M D."""
        k, v = rearrange(self.kv(context), "b m (two h d) -> two b h m d", two=2, h=self.heads)
        return self.norm_k(k).to(v.dtype), v

    def forward(self, x: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        """x is B N D, mask is B M."""
        q = rearrange(self.q(x), "b n (h d) -> b h n d", h=self.heads)
        k, v = memory
        mixed = attend(self.norm_q(q).to(v.dtype), k, v, key_mask(mask), self.dropout if self.training else 0.0)
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))
