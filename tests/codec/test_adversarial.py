from __future__ import annotations

import pytest
import torch
from torch import nn

from kineograph.codec.adversarial import (
    PENALTY_STEP,
    AdversarialConfig,
    Discriminator,
    adaptive_weight,
    check_size,
    fooling,
    gradient_at,
    hinge,
    nudged,
    slope,
)
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(("channels", "height", "width", "levels"), [(1, 32, 48, 3), (4, 16, 8, 2), (3, 32, 32, 5)])
def test_one_logit_a_patch(channels, height, width, levels):
    judge = Discriminator(channels, AdversarialConfig(width=8, levels=levels))
    logits = judge(torch.randn(2, channels, height, width))
    assert logits.shape == (2, height // 2**levels, width // 2**levels)


def test_a_patch_is_judged_by_its_surroundings_and_no_batch_mate():
    judge = Discriminator(3, AdversarialConfig(width=8, levels=2))
    pictures = torch.randn(2, 3, 64, 64)
    changed = pictures.clone()
    changed[1] += 1.0
    changed[0, :, 60:, 60:] += 1.0
    apart = (judge(changed) - judge(pictures)).abs()
    assert apart[0, :8, :8].max() == 0
    assert apart[0, 15, 15] > 0
    assert apart[1].min() > 0


def test_too_many_levels_are_refused():
    check_size(AdversarialConfig(levels=3), 8, 8)
    with pytest.raises(ConfigError, match=r"adversarial.levels=5 .* use 3 or fewer"):
        check_size(AdversarialConfig(levels=5), 8, 64)


def test_hinge_and_fooling_by_hand():
    real, fake = torch.tensor([[[2.0, 0.5]]]), torch.tensor([[[-3.0, 0.25]]])
    assert hinge(real, fake) == pytest.approx(((0 + 0.5) / 2 + (0 + 1.25) / 2) / 2)
    assert fooling(fake) == pytest.approx(2.75 / 2)


def test_slope_of_a_linear_judge_is_its_gradient():
    weights = torch.randn(3, 8, 8)

    class Linear(nn.Module):
        def forward(self, x):
            return (x * weights).sum((1, 2, 3))[:, None, None]

    judge, real = Linear(), torch.rand(4000, 3, 8, 8)
    found = slope(judge(real), judge(nudged(real, Noise.for_rows(0, 0, 4000))))
    assert found.mean().item() == pytest.approx(weights.square().sum().item(), rel=0.1)


def test_slope_is_near_the_exact_penalty_and_descending_it_lowers_the_exact_one():
    judge = Discriminator(3, AdversarialConfig(width=8, levels=2))
    real = torch.randn(8, 3, 8, 8) / 2

    def exact() -> float:
        leaf = real.clone().requires_grad_()
        logits = judge(leaf)
        total = 0.0
        for y in range(2):
            for x in range(2):
                (gradient,) = torch.autograd.grad(logits[:, y, x].sum(), leaf, retain_graph=True)
                total = total + gradient.square().sum((1, 2, 3)) / 4
        return total.mean().item()

    def penalty(step: int) -> torch.Tensor:
        return slope(judge(real), judge(nudged(real, Noise.for_rows(0, step, 8)))).mean()

    before = exact()
    estimates = [penalty(step) for step in range(200)]
    assert torch.stack(estimates).mean().item() == pytest.approx(before, rel=0.25)
    optimizer = torch.optim.Adam(judge.parameters(), 1e-3)
    for step in range(20):
        optimizer.zero_grad()
        penalty(step).backward()
        optimizer.step()
    assert exact() < 0.7 * before


def test_nudges_are_keyed_by_sample_and_step():
    real = torch.randn(4, 1, 8, 8)
    together = nudged(real, Noise.for_rows(3, 5, 4))
    assert torch.equal(together[2:], nudged(real[2:], Noise.for_rows(3, 5, 2, first=2)))
    assert not torch.equal(together, nudged(real, Noise.for_rows(3, 6, 4)))
    assert torch.allclose((together - real).abs(), torch.tensor(PENALTY_STEP), atol=1e-6)
    clips = nudged(real.expand(4, 3, 8, 8).reshape(12, 1, 8, 8), Noise.for_rows(3, 5, 4))  # three frames a sample
    assert clips.shape == (12, 1, 8, 8)


def test_gradient_at_is_the_gradient_of_kept_samples():
    pictures = torch.randn(3, 2, 4, 4)
    keep = torch.tensor([1.0, 0.0, 1.0])
    value, gradient = gradient_at(pictures, lambda x: x.square().sum((1, 2, 3)), keep)
    assert torch.allclose(value, (pictures[0].square() + pictures[2].square()).sum())
    assert torch.allclose(gradient, 2 * pictures * keep[:, None, None, None])
    assert not value.requires_grad


def test_adaptive_weight_by_hand():
    layer = nn.Conv2d(1, 1, 1, bias=False)
    features = torch.tensor([[[[1.0, 2.0]]]])
    pictures = layer(features)
    reference, push = torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[0.0, -0.5]]]])
    # ∂/∂w Σ g·w·f = Σ g·f: 3·1 + 4·2 = 11 and −0.5·2 = −1
    assert adaptive_weight(pictures, layer.weight, reference, push, 1e4) == pytest.approx(11.0)
    assert adaptive_weight(pictures, layer.weight, reference, push, 5.0) == 5.0
    silent = adaptive_weight(pictures, layer.weight, reference, torch.zeros_like(push), 7.0)
    assert silent == 7.0
    assert not silent.requires_grad
    pictures.sum().backward()  # the graph is still there
    assert layer.weight.grad == 3.0
