"""A stepper's tensors as one process would have them."""

from __future__ import annotations

from torch import Tensor

from kineograph.train.dtensors import full_tensor
from kineograph.train.stepper import Stepper


def gather_state(stepper: Stepper) -> dict[str, dict[str, Tensor]]:
    """Every tensor that the next step depends on; every process must call this."""
    state = stepper.local_state()
    return {kind: {name: full_tensor(value) for name, value in tensors.items()} for kind, tensors in state.items()}
