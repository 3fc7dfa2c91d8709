"""How a transformer block is split over processes: the role of each layer, by its name in the block.

A block declares its plan beside its layers. train/tensor_parallel.py and train/sequence_parallel.py apply it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class ParallelPlan:
    column_layers: Mapping[str, int]
    """Linear layers split by output channels, and how many equal tensors each one stacks in its output: 3 for queries, keys and values."""
    row_layers: tuple[str, ...]
    """Linear layers split by input channels, which are outputs of the column layers; their outputs are summed over processes."""
    attentions: tuple[str, ...]
    """Attention modules between column and row layers; each has a number of `heads`."""
    head_norms: tuple[str, ...] = ()
    """Norms of queries and keys, whose weights all heads share."""
    self_attentions: tuple[str, ...] = ()
    """Those `attentions` that mix the block's own tokens; everything else in the block treats each token alone."""
    token_arguments: tuple[int, ...] = (0,)
    """Positions of the block's arguments that are B N …; the first is the hidden state that each block passes to the next."""


@runtime_checkable
class HasParallelPlan(Protocol):
    def parallel_plan(self) -> ParallelPlan: ...
