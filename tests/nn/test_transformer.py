from __future__ import annotations

import pytest
import torch

from kineograph.nn.transformer import Transformer, TransformerConfig


@pytest.mark.parametrize(
    ("residual", "precision", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("fp32", torch.bfloat16, torch.float32),
        ("auto", torch.float16, torch.float32),
        ("auto", None, torch.float32),
    ],
)
def test_blocks_add_up_in_the_type_that_is_asked_for(residual, precision, expected):
    network = Transformer(TransformerConfig(width=32, heads=2, depth=2, residual=residual))
    seen = []
    for block in network.blocks:
        block.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        network(torch.randn(1, 3, 32))
    assert seen == [expected] * 2
