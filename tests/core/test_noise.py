"""Keyed noise: a pure function of (seed, step, slot, name), whatever the layout; and good noise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from kineograph.core.noise import Noise, _mix, _signed, key_of, mix_int, numpy_rng

MANY = 1 << 16


def test_rows_do_not_depend_on_their_neighbours() -> None:
    whole = Noise.for_rows(3, 7, 12).normal("noise", 4, 5)
    for world in (1, 2, 3, 4):
        share = 12 // world
        parts = [Noise(3, 7, rank * share + torch.arange(share)).normal("noise", 4, 5) for rank in range(world)]
        assert torch.equal(torch.cat(parts), whole)
    shuffled = torch.randperm(12)
    assert torch.equal(Noise(3, 7, shuffled).normal("noise", 4, 5), whole[shuffled])
    assert torch.equal(Noise.for_rows(3, 7, 12).rows(5, 9).normal("noise", 4, 5), whole[5:9])


def test_rows_with_seeds_of_their_own_draw_as_if_alone() -> None:
    mixed = Noise(3, 7, torch.tensor([0, 1, 0]), [3, 3, 9])
    for noise, part in ((mixed, lambda noise: noise), (mixed, lambda noise: noise.keyed_by("window", 2))):
        drawn = part(noise).normal("noise", 4, 5)
        assert torch.equal(drawn[:2], part(Noise.for_rows(3, 7, 2)).normal("noise", 4, 5))
        assert torch.equal(drawn[2:], part(Noise.for_rows(9, 7, 1)).normal("noise", 4, 5))
    assert torch.equal(mixed.rows(1, 3).uniform("a"), mixed.uniform("a")[1:])


def test_shape_only_shapes_the_draws() -> None:
    noise = Noise.for_rows(0, 0, 3)
    assert torch.equal(noise.bits("a", 6), noise.bits("a", 2, 3).flatten(1))
    assert torch.equal(noise.bits("a", 4), noise.bits("a", 9)[:, :4])  # a longer clip begins like a shorter one
    assert noise.uniform("a").shape == (3,)


@pytest.mark.parametrize("other", [Noise.for_rows(4, 7, 1), Noise.for_rows(3, 8, 1), Noise(3, 7, 1 + torch.arange(1))])
def test_each_part_of_the_key_makes_independent_noise(other: Noise) -> None:
    one, two = Noise.for_rows(3, 7, 1).normal("a", MANY)[0], other.normal("a", MANY)[0]
    _uncorrelated(one, two)


def test_names_make_independent_noise() -> None:
    noise = Noise.for_rows(3, 7, 1)
    _uncorrelated(noise.normal("mask", MANY)[0], noise.normal("time", MANY)[0])


def test_stages_have_independent_noise() -> None:
    noise = Noise.for_rows(0, 0, 4)
    draws = [source.normal("x", 1000) for source in (noise, noise.keyed_by("base"), noise.keyed_by("superres"))]
    for a, b in itertools.combinations(draws, 2):
        assert abs(float((a * b).mean())) < 0.06
    assert torch.equal(draws[1][2:], noise.rows(2, 4).keyed_by("base").normal("x", 1000))


def test_neighbouring_slots_and_elements_are_independent() -> None:
    along_slots = Noise.for_rows(0, 0, MANY + 1).normal("a")
    _uncorrelated(along_slots[1:], along_slots[:-1])
    inside = Noise.for_rows(0, 0, 1).normal("a", MANY + 1)[0]
    _uncorrelated(inside[1:], inside[:-1])
    along_steps = torch.stack([Noise.for_rows(0, step, 64).normal("a")[:] for step in range(257)]).T.flatten()
    _uncorrelated(along_steps[1:], along_steps[:-1])


def _uncorrelated(one: torch.Tensor, two: torch.Tensor) -> None:
    """Linear and of the signs and sizes: five standard errors."""
    limit = 5 / math.sqrt(len(one))
    for change in (lambda x: x, torch.sign, torch.abs):
        assert abs(torch.corrcoef(torch.stack([change(one), change(two)]))[0, 1]) < limit


def test_no_two_keys_share_a_stream() -> None:
    seen = {
        int(Noise.for_rows(seed, step, 1).bits(name))
        for seed in range(20)
        for step in range(20)
        for name in ("a", "b", "c")
    }
    assert len(seen) == 1200
    assert Noise.for_rows(0, 0, 1000).bits("a", 1000).unique().numel() == 1_000_000


def test_uniform_is_uniform_and_open() -> None:
    u = Noise.for_rows(1, 1, 64).uniform("u", 1 << 14).double().flatten()
    n = len(u)
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    counts = torch.histc(u, 100, 0, 1)
    assert (counts - n / 100).square().sum() / (n / 100) < 99 + 5 * math.sqrt(2 * 99)  # χ²


def test_normal_has_the_moments() -> None:
    x = Noise.for_rows(1, 1, 64).normal("x", 1 << 14).double().flatten()
    n = len(x)
    assert x.isfinite().all()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(x.pow(power).mean() - expected) < 5 * math.sqrt(variance / n), power


def test_gumbel_max_samples_a_softmax() -> None:
    p = torch.tensor([0.1, 0.2, 0.7])
    draws = (p.log() + Noise.for_rows(0, 0, MANY).gumbel("g", 3)).argmax(-1)
    found = torch.bincount(draws, minlength=3) / MANY
    assert (found - p).abs().max() < 5 * 0.5 / math.sqrt(MANY)


def test_spread_numbers_leave_no_gap() -> None:
    """However many are taken: no share of [0, 1) longer than 3 / n is empty. A name shifts all of a step alike; without one steps agree."""
    for count in (5, 64, 1000):
        for first in (0, 77):
            found = Noise(1, 2, torch.arange(first, first + count)).spread("time").sort().values
            gaps = torch.cat([found, found[:1] + 1]).diff()
            assert found.min() >= 0 and found.max() < 1 and float(gaps.max()) < 3 / count
    steps = [Noise.for_rows(1, step, 8) for step in range(200)]
    apart = torch.stack([noise.spread("time") - noise.spread() for noise in steps]) % 1.0
    torch.testing.assert_close(apart, apart[:, :1].expand_as(apart))  # (0.9999… and 0 are neighbours: none falls there)
    assert abs(float(torch.stack([noise.spread("time")[0] for noise in steps]).mean()) - 0.5) < 0.06
    assert torch.equal(steps[0].spread(), steps[1].spread())


def test_integers_and_events() -> None:
    k = Noise.for_rows(0, 0, 8).integers("k", 7, 1 << 13).flatten()
    assert (int(k.min()), int(k.max())) == (0, 6)
    assert (torch.bincount(k) / len(k) - 1 / 7).abs().max() < 5 * math.sqrt(1 / 7 / len(k))
    noise = Noise.for_rows(0, 0, MANY)
    assert abs(noise.bernoulli("drop", 0.1).float().mean() - 0.1) < 5 * math.sqrt(0.09 / MANY)
    assert not noise.bernoulli("drop", 0.0).any()
    assert noise.bernoulli("drop", 1.0).all()


def test_tensor_and_integer_arithmetic_agree() -> None:
    values = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    mixed = _mix(torch.tensor([_signed(v) for v in values])).tolist()
    assert mixed == [_signed(mix_int(v)) for v in values]
    assert mix_int(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first output from seed 0


def test_order_of_key_parts_matters() -> None:
    keys = [key_of(*parts) for parts in ((1, 2), (2, 1), (1, "2"), (1,), (1, 2, 0), ("12",), (0, 1, 2))]
    assert len(set(keys)) == len(keys)


def test_numpy_generators_are_keyed() -> None:
    draws = [numpy_rng(1, 2, "crop").random(4) for _ in range(2)]
    assert np.array_equal(*draws)
    assert not np.array_equal(draws[0], numpy_rng(1, 3, "crop").random(4))


@pytest.mark.parametrize("bits", [0, (1 << 24) - 1])
def test_the_outermost_draws_are_inside_the_open_interval(monkeypatch, bits):
    noise = Noise.for_rows(0, 0, 3)
    monkeypatch.setattr(Noise, "bits", lambda self, name, *shape: torch.full((3, *shape), _signed(bits << 40)))
    assert noise.uniform("x", 4).min() > 0 and noise.uniform("x", 4).max() < 1
    assert torch.isfinite(noise.normal("x", 4)).all() and torch.isfinite(noise.gumbel("x", 4)).all()
