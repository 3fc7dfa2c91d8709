import pytest
import torch
import torch.nn.functional as F

from kineograph.nn import head as module
from kineograph.nn.head import Head, chunk_rows


def case(rows: int = 37, width: int = 12, vocabulary: int = 50, smoothing: float = 0.0):
    torch.manual_seed(0)
    head = Head(width, vocabulary, smoothing)
    hidden = torch.randn(rows, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    weights = (torch.rand(rows) > 0.3).float()
    return head, hidden, targets, weights


def plain(head: Head, hidden, targets, weights, smoothing: float = 0.0):
    return (
        F.cross_entropy(hidden @ head.weight.T, targets, reduction="none", label_smoothing=smoothing) * weights
    ).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("elements", [1 << 27, 50 * 10, 50])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(monkeypatch, smoothing, elements):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    head, hidden, targets, weights = case(smoothing=smoothing)
    expected = plain(head, hidden, targets, weights, smoothing)
    wanted = torch.autograd.grad(expected * 0.3, [hidden, head.weight])
    found, correct = head(hidden, targets, weights)
    got = torch.autograd.grad(found * 0.3, [hidden, head.weight])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert correct == (((hidden @ head.weight.T).argmax(-1) == targets) * weights).sum()
    assert not correct.requires_grad


def test_the_sum_over_many_rows_with_one_target_does_not_overflow_in_fp16():
    head, hidden, _, _ = case(rows=40_000)
    hidden = hidden.detach() + 3  # like the hidden states of masked positions: alike at all of them
    targets = torch.zeros(len(hidden), dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head(hidden, targets, torch.ones(len(hidden))).loss
    loss.backward()
    (wanted,) = torch.autograd.grad(plain(head, hidden, targets, torch.ones(len(hidden))), head.weight)
    assert wanted.abs().max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(head.weight.grad, wanted, rtol=1e-2, atol=20.0)


def test_rows_of_weight_zero_do_not_count():
    head, hidden, targets, weights = case()
    first = head(hidden, targets, weights)
    changed = torch.where(weights[:, None] > 0, hidden, hidden + 7)
    second = head(changed, torch.where(weights > 0, targets, 0), weights)
    torch.testing.assert_close(first.loss, second.loss)


def test_bf16_autocast_is_close_and_gives_float32_gradients():
    head, hidden, targets, weights = case(width=64)
    expected = plain(head, hidden, targets, weights)
    wanted = torch.autograd.grad(expected, head.weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head(hidden, targets, weights).loss
    found.backward()
    assert found.dtype == torch.float32
    assert head.weight.grad.dtype == torch.float32
    assert float(((found - expected).abs() / expected).detach()) < 1e-2
    assert float((head.weight.grad - wanted).norm() / wanted.norm()) < 2e-2


def test_without_gradient_none_is_made(monkeypatch):
    head, hidden, targets, weights = case()
    asked = []
    inner = head.softmax.forward
    monkeypatch.setattr(head.softmax, "forward", lambda *a: asked.append(a[-1]) or inner(*a))
    with torch.no_grad():
        head(hidden, targets, weights)
    head(hidden, targets, weights)
    assert asked == [False, True]


def test_logits_of_one_chunk_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 50 * 10)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    head, hidden, targets, weights = case(rows=40)
    sizes = []
    inner = head.softmax.forward
    monkeypatch.setattr(head.softmax, "forward", lambda *a: sizes.append(tuple(a[0].shape)) or inner(*a))
    head(hidden, targets, weights)
    assert sizes == [(10, 50)] * 4


@pytest.mark.parametrize("rows", [1, 7, 64, 1000, 5888])
def test_chunks_cover_all_rows_within_the_limit(rows):
    size = chunk_rows(rows, 65536)
    assert 1 <= size <= module.CHUNK_ROWS
    assert sum(s.stop - s.start for s in Head(2, 65536).chunks(rows)) == rows
