"""Saving and loading what each process holds: whole tensors, parts of FSDP2's, pieces of matrices that are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kineograph.core.errors import InputError
from kineograph.train.checkpoint import Checkpoint
from kineograph.train.dtensors import Cut, Piece, Sharded

Held = Tensor | Callable[[], Tensor]
"""A tensor that all processes have, a DTensor of which each has a part, or a function that puts a tensor together; all must call that one."""


def held(value: Tensor, piece: Piece) -> Held:
    """What the Saver gets of a tensor, or of the part of it that lies here."""
    if isinstance(value, DTensor):
        return value
    if isinstance(piece, Sharded):
        return piece.distributed(value.detach())
    if isinstance(
        piece, Cut
    ):  # its piece may be several boxes (queries, keys, values): it is saved whole, one at a time
        return partial(piece.whole, value.detach())
    return value


def whole(value: Held) -> Tensor:
    """Put together what all processes hold; each must ask."""
    if not isinstance(value, Tensor):
        return value()
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def read_into(saved: Checkpoint, kind: str, targets: Mapping[str, tuple[Tensor, Piece]]) -> None:
    """Copy saved values into the memory of these tensors; each process reads its own parts alone, save for what is cut."""
    shapes = saved.shapes(kind)
    straight: dict[str, Tensor] = {}
    cut: dict[str, tuple[Cut, Tensor]] = {}
    for name, (value, piece) in targets.items():
        if isinstance(piece, Cut):
            cut[name] = piece, torch.empty(shapes[name], dtype=value.dtype)
            continue
        target = held(value, piece)
        assert isinstance(target, Tensor)
        if tuple(target.shape) != shapes[name]:
            raise InputError(
                f"{saved.path}: {kind} {name} has shape {list(shapes[name])}, and this task needs {list(target.shape)}; "
                "load it with the config it was trained with"
            )
        straight[name] = target.detach()
    saved.fill(kind, straight)
    if cut:
        saved.fill(kind, {name: whole for name, (_, whole) in cut.items()})
        for name, (piece, whole) in cut.items():
            targets[name][0].detach().copy_(piece.part(whole))
