"""Sequences drawn one token at a time: what is drawn, from what, and that it does not depend on how it is cut up."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kineograph.core.noise import Noise
from kineograph.nn.nearby import NearbyAttention, Window
from kineograph.nn.token_shift import TokenShift
from kineograph.process.autoregression import AutoregressiveSampler, draw_top_p

VOCABULARY, BOS = 11, 11


def noise(rows: int = 3, seed: int = 0, first: int = 0) -> Noise:
    return Noise(seed, 0, first + torch.arange(rows))


def flat(tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A step that has no opinion."""
    return torch.zeros(len(tokens), VOCABULARY, device=tokens.device)


def follow(tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The token after k is k + 1, that after BOS is 0."""
    return 50 * nn.functional.one_hot((tokens[:, 0] + 1) % (BOS + 1) % VOCABULARY, VOCABULARY).float()


class Net(nn.Module):
    """Two layers with all that a cache must keep; `whole` is the pass without one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY + 1, 16)
        self.shift = TokenShift()
        self.layers = nn.ModuleList(NearbyAttention(16, 2, Window((2, 3, 3), d)) for d in (1, 2))
        self.head = nn.Linear(16, VOCABULARY)

    def whole(self, tokens: torch.Tensor, grid, caches=None) -> torch.Tensor:
        x = self.tokens(tokens)
        for n, layer in enumerate(self.layers):
            shifts, keys = caches[n] if caches else (None, None)
            x = x + layer(self.shift(x, grid, shifts), grid, cache=keys)
        return self.head(x)

    def caches(self, rows: int, grid, frames: int):
        device = self.head.weight.device
        return [
            (
                self.shift.cache(rows, 16, grid, dtype=torch.float32, device=device),
                layer.cache(rows, grid, frames=frames),
            )
            for layer in self.layers
        ]

    def stepper(self, caches):
        def step(tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens)
            for (shifts, keys), layer in zip(caches, self.layers):
                x = x + layer.step(self.shift.step(x, index, shifts), index, keys)
            return self.head(x[:, 0])

        return step


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def test_each_token_is_drawn_after_the_one_before():
    assert AutoregressiveSampler(follow, 5, noise(2), bos=BOS).run().tolist() == [[0, 1, 2, 3, 4]] * 2


def test_given_tokens_stay_and_are_followed():
    given = torch.tensor([[7, 3], [1, 9]])
    wanted = [[7, 3, 4, 5], [1, 9, 10, 0]]
    assert AutoregressiveSampler(follow, 4, noise(2), bos=BOS, prefix=given).run().tolist() == wanted
    assert AutoregressiveSampler(follow, 4, noise(2), bos=BOS, prefix=given, start=2).run().tolist() == wanted


def test_positions_are_counted_on_the_device_from_the_start():
    seen = []

    def step(tokens, index):
        seen.append((index.item(), tokens[:, 0].tolist()))
        return follow(tokens, index)

    AutoregressiveSampler(step, 4, noise(1), bos=BOS, prefix=torch.tensor([[5, 2]]), start=1).run()
    assert seen == [(1, [5]), (2, [2]), (3, [3])]


def test_a_drawing_starts_again_in_its_buffers():
    drawing = AutoregressiveSampler(flat, 12, noise(2), bos=BOS)
    whole = AutoregressiveSampler(flat, 18, noise(2), bos=BOS).run()
    before = drawing.tokens.data_ptr()
    assert torch.equal(drawing.run(), whole[:, :12])
    drawing.restart(whole[:, 6:12], start=6, offset=6)
    assert drawing.remaining == 6
    assert torch.equal(drawing.run(), whole[:, 6:])
    assert drawing.tokens.data_ptr() == before
    drawing.restart()
    assert torch.equal(drawing.run(), whole[:, :12])


