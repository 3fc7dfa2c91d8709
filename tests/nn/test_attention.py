import math

import pytest
import torch
from torch import nn

from kineograph.nn import attention
from kineograph.nn.attention import CrossAttention, SelfAttention, attend
from kineograph.nn.positions import LearnedPositions, Rotary, SincosPositions, grid_positions
from kineograph.nn.transformer import Transformer, TransformerConfig


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_attend_is_masked_softmax():
    q, k, v = draw(2, 3, 5, 8), draw(2, 3, 7, 8), draw(2, 3, 7, 4 * 2)
    mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[..., 0] = True
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(attend(q, k, v, mask), scores.softmax(-1) @ v)


def test_attend_in_half_precision_stays_finite_under_a_mask():
    q, k, v = (draw(1, 2, 4, 8).bfloat16() * 30 for _ in range(3))
    mask = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    mask[..., 1] = True
    out = attend(q, k, v, mask)
    assert out.isfinite().all()
    torch.testing.assert_close(out, v[:, :, 1:2].expand_as(out))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4)])
def test_rotary_products_depend_on_offsets_alone(shape):
    rotary = Rotary(shape, head_width=24)
    count = math.prod(shape)
    q, k = (draw(1, 1, 1, 24 + extra)[..., :24].expand(1, 1, count, 24) for extra in (0, 1))
    products = (rotary(q) @ rotary(k).transpose(-1, -2))[0, 0]
    places = grid_positions(shape)
    offsets = places[:, None] - places[None]
    seen: dict[tuple, float] = {}
    for i in range(count):
        for j in range(count):
            key = tuple(offsets[i, j].tolist())
            assert products[i, j] == pytest.approx(seen.setdefault(key, float(products[i, j])), abs=1e-4)
    assert len({round(value, 3) for value in seen.values()}) > len(seen) // 2  # every axis counts
    torch.testing.assert_close(rotary(q).norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize("kind", [LearnedPositions, SincosPositions])
def test_added_positions_tell_all_places_apart(kind):
    table = kind((2, 3, 4), 32)()
    assert table.shape == (24, 32)
    assert (torch.cdist(table, table) + torch.eye(24)).min() > 1e-3


def test_learned_positions_sum_their_axes():
    positions = LearnedPositions((2, 3), 4)
    rows, columns = positions.tables
    torch.testing.assert_close(positions()[1 * 3 + 2], rows[1] + columns[2])


def test_padding_keys_change_nothing():
    attention = SelfAttention(16, 2)
    x = draw(2, 6, 16)
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    changed = x.clone()
    changed[:, 4:] += 5
    torch.testing.assert_close(attention(x, mask)[:, :4], attention(changed, mask)[:, :4])


def test_memory_is_the_context():
    torch.manual_seed(0)
    net = Transformer(TransformerConfig(width=32, depth=2, heads=4), cross=True)
    x, context = draw(2, 5, 32), draw(2, 3, 32)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    torch.testing.assert_close(
        net(x, context=context, context_mask=mask), net(x, context_mask=mask, memory=net.memory(context))
    )


def test_queries_and_keys_are_normalised_only_when_asked():
    for qk_norm, same in ((True, True), (False, False)):
        torch.manual_seed(0)
        attention = CrossAttention(16, 2, qk_norm=qk_norm)
        x, context = draw(1, 3, 16), draw(1, 4, 16)
        before = attention(x, attention.memory(context))
        with torch.no_grad():
            attention.q.weight.mul_(10)
        assert torch.allclose(before, attention(x, attention.memory(context)), atol=1e-5) == same


def test_dropout_acts_in_training_alone():
    torch.manual_seed(0)
    net = Transformer(TransformerConfig(width=32, depth=1, heads=4, dropout=0.5))
    x = draw(1, 5, 32)
    assert not torch.equal(net(x), net(x))
    net.eval()
    torch.testing.assert_close(net(x), net(x))
    quiet = Transformer(TransformerConfig(width=32, depth=1, heads=4))
    torch.testing.assert_close(quiet(x), quiet(x))


@pytest.mark.parametrize(("key", "value"), [("mlp", "gelu"), ("norm", "layer"), ("mlp_ratio", 2.0), ("depth", 1)])
def test_each_option_changes_the_network(key, value):
    def out(**keys):
        torch.manual_seed(0)
        return Transformer(TransformerConfig(**{"width": 32, "depth": 2, "heads": 4, **keys}))(draw(1, 5, 32) + 1)

    assert not torch.allclose(out(), out(**{key: value}), atol=1e-3)


def test_gated_and_plain_mlps_weigh_the_same():
    def weight(kind: str) -> int:
        return sum(
            p.numel() for p in Transformer(TransformerConfig(width=512, depth=1, heads=8, mlp=kind)).parameters()
        )

    assert weight("geglu") == pytest.approx(weight("gelu"), rel=0.01)


def test_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"width=30.*16"):
        TransformerConfig(width=30, heads=8)


def test_residual_stream_keeps_its_size_at_any_depth():
    for depth in (2, 24):
        torch.manual_seed(0)
        net = Transformer(TransformerConfig(width=64, depth=depth, heads=4))
        x, kept = draw(2, 16, 64), []
        net.norm.register_forward_pre_hook(lambda module, inputs, kept=kept: kept.append(inputs[0]))
        net(x)
        assert 0.8 < float(kept[0].detach().std()) < 2.5
    assert isinstance(net.blocks, nn.ModuleList)


@pytest.mark.parametrize("masked", [None, "each", "one"])
def test_more_sequences_than_a_kernel_takes_are_cut(monkeypatch, masked):
    q, k, v = (draw(10, 2, 5, 4) for _ in range(3))
    mask = {None: None, "each": torch.rand(10, 1, 1, 5) > 0.5, "one": torch.rand(1, 1, 1, 5) > 0.5}[masked]
    if mask is not None:
        mask[..., 0] = True
    whole = attention.attend(q, k, v, mask, causal=masked is None)
    calls = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, *rest, **named: (calls.append(q.shape[0]), kernel(q, *rest, **named))[1],
    )
    monkeypatch.setattr(attention, "MAX_SEQUENCES", 4)
    assert torch.allclose(attention.attend(q, k, v, mask, causal=masked is None), whole, atol=1e-6)
    assert calls == [4, 4, 2]
