"""Attention. Every network calls `attend`, the one function that chooses a kernel."""

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


RotaryFn = Callable[[Tensor], Tensor]  # rotates queries or keys, B h N d, by their positions

_BACKENDS_WITH_DROPOUT = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_flash = torch.ops.aten._scaled_dot_product_flash_attention
MAX_SEQUENCES = 65_535
"""Batch size limit of fused kernels: it is the second axis of a CUDA grid. Attention over time has h · w sequences a clip."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / √d) v by torch's fused kernels. q is B h N d, k and v are B h M d.

    `mask` is bool, True where a query attends to a key, broadcastable to B h N M; each query needs at least one key.
    A bool mask cannot overflow in half precision. `causal` excludes `mask`.
    """
    if q.shape[0] > MAX_SEQUENCES:
        parts = [slice(start, start + MAX_SEQUENCES) for start in range(0, q.shape[0], MAX_SEQUENCES)]
        seen = [mask if mask is None or mask.shape[0] == 1 else mask[rows] for rows in parts]
        return torch.cat([attend(q[rows], k[rows], v[rows], keys, dropout, causal) for rows, keys in zip(parts, seen)])
    k, v = k.to(q.dtype), v.to(q.dtype)
    if kernels.flash3 and q.is_cuda:
        if dropout:  # FlashAttention 3 has none
            with sdpa_kernel(_BACKENDS_WITH_DROPOUT):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        if mask is None and _fits_flash3(q, k, v, causal):
            return _flash(q, k, v, 0.0, causal)[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)


def _fits_flash3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether FlashAttention 3 applies: long 16-bit sequences. With N ≠ M its causal mask is aligned differently from torch's."""
    fits = q.dtype in _HALF_DTYPES and q.shape[3] == v.shape[3] <= 256 and q.shape[3] % 8 == 0
    return fits and min(q.shape[2], k.shape[2]) >= kernels.LONG and (not causal or q.shape[2] == k.shape[2])


def key_mask(mask: Tensor | None) -> Tensor | None:
    """Padding mask B M (True = real token) → B 1 1 M for `attend`."""
    return None if mask is None else mask[:, None, None, :]


class SelfAttention(nn.Module):
    """Self-attention with a fused qkv projection."""

    def __init__(
        self, width: int, heads: int, *, qk_norm: bool = True, dropout: float = 0.0, causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm_q = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.norm_k = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: RotaryFn | None = None) -> Tensor:
        """x is B N D, mask is B N."""
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        q, k = self.norm_q(q), self.norm_k(k)
        if rotary is not None:
            q, k = rotary(q), rotary(k)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q.to(v.dtype), k, v, key_mask(mask), dropout, self.causal)
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))


class CrossAttention(nn.Module):
    """Cross-attention. The context's keys and values (`memory`) are computed once and reused by every sampling step."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        qk_norm: bool = True,
        dropout: float = 0.0,
        context_width: int | None = None,  # None: `width`
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(context_width or width, 2 * width, bias=False)
        self.norm_q = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.norm_k = norm_layer("rms", width // heads) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=False)

    def memory(self, context: Tensor) -> Memory:
        """Keys and values of a context, B M D → 2 × B h M d."""
        k, v = rearrange(self.kv(context), "b m (two h d) -> two b h m d", two=2, h=self.heads)
        return self.norm_k(k).to(v.dtype), v

    def forward(self, x: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        """x is B N D, mask is B M."""
        q = rearrange(self.q(x), "b n (h d) -> b h n d", h=self.heads)
        k, v = memory
        mixed = attend(self.norm_q(q).to(v.dtype), k, v, key_mask(mask), self.dropout if self.training else 0.0)
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))
