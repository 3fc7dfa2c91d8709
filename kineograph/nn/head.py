"""Linear head with a chunked cross-entropy that never materialises all logits.

With 65,536 classes the logits dominate memory. They are computed a chunk of rows at a time, and in training each chunk's
gradient is computed in the forward pass, so memory is bounded by the hidden states and the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 26  # logits alive at a time: 128 MiB in bf16
CHUNK_ROWS = 1 << 11  # rows per chunk, at least: each chunk accumulates into the whole weight's gradient
_FP16_SCALE = 2.0**-6  # a sum over tens of thousands of rows with one target would pass fp16's largest number, 65,504


class HeadLoss(NamedTuple):
    """Weighted sums over rows."""

    loss: Tensor
    correct: Tensor  # rows whose argmax is the target


class Head(nn.Module):
    """Hidden states → logits. Linear without bias, so that guiding hidden states equals guiding logits."""

    def __init__(self, width: int, vocabulary: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        self.softmax = SoftmaxGradient(label_smoothing)
        self.reset()

    def reset(self) -> None:
        nn.init.normal_(self.weight, std=0.5 * self.weight.shape[1] ** -0.5)

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight)

    def chunks(self, rows: int) -> Iterator[slice]:
        """Slices of rows whose logits are computed together."""
        size = chunk_rows(rows, self.vocabulary)
        for start in range(0, rows, size):
            yield slice(start, min(start + size, rows))

    def forward(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> HeadLoss:
        """hidden is R D, targets R, weights R; rows of weight 0 are padding."""
        gradient = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        loss, correct = _LinearCrossEntropy.apply(hidden, self.weight, targets, weights.float(), self, gradient)
        return HeadLoss(loss, correct)


def chunk_rows(rows: int, vocabulary: int) -> int:
    """Rows per chunk; equal chunks where possible, so that kernels see one shape."""
    least = -(-rows // max(CHUNK_ELEMENTS // vocabulary, CHUNK_ROWS))
    for count in range(least, 2 * least + 1):
        if count and rows % count == 0:
            return rows // count
    return -(-rows // max(least, 1))


class SoftmaxGradient(nn.Module):
    """Cross-entropy of a chunk of logits and its gradient in float32. A module, so that it can be compiled.

    With smoothing ε the target distribution is y = (1 − ε) · onehot + ε / V; loss = Σ w (lse(x) − y·x), gradient = w (softmax(x) − y).
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(
        self, logits: Tensor, targets: Tensor, weights: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x = logits.float()  # R V
        total = x.logsumexp(dim=-1)
        chosen = x.gather(1, targets[:, None])[:, 0]
        loss = total - (1 - self.smoothing) * chosen
        if self.smoothing:
            loss = loss - self.smoothing * x.mean(dim=-1)
        correct = chosen >= x.amax(dim=-1)
        slope = None
        if gradient:
            hit = torch.arange(x.shape[1], device=x.device) == targets[:, None]  # R V
            slope = (x - total[:, None]).exp() - torch.where(hit, 1 - self.smoothing, 0.0) - self.smoothing / x.shape[1]
            slope = (slope * weights[:, None]).to(logits.dtype)
        return (loss * weights).sum(), (correct * weights).sum(), slope


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, head: Head, gradient: bool
    ) -> tuple[Tensor, Tensor]:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        rows, matrix = hidden.to(dtype), weight.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        correct = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(rows) if gradient else None
        grad_weight = None
        with torch.autocast(kind, enabled=False):
            for part in head.chunks(rows.shape[0]):
                logits = rows[part] @ matrix.T
                chunk_loss, chunk_correct, slope = head.softmax(logits, targets[part], weights[part], gradient)
                loss, correct = loss + chunk_loss, correct + chunk_correct
                if slope is not None and grad_hidden is not None:
                    torch.mm(slope, matrix, out=grad_hidden[part])
                    chunk_weight = _sum_outer_products(slope, rows[part])  # V D
                    grad_weight = (
                        chunk_weight.to(weight.dtype) if grad_weight is None else grad_weight.add_(chunk_weight)
                    )
        if gradient:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.hidden_dtype = hidden.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        slope = slopes[0]
        return (grad_hidden * slope).to(ctx.hidden_dtype), grad_weight * slope, None, None, None, None


def _sum_outer_products(slope: Tensor, rows: Tensor) -> Tensor:
    """slopeᵀ rows, R V and R D → V D"""
    if rows.dtype != torch.float16:
        return slope.T @ rows
    return (slope.T @ (rows * _FP16_SCALE)).float() / _FP16_SCALE
