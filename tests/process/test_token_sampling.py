import math

import pytest
import torch

from kineograph.core.noise import Noise
from kineograph.process.guidance import guidance_scale_at, make_guided
from kineograph.process.token_sampling import cumulative_sum, draw_tokens, top_k_blockwise


@pytest.mark.parametrize("classes", [2, 13, 16, 1000, 96])
def test_draws_follow_the_softmax(classes):
    logits = torch.randn(classes, generator=torch.Generator().manual_seed(0)) * 1.5
    count = 60_000
    u = (torch.arange(count) + 0.5) / count  # evenly spaced: the counts must match the distribution closely
    tokens, log_probability = draw_tokens(logits.expand(count, -1), u)
    found = torch.bincount(tokens, minlength=classes) / count
    torch.testing.assert_close(found, logits.softmax(0), atol=5e-4, rtol=0)
    torch.testing.assert_close(log_probability, logits.log_softmax(0)[tokens])


def test_temperature_and_top_k():
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 2
    u = (torch.arange(50_000) + 0.5) / 50_000
    rows = logits.expand(50_000, -1)
    cold = torch.bincount(draw_tokens(rows, u, temperature=0.5)[0], minlength=64) / 50_000
    torch.testing.assert_close(cold, (logits / 0.5).softmax(0), atol=1e-3, rtol=0)
    tokens, log_probability = draw_tokens(rows, u, top_k=5)
    few = torch.bincount(tokens, minlength=64) / 50_000
    kept = logits.topk(5).indices
    expected = torch.zeros(64).scatter(0, kept, logits[kept].softmax(0))
    torch.testing.assert_close(few, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(log_probability, logits.log_softmax(0)[tokens])
    assert torch.equal(draw_tokens(rows[:4], u[:4], temperature=0.0)[0], logits.argmax().expand(4))


def test_classes_of_no_weight_are_never_drawn():
    logits = torch.full((100,), -math.inf)
    logits[[0, 37, 99]] = 0.0
    for u in (2.0**-25, 1 - 2.0**-24, 1 / 3, 2 / 3, 0.5):
        assert int(draw_tokens(logits, torch.tensor(u))[0]) in (0, 37, 99)


@pytest.mark.parametrize(("classes", "k"), [(65536, 100), (1000, 20), (64, 5), (65536, 1), (17, 9)])
def test_top_classes_by_blocks_are_the_top_classes(classes, k):
    logits = torch.randn(3, 2, classes, generator=torch.Generator().manual_seed(2))
    values, places = top_k_blockwise(logits, k)
    torch.testing.assert_close(values, logits.topk(k).values)
    torch.testing.assert_close(logits.gather(-1, places), values)


def test_one_draw_of_a_large_vocabulary_is_exact_in_float32():
    logits = torch.zeros(65536)
    u = Noise.for_rows(0, 0, 1).uniform("u", 512)[0]
    tokens = draw_tokens(logits.expand(512, -1), u)[0]
    assert int((tokens - (u.double() * 65536).floor()).abs().max()) <= 1


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 5, 7)])
def test_cumulative_sums_where_torch_refuses_cumsum(monkeypatch, shape, warn_only):
    inner = torch.Tensor.cumsum

    def refuse(self, dim):  # as on a GPU
        assert not torch.are_deterministic_algorithms_enabled()
        assert self.numel() > self.shape[dim], "a single row"
        return inner(self, dim)

    values = torch.rand(shape)
    wanted = values.cumsum(-1)
    monkeypatch.setattr(torch.Tensor, "cumsum", refuse)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        found = cumulative_sum(values)
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, wanted)


def test_guidance_in_one_batch_is_two_passes():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    wanted, other = torch.randn(3, 4), torch.randn(3, 4)
    calls = []

    def denoise(x, step):
        calls.append(len(x))
        return net(x) * torch.cat([wanted, other])

    x = torch.randn(3, 4)
    found = make_guided(denoise, lambda step: 2.5)(x, 0)
    a, b = net(x) * wanted, net(x) * other
    torch.testing.assert_close(found, b + 2.5 * (a - b))
    assert calls == [6]


def test_guidance_schedules():
    assert [guidance_scale_at(4.0, step, 4) for step in range(4)] == [4.0] * 4
    assert [guidance_scale_at(4.0, step, 4, "linear") for step in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert guidance_scale_at(4.0, 0, 1, "linear") == 4.0
