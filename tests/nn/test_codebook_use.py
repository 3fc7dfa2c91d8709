from __future__ import annotations

import math

import pytest
import torch

from kineograph.nn.codebook_use import describe_targets, token_limits


def describe(tokens: torch.Tensor, codes: int = 64) -> dict[str, float]:
    return {name: float(mean.value()) for name, mean in describe_targets(tokens, codes).items()}


def test_tokens_that_are_all_the_same():
    found = describe(torch.full((4, 16), 7))
    assert found == {"tokens/distinct": 1.0, "tokens/entropy": 0.0}
    assert [limit.name for limit in token_limits(0.0) if limit.check(found)] == ["constant_tokens"]


def test_the_entropy_of_a_sample_is_that_of_the_source():
    """Without the correction it would be too low by 0.12 nats."""
    tokens = torch.randint(64, (256,), generator=torch.Generator().manual_seed(0))
    assert describe(tokens)["tokens/entropy"] == pytest.approx(math.log(64), abs=0.03)
    uneven = torch.tensor([0] * 900 + [1] * 100)
    expected = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert describe(uneven)["tokens/entropy"] == pytest.approx(expected, abs=1e-3)


def test_too_few_tokens_say_nothing_about_frequencies():
    found = describe(torch.arange(32))
    assert found["tokens/distinct"] == 32 and math.isnan(found["tokens/entropy"])
    assert not any(limit.check(found | {"train/cross_entropy": 9.0}) for limit in token_limits(0.0))


def test_smoothed_labels_are_not_compared_with_frequencies():
    values = {"tokens/distinct": 9.0, "tokens/entropy": 2.0, "train/cross_entropy": 2.0}
    assert [limit.name for limit in token_limits(0.0) if limit.check(values)] == ["only_frequencies"]
    assert not any(limit.check(values) for limit in token_limits(0.1))