def test_draws_belong_to_sample_and_place():
    whole = AutoregressiveSampler(flat, 20, noise(4), bos=BOS).run()
    parts = [AutoregressiveSampler(flat, 20, noise(2, first=first), bos=BOS).run() for first in (0, 2)]
    assert torch.equal(torch.cat(parts), whole)
    late = AutoregressiveSampler(flat, 8, noise(4), bos=BOS, offset=12).run()
    assert torch.equal(late, whole[:, 12:])
    longer = AutoregressiveSampler(flat, 30, noise(4), bos=BOS)
    assert torch.equal(longer.run(7)[:, :7], whole[:, :7]) and longer.remaining == 23
    assert torch.equal(longer.run()[:, :20], whole)
    assert not torch.equal(AutoregressiveSampler(flat, 20, noise(4, seed=1), bos=BOS).run(), whole)
    assert len(whole.unique()) == VOCABULARY


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("top_p", [None, 0.6, 0.95])
def test_nucleus_draws_from_the_cut_distribution(temperature, top_k, top_p):
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.9, -3.0])
    order = logits.argsort(descending=True)[:top_k]
    chances = (logits[order] / temperature).softmax(0)
    count = next(n for n in range(1, len(order) + 1) if chances[:n].sum() >= (top_p or 1) - 1e-6)
    wanted = torch.zeros(6).scatter(0, order[:count], chances[:count] / chances[:count].sum())
    draws = 20_000
    uniforms = (torch.arange(draws) + 0.5) / draws
    tokens = draw_top_p(logits.expand(draws, 6), uniforms, temperature, top_k, top_p)
    torch.testing.assert_close(tokens.bincount(minlength=6) / draws, wanted, atol=1e-3, rtol=0)


def test_a_nucleus_is_never_empty():
    logits = torch.tensor([[5.0, 5.0, -9.0]])
    assert draw_top_p(logits, torch.tensor([0.99]), top_p=1e-6).item() in (0, 1)
    assert draw_top_p(torch.tensor([[0.0, 3.0]]), torch.tensor([0.99]), temperature=0, top_p=0.1).item() == 1


def test_options_of_the_choice_arrive():
    torch.manual_seed(0)
    logits = torch.randn(VOCABULARY)
    best = logits.argsort(descending=True)

    def step(tokens, index):
        return logits.expand(len(tokens), -1)

    def drawn(**options) -> set[int]:
        return set(AutoregressiveSampler(step, 150, noise(4), bos=BOS, **options).run().unique().tolist())

    assert drawn(temperature=0) == {best[0].item()}
    assert drawn(top_k=3) == set(best[:3].tolist())
    assert len(drawn(top_p=0.5)) < len(drawn()) == VOCABULARY


def test_cached_drawing_is_the_uncached():
    """The likeliest token, found with the whole pass over the prefix each time; the prefix's frames by one pass into the cache."""
    grid, net = (4, 2, 3), make_net()
    count = math.prod(grid)
    wanted = torch.full((2, count + 1), BOS)
    wanted[:, 1:7] = torch.tensor([[1, 5, 2, 7, 7, 0], [3, 3, 9, 10, 1, 4]])
    for i in range(6, count):
        wanted[:, i + 1] = net.whole(wanted[:, :count], grid)[:, i].argmax(-1)
    given = wanted[:, 1:7]
    for start in (0, 6):
        caches = net.caches(2, grid, frames=4)
        if start:
            net.whole(wanted[:, :6], (1, 2, 3), caches)
        drawing = AutoregressiveSampler(
            net.stepper(caches), count, noise(2), bos=BOS, prefix=given, start=start, temperature=0
        )
        assert torch.equal(drawing.run(), wanted[:, 1:])


def test_a_long_clip_in_a_ring_is_the_long_clip():
    net, grid = make_net(), (2, 2, 3)
    long = (12, 2, 3)
    count = math.prod(long)
    tokens = AutoregressiveSampler(net.stepper(net.caches(2, grid, frames=12)), count, noise(2), bos=BOS).run()
    logits = net.whole(torch.cat([torch.full((2, 1), BOS), tokens[:, :-1]], dim=1), long)
    uniforms = noise(2).uniform("tokens", count)
    assert torch.equal(draw_top_p(logits, uniforms), tokens)


@pytest.mark.gpu
def test_a_replayed_graph_draws_what_single_steps_draw():
    net = make_net().cuda()
    grid, count = (2, 3, 3), 54
    options = {"bos": BOS, "top_k": 8, "top_p": 0.9, "prefix": torch.tensor([[1, 2], [3, 4]]).cuda()}
    rows = Noise.for_rows(0, 0, 2, device="cuda")
    graph = AutoregressiveSampler(net.stepper(net.caches(2, grid, frames=6)), count, rows, **options)
    graph.run(10)
    graph.run()
    single = AutoregressiveSampler(net.stepper(net.caches(2, grid, frames=6)), count, rows, **options)
    with torch.no_grad():
        for _ in range(count):
            single.advance()
    assert graph.index.item() == single.index.item() == count
    assert torch.equal(graph.tokens, single.tokens)
