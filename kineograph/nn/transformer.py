"""A pre-norm transformer: self-attention, optional cross-attention to a context, gated MLP."""

from __future__ import annotations

from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from kineograph.core.config import Config
from kineograph.core.parallel_plan import ParallelPlan
from kineograph.nn.attention import CrossAttention, Memory, RotaryFn, SelfAttention
from kineograph.nn.norms import Norm, norm_layer
from kineograph.nn.positions import Rotary

Residual = Literal["auto", "fp32"]


class BlockConfig(Config):
    """Options shared by all transformer blocks of a network."""

    width: int = Field(512, ge=2, le=65536)
    """Channels of the residual stream."""
    heads: int = Field(8, ge=1, le=65536)
    """Attention heads; each is width / heads wide."""
    mlp: Literal["geglu", "gelu"] = "geglu"
    """geglu: gated, two thirds as wide, so that both have the same number of parameters."""
    mlp_ratio: float = Field(4.0, gt=0)
    """Width of the MLP's hidden layer in units of `width`."""
    norm: Norm = "rms"
    """Normalisation before each sublayer."""
    qk_norm: bool = True
    """Normalise queries and keys, which bounds the attention logits."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on attention weights and on each sublayer's output."""
    residual: Residual = "auto"
    """Dtype of the residual stream. auto: bf16 under bf16 autocast, half the memory traffic; fp32: always."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} must be a multiple of 2 × heads = {2 * self.heads} (rotary positions pair channels)"
            )
        return self


class TransformerConfig(BlockConfig):
    depth: int = Field(8, ge=1, le=1000)
    """Number of blocks."""


class Mlp(nn.Module):
    def __init__(self, width: int, ratio: float, kind: Literal["geglu", "gelu"]) -> None:
        super().__init__()
        self.gated = kind == "geglu"
        share = 2 / 3 if self.gated else 1
        inner = max(8, round(width * ratio * share / 8) * 8)  # multiples of 8 suit tensor cores
        self.up = nn.Linear(width, 2 * inner if self.gated else inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if not self.gated:
            return self.down(F.gelu(hidden, approximate="tanh"))
        value, gate = hidden.chunk(2, dim=-1)
        return self.down(value * F.gelu(gate, approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: BlockConfig, cross: bool, causal: bool = False) -> None:
        super().__init__()
        self.norm_attention = norm_layer(config.norm, config.width)
        self.attention = SelfAttention(
            config.width, config.heads, qk_norm=config.qk_norm, dropout=config.dropout, causal=causal
        )
        self.norm_cross = norm_layer(config.norm, config.width) if cross else None
        self.cross = (
            CrossAttention(config.width, config.heads, qk_norm=config.qk_norm, dropout=config.dropout)
            if cross
            else None
        )
        self.norm_mlp = norm_layer(config.norm, config.width)
        self.mlp = Mlp(config.width, config.mlp_ratio, config.mlp)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,  # B N D
        mask: Tensor | None = None,  # B N
        rotary: RotaryFn | None = None,
        context: Tensor | None = None,  # B M D
        context_mask: Tensor | None = None,  # B M
        memory: Memory | None = None,  # instead of `context`: its keys and values
    ) -> Tensor:
        x = x + self.drop(self.attention(self.norm_attention(x), mask, rotary))
        if self.cross is not None:
            if memory is None:
                assert context is not None
                memory = self.cross.memory(context)
            assert self.norm_cross is not None
            x = x + self.drop(self.cross(self.norm_cross(x), memory, context_mask))
        return x + self.drop(self.mlp(self.norm_mlp(x)))

    def parallel_plan(self) -> ParallelPlan:
        columns = {"attention.qkv": 3, "mlp.up": 2 if self.mlp.gated else 1}
        rows, attentions = ["attention.out", "mlp.down"], ["attention"]
        if self.cross is not None:
            columns |= {"cross.q": 1, "cross.kv": 2}
            rows.append("cross.out")
            attentions.append("cross")
        norms = tuple(f"{name}.{norm}" for name in attentions for norm in ("norm_q", "norm_k"))
        return ParallelPlan(columns, tuple(rows), tuple(attentions), norms, self_attentions=("attention",))


def cast_residual(x: Tensor, kind: Residual) -> Tensor:
    """Cast the residual stream to bf16 under bf16 autocast. fp16 would overflow: it stays in float32."""
    device = x.device.type
    if kind == "fp32" or not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.bfloat16:
        return x
    return x.to(torch.bfloat16)


class Transformer(nn.Module):
    """B N D → B N D with a final norm. `rotary` is for a fixed grid; for clips of many sizes pass it to `forward`."""

    def __init__(
        self, config: TransformerConfig, *, cross: bool = False, rotary: Rotary | None = None, causal: bool = False
    ) -> None:
        super().__init__()
        self.rotary, self.residual = rotary, config.residual
        self.blocks = nn.ModuleList(Block(config, cross, causal) for _ in range(config.depth))
        self.norm = norm_layer(config.norm, config.width)
        init_weights(self, config.depth)

    def memory(self, context: Tensor) -> list[Memory]:
        """Keys and values of a context for every block."""
        return [cast(CrossAttention, block.cross).memory(context) for block in self.blocks]

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        memory: list[Memory] | None = None,
        rotary: RotaryFn | None = None,
    ) -> Tensor:
        rotary = self.rotary if rotary is None else rotary
        x = cast_residual(x, self.residual)
        for index, block in enumerate(self.blocks):
            x = block(x, mask, rotary, context, context_mask, memory[index] if memory is not None else None)
        return self.norm(x)


def init_weights(module: nn.Module, depth: int) -> None:
    """Initialise linear layers with variance 1 / fan-in (1 / (3 · depth) of that where they write into the residual stream,
    whose size is then independent of depth), embeddings with variance 1 / width, biases with 0."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            writes = name.rpartition(".")[2] in ("out", "down")
            nn.init.normal_(part.weight, std=(part.in_features * (3 * depth if writes else 1)) ** -0.5)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=part.embedding_dim**-0.5)
