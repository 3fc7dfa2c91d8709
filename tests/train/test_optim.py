"""One player's optimizer: AdamW on the mean loss, clipped, skipping what is not finite, restored by name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from kineograph.core.device_copy import fetch_floats
from kineograph.core.errors import InputError
from kineograph.train.config import PlayerConfig
from kineograph.train.optim import LossScale, Optimizer, learning_rate_at


def copy_state(state: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Load a saved state, as a checkpoint does."""
    for key, value in optimizer.allocate(state).items():
        value.copy_(state[key])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 1))


def sums(model: nn.Module, step: int, count: int = 12) -> torch.Tensor:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(step))
    return (model(x)[:, 0] - 3 * x[:, 0]).square().sum()


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("clip", [None, 0.5])
def test_parity_with_plain_adamw_on_the_mean(clip: float | None) -> None:
    """Gradients of sums over 12 samples, divided by 12 inside the step = AdamW on the mean with clip_grad_norm_."""
    config = PlayerConfig(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-7, clip=clip)
    ours, plain = network(), network()
    optimizer = Optimizer(named(ours), config)
    decays = [p for p in plain.parameters() if p.ndim >= 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-7,
    )
    for step in range(20):
        sums(ours, step).backward()
        norm, skipped = optimizer.step(3e-3, torch.tensor(12.0))
        (sums(plain, step) / 12).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip if clip is not None else float("inf"))
        reference.step()
        reference.zero_grad()
        assert torch.allclose(norm, expected, rtol=1e-4)
        assert skipped == 0
        if clip is not None and step == 0:
            assert norm > clip  # the clip does something here
    for a, b in zip(ours.parameters(), plain.parameters()):
        assert torch.allclose(a, b, atol=2e-6)
    assert all(p.grad is None for p in ours.parameters())


def test_vectors_do_not_decay() -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in named(model).items()}
    optimizer = Optimizer(named(model), PlayerConfig(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1, torch.tensor(1.0))
    changed = {name for name, p in named(model).items() if not torch.equal(p, before[name])}
    assert changed == {"0.weight", "3.weight"}
    assert torch.allclose(model[0].weight, before["0.weight"] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    """Not the weights, not the moments, not the count of steps: the next good step is as if it had not been."""
    one, two = network(), network()
    with_bad, without = (Optimizer(named(model), PlayerConfig(lr=1e-2)) for model in (one, two))
    for step in range(3):
        for model, optimizer in ((one, with_bad), (two, without)):
            sums(model, step).backward()
            assert optimizer.step(1e-2, torch.tensor(12.0))[1] == 0
        sums(one, 99).backward()
        one[0].weight.grad[0, 0] = bad
        _, skipped = with_bad.step(1e-2, torch.tensor(12.0))
        assert skipped == 1
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
        assert all(torch.equal(with_bad.state()[key], value) for key, value in without.state().items())


def test_a_count_of_zero_is_skipped() -> None:
    model = network()
    before = model[0].weight.detach().clone()
    sums(model, 0).backward()
    _, skipped = Optimizer(named(model), PlayerConfig(lr=1e-2)).step(1e-2, torch.tensor(0.0))
    assert skipped == 1
    assert torch.equal(model[0].weight, before)


def test_moments_are_restored_by_name_whatever_the_order() -> None:
    one, two = network(), network()
    first = Optimizer(named(one), PlayerConfig(lr=1e-2))
    for step in range(4):
        sums(one, step).backward()
        first.step(1e-2, torch.tensor(12.0))
    two.load_state_dict(one.state_dict())
    second = Optimizer(dict(reversed(named(two).items())), PlayerConfig(lr=1e-2))
    copy_state(dict(reversed(first.state().items())), second)
    for step in range(4, 8):
        for model, optimizer in ((one, first), (two, second)):
            sums(model, step).backward()
            optimizer.step(1e-2, torch.tensor(12.0))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert first.state().keys() == second.state().keys()


def test_moments_of_a_stranger_are_refused() -> None:
    optimizer = Optimizer(named(network()), PlayerConfig())
    with pytest.raises(InputError, match=r"other\.weight"):
        optimizer.allocate(["exp_avg.other.weight"])


def test_schedules() -> None:
    def rates(**keys) -> list[float]:
        config = PlayerConfig(lr=1.0, warmup=4, **keys)
        return [learning_rate_at(config, step, 12) for step in range(13)]

    assert rates()[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(schedule="linear", final_lr=0.2)[4] == 1.0
    assert rates(schedule="linear", final_lr=0.2)[12] == pytest.approx(0.2)
    assert rates(schedule="linear")[8] == pytest.approx(0.5)
    cosine = rates(schedule="cosine", final_lr=0.1)
    assert cosine[8] == pytest.approx(0.55)
    assert cosine[12] == pytest.approx(0.1)
    assert cosine[4:] == sorted(cosine[4:], reverse=True)
    assert learning_rate_at(PlayerConfig(lr=1.0, warmup=0), 0, 10) == 1.0


def test_the_loss_scale_halves_and_grows() -> None:
    scale = LossScale(torch.device("cpu"), start=8.0, patience=3)
    history = []
    for overflow in (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0):
        scale.update(torch.tensor(overflow))
        history.append(float(scale.value))
    assert history == [4, 4, 4, 8, 8, 8, 4, 4]
    other = LossScale(torch.device("cpu"))
    other.load(fetch_floats(scale.state()))
    assert (float(other.value), float(other.good)) == (4, 1)


# Taking up -------------------------------------------------------------------------------------------------------


def test_moments_of_what_is_not_trained_are_named() -> None:
    optimizer = Optimizer({"a": nn.Parameter(torch.ones(2, 3))}, PlayerConfig())
    with pytest.raises(InputError, match="moments of b, which this task does not train"):
        optimizer.allocate(["step.a", "exp_avg.b"])
    with pytest.raises(InputError, match="has exp_avg_scale, step of a, which does not fit optimizer=adamw"):
        optimizer.allocate(["step.a", "exp_avg_scale.a"])
