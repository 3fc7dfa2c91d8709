"""How a transformer block can be cut over processes that hold it together: what its layers are to one another, by their names in it.

A block says this beside its layers; who cuts it, and when, is decided outside (train/tensor_parallel.py, train/sequence_parallel.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class ParallelPlan:
    columns: Mapping[str, int]
    """Linear layers whose outputs may be computed apart, and how many equal things each one's outputs are: 3 for queries, keys and values."""
    rows: tuple[str, ...]
    """Linear layers whose inputs are those outputs; what they give is a sum over the parts."""
    heads: tuple[str, ...]
    """Modules with a number of `heads`, which come from those columns."""
    inside: tuple[str, ...] = ()
    """Modules with weights between columns and rows, that see some heads only: norms of queries and keys."""
    mixes: tuple[str, ...] = field(default=())
    """Those of `heads` in which the block's own tokens look at one another; all else works on each token alone."""
    along: tuple[int, ...] = (0,)
    """Which of the block's arguments have its tokens as their second axis; the first of them is what the blocks pass on."""


@runtime_checkable
class HasParallelPlan(Protocol):
    def splits(self) -> ParallelPlan: ...
