"""Activation checkpointing (`train.checkpointing`): recompute a block's activations in the backward pass."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# Every kernel that scaled_dot_product_attention may choose.
_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
}
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
# Keep the output of a matmul whose output width is at most this multiple of its input width: a narrow output costs
# little memory for much work. In a transformer, 0.5 keeps the MLP's down projection, 3 all but its up projection.
_MAX_WIDTH_RATIO = {"selective": 0.5, "light": 3.0}
_log = logging.getLogger("torch._higher_order_ops.wrap")


def _choose_policy(max_ratio: float, context: Any, operator: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    """Save the outputs of attention and of narrow matmuls; recompute the rest."""
    if operator in _MATMULS:
        input_width, output_width = inputs[-1].shape  # of the right-hand matrix
        save = output_width <= max_ratio * input_width
    else:
        save = operator in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(block: nn.Module, mode: str | None = None) -> None:
    """Make `block` recompute its activations in the backward pass. `mode`: None for all, `selective` or `light` for some."""
    forward = block.forward
    options: dict[str, Any] = {}
    if mode is not None:
        _log.setLevel(logging.ERROR)  # it warns of in-place changes, and a block has none
        policy = partial(_choose_policy, _MAX_WIDTH_RATIO[mode])
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def checkpointed_forward(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return torch.utils.checkpoint.checkpoint(forward, *inputs, use_reentrant=False, **options, **named)

    block.forward = checkpointed_forward  # type: ignore[method-assign]
