"""The moving average: decay, every and start each do what they say; swapping leaves everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kineograph.train.config import EmaConfig
from kineograph.train.ema import Ema, swap_in_averages


def followed(steps: int, **keys) -> tuple[float, Ema]:
    """The average after a weight went 1, 2, 3, … from 0."""
    p = nn.Parameter(torch.zeros(1))
    ema = Ema({"p": p}, EmaConfig(**keys))
    for step in range(1, steps + 1):
        p.data.fill_(step)
        ema.update(step)
    return float(ema.average["p"]), ema


def by_hand(steps: int, decay: float, every: int = 1, start: int = 0) -> float:
    average, updates = 0.0, 0
    for step in range(1, steps + 1):
        if step <= start:
            average = step
        elif step % every == 0:
            updates += 1
            d = min(decay, (1 + updates) / (10 + updates))
            average = d * average + (1 - d) * step
    return average


@pytest.mark.parametrize(
    "keys",
    [
        {"decay": 0.5},
        {"decay": 0.9},
        {"decay": 0.9, "every": 3},
        {"decay": 0.9, "start": 7},
        {"decay": 0.99, "every": 4, "start": 10},
    ],
)
def test_the_average_is_the_one_by_hand(keys: dict) -> None:
    assert followed(40, **keys)[0] == pytest.approx(by_hand(40, **keys), rel=1e-5)


def test_averages_of_16_bit_weights_are_as_exact_as_any() -> None:
    half, whole = (nn.Parameter(torch.full((3,), 1.0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    both = [Ema({"p": p}, EmaConfig(decay=0.999)) for p in (half, whole)]
    for step in range(1, 200):
        for p, ema in zip((half, whole), both, strict=True):
            p.data.fill_(1.0 if step < 100 else 1.0078125)  # the next bf16
            ema.update(step)
    assert torch.equal(both[0].average["p"], both[1].average["p"])
    assert 1.0 < both[0].average["p"][0] < 1.0078125
    waiting = half.view_as(half).grad_fn.next_functions[0][0]  # where DDP hangs its hooks
    with swap_in_averages([both[0]]):
        assert half.dtype == torch.bfloat16 and torch.equal(half, both[1].average["p"].bfloat16())
    assert half.dtype == torch.bfloat16 and half[0] == 1.0078125
    assert half.view_as(half).grad_fn.next_functions[0][0] is waiting


def test_each_option_matters() -> None:
    results = {
        followed(40, **keys)[0]
        for keys in ({"decay": 0.6}, {"decay": 0.3}, {"decay": 0.6, "every": 3}, {"decay": 0.6, "start": 39})
    }
    assert len(results) == 4


def test_before_start_it_is_a_copy() -> None:
    assert followed(7, decay=0.9, start=7)[0] == 7.0
    assert followed(8, decay=0.9, start=7)[0] != 8.0


def test_the_ramp_ends_at_decay() -> None:
    _, ema = followed(5, decay=0.9)
    assert ema.decay == pytest.approx(6 / 15)
    _, ema = followed(200, decay=0.9)
    assert ema.decay == 0.9


def test_inside_the_parameters_hold_their_averages_and_afterwards_their_own() -> None:
    layer = nn.Linear(3, 2)
    ema = Ema(dict(layer.named_parameters()), EmaConfig(decay=0.5))
    copied = {name: value.clone() for name, value in ema.average.items()}
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(1)
    own = {name: p.detach().clone() for name, p in layer.named_parameters()}
    x = torch.ones(1, 3)
    outside = layer(x)
    with pytest.raises(ZeroDivisionError), swap_in_averages([ema]):
        assert all(torch.equal(p, copied[name]) for name, p in layer.named_parameters())
        assert not torch.allclose(layer(x), outside)
        raise ZeroDivisionError  # an error inside must not leave the averages in place
    assert all(torch.equal(p, own[name]) for name, p in layer.named_parameters())
    assert all(torch.equal(value, copied[name]) for name, value in ema.average.items())
    with torch.no_grad():
        layer.weight.add_(1)
    assert torch.equal(ema.average["weight"], copied["weight"])  # still apart


def test_weights_are_their_own_again_where_memory_ends_while_they_are_averaged() -> None:
    first, second = (nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0))
    average = Ema({"first": first, "second": second}, EmaConfig())
    average.average["first"].fill_(5.0)
    del average.average["second"]  # as if there were no room for it
    with pytest.raises(KeyError), swap_in_averages([average]):
        pass
    assert first.tolist() == [1.0, 1.0] and second.tolist() == [2.0, 2.0]
