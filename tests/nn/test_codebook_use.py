from __future__ import annotations

import math

import pytest
import torch

from kineograph.core import distributed
from kineograph.nn.codebook_use import codebook_histogram, describe_targets, token_limits


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


def test_targets_are_those_of_all_processes_without_padding(monkeypatch):
    tokens = torch.randint(0, 4, (4, 50), generator=torch.Generator().manual_seed(0))
    keep = torch.arange(50) < torch.tensor([50, 30, 1, 20])[:, None]
    padded = tokens.where(keep, 7)  # a code that no real token has
    expected = describe_targets(tokens[keep], 8)
    assert all(
        torch.equal(mean.value(), expected[name].value()) for name, mean in describe_targets(padded, 8, keep).items()
    )
    other = codebook_histogram(tokens[2:][keep[2:]], 8)
    monkeypatch.setattr(distributed, "all_reduce_", lambda counts: counts + other)  # another process has the rest
    found = describe_targets(padded[:2], 8, keep[:2].float())
    assert all(torch.equal(mean.value(), expected[name].value()) for name, mean in found.items())
    spare = describe_targets(padded[:2], 8, keep[:2], spare=True)
    assert int(spare["tokens/distinct"].sum) == int((other > 0).sum())
