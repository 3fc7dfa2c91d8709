"""Which tensors a computation makes: to see that none of them is larger than it should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        return out


@contextmanager
def made_tensors() -> Iterator[list[tuple[torch.dtype, tuple[int, ...]]]]:
    """Types and shapes of all that is made inside, views too, once the block has ended."""
    found: list[tuple[torch.dtype, tuple[int, ...]]] = []
    with _Watch() as watch:
        yield found
    found += [(tensor.dtype, tuple(tensor.shape)) for tensor in watch.made]
