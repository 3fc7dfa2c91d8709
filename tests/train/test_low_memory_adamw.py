"""AdamW in less memory: against plain AdamW in float32, word for word where nothing is rounded, and in what it learns where something is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kineograph.core.errors import InputError
from kineograph.train.config import PlayerConfig
from kineograph.train.low_memory_adamw import (
    BLOCK,
    FIRST,
    SECOND,
    LowMemoryState,
    dequantize,
    dither,
    join_float32,
    quantize,
    split_float32,
)
from kineograph.train.optim import Optimizer
from tests.train.test_optim import copy_state

KINDS = ["adamw_split", "adamw_8bit"]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 200), nn.Tanh(), nn.LayerNorm(200), nn.Linear(200, 30)).to(dtype)


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def learn(model: nn.Module, optimizer: Optimizer, steps: range, rate: float = 3e-3) -> list[float]:
    """A teacher's answers to random questions, the same for every model."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30))
    losses = []
    for step in steps:
        x = torch.randn(64, 40, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            y = teacher(x)
        dtype = next(model.parameters()).dtype
        loss = (model(x.to(dtype)).float() - y).square().mean(1).sum()
        loss.backward()
        optimizer.step(rate, torch.tensor(64.0))
        losses.append(loss.item() / 64)
    return losses


def config(kind: str, **keys) -> PlayerConfig:
    return PlayerConfig(**{"optimizer": kind, "lr": 3e-3, "weight_decay": 0.1, **keys})


# Split weights ---------------------------------------------------------------------------------------------------


def test_halves_are_the_nearest_bf16_and_join_to_the_same_bits() -> None:
    torch.manual_seed(0)
    value = torch.cat([torch.randn(10_000) * 10.0 ** torch.randint(-30, 30, (10_000,)), torch.tensor([0.0, -0.0, 1.0])])
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    value = torch.cat([value, ties])
    upper, low = split_float32(value)
    assert torch.equal(join_float32(upper, low).view(torch.int32), value.view(torch.int32))
    nearest = value.to(torch.bfloat16).float()
    assert torch.equal((upper.float() - value).abs(), (nearest - value).abs())


def test_split_weights_move_as_in_float32() -> None:
    """Given the same gradients, bit for bit; plain AdamW on bf16 weights loses steps as small as these."""
    torch.manual_seed(0)
    start = torch.randn(64, 80).bfloat16()
    models = [nn.Linear(80, 64, bias=False) for _ in range(3)]
    for model, dtype in zip(models, (torch.float32, torch.bfloat16, torch.bfloat16), strict=True):
        model.to(dtype).weight.data.copy_(start)
    kinds = ("adamw_split", "adamw_split", "adamw")
    optimizers = [
        Optimizer(named(m), config(kind, weight_decay=0.0, clip=None)) for m, kind in zip(models, kinds, strict=True)
    ]
    for step in range(100):
        gradient = torch.randn(64, 80, generator=torch.Generator().manual_seed(step)).bfloat16() + 1
        for model, optimizer in zip(models, optimizers, strict=True):
            model.weight.grad = gradient.to(model.weight.dtype)
            optimizer.step(1e-4, torch.tensor(1.0))
    whole, split, plain = (model.weight.detach() for model in models)
    low = optimizers[1].state()["low.weight"]
    assert torch.equal(join_float32(split, low), whole)
    assert (whole - start.float()).abs().min() > 1e-3
    assert (plain.float() - whole).abs().mean() > 4 * (split.float() - whole).abs().mean()


def test_without_rounding_it_is_adamw() -> None:
    one, two = network(), network()
    learn(one, Optimizer(named(one), config("adamw")), range(30))
    learn(two, Optimizer(named(two), config("adamw_split")), range(30))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


# 8-bit moments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FIRST, SECOND])
@pytest.mark.parametrize("shape", [(6, 256), (5, 200), (4, 7, 3, 3)])
def test_the_mean_over_steps_is_the_value(kind: tuple[int, int], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    value = torch.randn(shape) * torch.rand(shape) ** 3
    value = value if kind == FIRST else value**2
    found = []
    for step in range(400):
        numbers, scale = quantize(value, dither(torch.tensor(float(step)), value.device), *kind)
        assert numbers.shape == value.shape and numbers.abs().max() <= kind[0]
        found.append(dequantize(numbers, scale, *kind))
    mean = torch.stack(found).mean(0)
    largest = value.abs().flatten(1).amax(1)[(...,) + (None,) * (value.ndim - 1)]
    assert ((mean - value).abs() / largest).max() < 1e-3
    assert ((found[0] - value).abs() / largest).max() > 2e-3  # one step alone does round


def test_what_is_divided_by_is_never_lost() -> None:
    value = torch.ones(1, BLOCK)
    value[0, 1:] = 1e-20
    numbers, scale = quantize(value, dither(torch.tensor(3.0), value.device), *SECOND)
    assert (numbers[0, 1:] == 1).all() and scale == 1
    assert not quantize(torch.zeros(1, BLOCK), dither(torch.tensor(3.0), value.device), *SECOND)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_as_well_as_float32(dtype: torch.dtype) -> None:
    plain, lean = network(), network(dtype)
    wanted = learn(plain, Optimizer(named(plain), config("adamw")), range(150))
    found = learn(lean, Optimizer(named(lean), config("adamw_8bit")), range(150))
    assert sum(wanted[-20:]) < 0.3 * sum(wanted[:20])
    assert sum(found[-20:]) < 1.1 * sum(wanted[-20:])


def test_bytes_are_those_of_the_state() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for kind in KINDS:
            model = network(dtype)
            optimizer = Optimizer(named(model), config(kind))
            said = sum(map(optimizer.state_bytes, optimizer.parts))
            learn(model, optimizer, range(1))
            counts = 4 * len(named(model))
            assert said == sum(value.numel() * value.element_size() for value in optimizer.state().values()) - counts
    large = nn.Parameter(torch.zeros(1024, 1024, dtype=torch.bfloat16))
    assert LowMemoryState(large, eight_bits=True).bytes / large.numel() == pytest.approx(2 + 2 + 8 / BLOCK)
    assert LowMemoryState(large, eight_bits=False).bytes / large.numel() == 10


# Both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str) -> None:
    one, two = network(torch.bfloat16), network(torch.bfloat16)
    with_bad, without = (Optimizer(named(model), config(kind)) for model in (one, two))
    learn(one, with_bad, range(3))
    learn(two, without, range(3))
    for p in one.parameters():
        p.grad = torch.full_like(p, float("nan"))
    assert with_bad.step(1e-2, torch.tensor(1.0))[1] == 1
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all(torch.equal(value, with_bad.state()[name]) for name, value in without.state().items())
    assert all(p.grad is None for p in one.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_optimizer_goes_on_bit_for_bit(kind: str) -> None:
    one, two = network(torch.bfloat16), network(torch.bfloat16)
    first = Optimizer(named(one), config(kind))
    learn(one, first, range(4))
    two.load_state_dict(one.state_dict())
    second = Optimizer(dict(reversed(named(two).items())), config(kind))
    copy_state(dict(reversed(first.state().items())), second)
    learn(one, first, range(4, 8))
    learn(two, second, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    for strange in {"adamw", *KINDS} - {kind}:
        other = Optimizer(named(network(torch.bfloat16)), config(strange))
        with pytest.raises(InputError, match="resume with the optimizer that the run began with"):
            other.allocate(first.state())


@pytest.mark.parametrize("kind", KINDS)
def test_clip_and_decay_are_those_of_adamw(kind: str) -> None:
    one, two = network(), network()
    plain, lean = (
        Optimizer(named(m), config(k, clip=0.01, weight_decay=1.0)) for m, k in ((one, "adamw"), (two, kind))
    )
    learn(one, plain, range(5))
    learn(two, lean, range(5))
    for (name, a), b in zip(named(one).items(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3 if kind == "adamw_8bit" else 1e-6, rtol=1e-5, msg=name)
