"""Nearby attention against a slow reference in Python loops, its caches against the whole pass, token shift likewise."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import nn

from kineograph.core.errors import ConfigError
from kineograph.nn.nearby import NearbyAttention, Window, nearby_attend, nearby_mask
from kineograph.nn.nearby_flex import count_touched_blocks, find_best_order, flex_nearby, make_order, tile_order
from kineograph.nn.positions import Rotation, grid_positions
from kineograph.nn.token_shift import TokenShift
from kineograph.nn.window import Neighbours, grid_coordinates
from tests.nn.made_tensors import made_tensors

CASES = [
    ((3, 4, 4), Window((2, 3, 3))),
    ((5, 3, 7), Window((3, 3, 5))),
    ((2, 3, 3), Window((5, 7, 9))),  # wider than the grid
    ((5, 5, 6), Window((2, 3, 3), 2)),
    ((6, 5, 5), Window((2, 3, 3), 4)),
    ((3, 1, 5), Window((2, 1, 3))),
    ((4, 1, 1), Window((2, 1, 1))),
    ((1, 4, 4), Window((1, 3, 3))),
    ((2, 2, 2), Window((1, 1, 1))),  # BOS alone
]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def sees(i: int, position: int, grid, window: Window) -> bool:
    """The definition, place by place."""
    if position == 0:
        return True
    k = position - 1
    _, rows, columns = grid
    d = window.dilation
    there = (k // (rows * columns), k // columns % rows, k % columns)
    here = (i // (rows * columns), i // columns % rows, i % columns)
    t, y, x = (a - b for a, b in zip(here, there))
    return (
        k < i
        and t in [n * d for n in range(window.size[0])]
        and y in [n * d for n in range(-(window.size[1] // 2), window.size[1] // 2 + 1)]
        and x in [n * d for n in range(-(window.size[2] // 2), window.size[2] // 2 + 1)]
    )


def reference_mask(grid, window: Window) -> torch.Tensor:
    count = math.prod(grid)
    return torch.tensor([[sees(i, position, grid, window) for position in range(count)] for i in range(count)])


def reference(q, k, v, grid, window: Window, mask=None) -> torch.Tensor:
    """softmax over the visible positions, one query after the other."""
    out = []
    for b, i in product(range(q.shape[0]), range(q.shape[2])):
        seen = [p for p in range(q.shape[2]) if sees(i, p, grid, window) and (mask is None or p == 0 or mask[b, p])]
        scores = torch.einsum("hd,hpd->hp", q[b, :, i], k[b, :, seen]) / math.sqrt(q.shape[3])
        out.append(torch.einsum("hp,hpd->hd", scores.softmax(-1), v[b, :, seen]))
    return torch.stack(out).reshape(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


# Geometry -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "window"), CASES)
def test_mask_is_the_definition(grid, window):
    assert torch.equal(nearby_mask(grid, window), reference_mask(grid, window))


def test_a_row_start_does_not_see_the_end_of_the_row_before():
    grid, window = (2, 4, 6), Window((2, 3, 3))
    mask = nearby_mask(grid, window)
    start = 2 * 6  # t 0, y 2, x 0
    assert not mask[start, start]  # position 12 holds token 11, the end of row 1
    assert mask[start, 6 + 1] and mask[start, 7 + 1]  # above, and above to the right


def test_earlier_frames_are_seen_on_all_sides():
    grid, window = (2, 3, 3), Window((2, 3, 3))
    middle = 9 + 4
    assert set(nearby_mask(grid, window)[middle].nonzero()[:, 0].tolist()) == {0, *range(1, 10), *range(10, 14)}


def test_a_window_over_everything_is_causal():
    grid = (3, 2, 3)
    assert Window((3, 3, 5)).covers(grid) and not Window((2, 3, 5)).covers(grid)
    assert not Window((3, 3, 5), 2).covers(grid)
    assert torch.equal(nearby_mask(grid, Window((3, 3, 5))), nearby_mask(grid, None))


def test_places_go_on_beyond_the_grid():
    assert torch.equal(grid_coordinates(torch.arange(24), (2, 3, 2)), grid_positions((4, 3, 2)))


@pytest.mark.parametrize(
    ("size", "dilation"), [((0, 3, 3), 1), ((5, 2, 3), 1), ((5, 3, 4), 1), ((5, 3, -1), 1), ((5, 3, 3), 0)]
)
def test_windows_without_a_middle_are_refused(size, dilation):
    with pytest.raises(ConfigError, match="use"):
        Window(size, dilation)


# All places at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("grid", "window"), CASES)
def test_dense_is_the_reference_in_values_and_gradients(grid, window, masked):
    count = math.prod(grid)
    mask = (draw(2, count) > -0.3) if masked else None
    found, wanted = [], []
    for call, results in ((nearby_attend, found), (reference, wanted)):
        q, k, v = (draw(2, 2, count, 8 + n)[..., :8].clone().requires_grad_() for n in range(3))
        out = call(q, k, v, grid, window, mask)
        (out * draw(*out.shape)).sum().backward()
        results += [out, q.grad, k.grad, v.grad]
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("grid", "window", "masked", "block"),
    [
        ((6, 4, 6), Window((3, 3, 3)), False, 16),
        ((5, 5, 6), Window((2, 3, 3), 2), True, 16),
        ((6, 5, 5), Window((2, 3, 3), 4), False, 16),
    ],
)
def test_flex_is_dense(grid, window, masked, block):
    """In the order that touches the fewest blocks; on a CPU forward alone."""
    count = math.prod(grid)
    q, k, v = (draw(2, 2, count, 16 + n)[..., :16] for n in range(3))
    mask = (draw(2, count) > -0.3) if masked else None
    dense = nearby_attend(q, k, v, grid, window, mask, backend="dense")
    order = make_order(grid, window, "cpu", block)
    assert not torch.equal(order.queries, torch.arange(count))
    torch.testing.assert_close(flex_nearby(q, k, v, grid, window, mask, order), dense, atol=2e-5, rtol=1e-4)


def test_a_better_order_touches_fewer_blocks():
    """What the head of nearby_flex says of the size that nuwa-base has."""
    grid = (10, 16, 16)
    for dilation, few, raster in ((1, 96, 169), (2, 63, 129), (4, 47, 81)):
        window = Window((5, 3, 3), dilation)
        tokens, seen = Neighbours.build(grid, window).visible(torch.arange(2560))
        pairs = (seen.nonzero()[:, 0], tokens[seen])
        order = find_best_order(grid, window)
        assert torch.equal(order.sort().values, torch.arange(2560))
        assert count_touched_blocks(order, pairs, 128) == few
        assert count_touched_blocks(torch.arange(2560), pairs, 128) == raster


def test_tiles_go_by_residue_first():
    order = tile_order((1, 4, 4), 2, (1, 2, 2))
    assert order.tolist() == [0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15]
    assert tile_order((2, 2, 4), 1, (2, 2, 2)).tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]


@pytest.mark.filterwarnings("ignore")
def test_flex_traces_whole_once_a_grid():
    """Compiled networks meet several grids; one more must not make the others compile anew."""
    from torch._dynamo.testing import CompileCounter

    windows = [Window((2, 3, 3), dilation) for dilation in (1, 2)]

    def network(x: torch.Tensor, grid) -> torch.Tensor:
        for window in windows:
            x = flex_nearby(x, x, x, grid, window)
        return x

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(network, backend=counter, dynamic=False, fullgraph=True)
    with torch.no_grad():
        x = draw(1, 1, 36, 16)
        for grid in ((4, 3, 3), (1, 6, 6), (4, 3, 3)):
            dense = x
            for window in windows:
                dense = nearby_attend(dense, dense, dense, grid, window)
            torch.testing.assert_close(compiled(x, grid), dense)
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_dense_traces_whole_with_gradients():
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(NearbyAttention(16, 2, Window((2, 3, 3), d)) for d in (1, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x, (2, 3, 3))
            return x

    network, x, grads = Network(), draw(1, 18, 16), []
    for call in (network, torch.compile(network, backend="aot_eager", dynamic=False, fullgraph=True)):
        network.zero_grad()
        call(x).square().sum().backward()
        grads.append(network.layers[0].qkv.weight.grad.clone())
    torch.testing.assert_close(*grads)
    torch._dynamo.reset()


def test_a_mask_first_met_in_sampling_serves_training():
    attention, grid = NearbyAttention(16, 2, Window((2, 3, 5))), (2, 4, 7)
    with torch.inference_mode():
        attention(draw(1, 56, 16), grid)
    attention(draw(1, 56, 16), grid).sum().backward()
    assert attention.qkv.weight.grad.isfinite().all()


def test_reordering_has_the_inverse_as_gradient():
    from kineograph.nn.nearby_flex import _Reorder

    x = draw(1, 2, 6, 3).double().requires_grad_()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.autograd.gradcheck(lambda x: _Reorder.apply(x, order, order.argsort()), (x,))


def test_bf16_stays_finite_under_autocast():
    attention = NearbyAttention(16, 2, Window((2, 3, 3)), qk_norm=False)
    x = (draw(2, 18, 16) * 100).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x, (2, 3, 3), mask=draw(2, 18) > 0)
    out.float().square().mean().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_nothing_later_reaches_a_place():
    grid = (2, 3, 3)
    for window in (Window((2, 3, 3)), None):
        attention = NearbyAttention(16, 2, window)
        x = draw(1, 18, 16)
        before = attention(x, grid)
        changed = x.clone()
        changed[:, 7] += 1
        moved = (attention(changed, grid) - before).abs().amax(dim=(0, 2)) > 0
        assert not moved[:7].any() and moved[7:].any()


def test_dropout_is_for_training_alone():
    attention = NearbyAttention(16, 2, Window((2, 3, 3)), dropout=0.5)
    x = draw(1, 18, 16)
    assert not torch.equal(attention(x, (2, 3, 3)), attention(x, (2, 3, 3)))
    attention.eval()
    assert torch.equal(attention(x, (2, 3, 3)), attention(x, (2, 3, 3)))


def test_keys_and_values_are_never_copied_for_every_place():
    """A window of 5 × 3 × 3 unfolded is 45 copies of them; the fused projection is the largest tensor there is."""
    attention, x = NearbyAttention(64, 4, Window((5, 3, 3))), draw(2, 96, 64)
    with made_tensors() as made:
        attention(x, (6, 4, 4)).sum().backward()
    assert max(math.prod(shape) for _, shape in made) <= 3 * x.numel()


# One place at a time --------------------------------------------------------------------------------------------------


def turns(index: torch.Tensor, grid, width: int):
    """Queries where they look, keys where their token lies."""
    return tuple(Rotation.at_positions(grid_coordinates(i, grid), width) for i in (index, (index - 1).clamp(min=0)))


@pytest.mark.parametrize(("grid", "window"), [*CASES, ((3, 3, 3), None)])
def test_steps_with_a_cache_are_the_whole_pass(grid, window):
    count = math.prod(grid)
    attention = NearbyAttention(16, 2, window).eval()
    x = draw(2, count, 16)
    with torch.no_grad():
        whole = attention(x, grid, turns(torch.arange(count), grid, 8))
        cache = attention.cache(2, grid)
        cache.keys.fill_(1e4)  # what is not visible must not matter
        for i in range(count):
            index = torch.tensor([i])
            out = attention.step(x[:, i : i + 1], index, cache, turns(index, grid, 8))
            torch.testing.assert_close(out[:, 0], whole[:, i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dilation", [1, 2])
def test_a_ring_goes_on_for_ever(dilation):
    """The window looks back (t − 1) · dilation frames: a ring of one more gives what a cache of the whole clip gives, and the whole pass."""
    long, window = (9, 3, 2), Window((2, 3, 3), dilation)
    attention = NearbyAttention(16, 2, window).eval()
    x = draw(2, math.prod(long), 16)
    with torch.no_grad():
        whole = attention(x, long)
        ring = attention.cache(2, (4, 3, 2), frames=100)
        assert ring.keys.shape[2] == 1 + (dilation + 1) * 6
        for i in range(x.shape[1]):
            out = attention.step(x[:, i : i + 1], torch.tensor([i]), ring)
            torch.testing.assert_close(out[:, 0], whole[:, i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [Window((2, 3, 3)), Window((2, 3, 3), 2), Window((4, 3, 3)), None])
@pytest.mark.parametrize("given", [1, 3, 5])
def test_a_filled_cache_goes_on_where_the_given_frames_end(window, given):
    grid = (6, 2, 3)
    attention = NearbyAttention(16, 2, window).eval()
    x = draw(2, 36, 16)
    with torch.no_grad():
        whole = attention(x, grid)
        cache = attention.cache(2, grid)
        start = given * 6
        attention(x[:, :start], (given, 2, 3), cache=cache)
        for i in range(start, 36):
            out = attention.step(x[:, i : i + 1], torch.tensor([i]), cache)
            torch.testing.assert_close(out[:, 0], whole[:, i], atol=1e-4, rtol=1e-4)


def test_layers_of_one_window_share_what_was_located():
    attention = NearbyAttention(16, 2, Window((2, 3, 3))).eval()
    x = draw(1, 1, 16)
    with torch.no_grad():
        one, other = attention.cache(1, (2, 3, 3)), attention.cache(1, (2, 3, 3))
        out = attention.step(x, torch.tensor([4]), one)
        assert torch.equal(attention.step(x, one.locate(torch.tensor([4])), other), out)


def test_a_cache_has_the_type_that_is_computed_in():
    attention = NearbyAttention(16, 2, Window((2, 3, 3)))
    assert attention.cache(1, (2, 3, 3)).keys.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        cache = attention.cache(1, (2, 3, 3))
        assert cache.keys.dtype == torch.bfloat16
        assert attention.step(draw(1, 1, 16), torch.tensor([0]), cache).isfinite().all()


# Token shift ----------------------------------------------------------------------------------------------------------

GRIDS = [(3, 3, 4), (2, 1, 3), (3, 4, 1), (4, 1, 1), (1, 3, 3)]


@pytest.mark.parametrize("grid", GRIDS)
def test_shift_takes_the_neighbours_of_the_place(grid):
    count, width = math.prod(grid), 10  # quarters of 2, and 4 that stay
    x = draw(2, count, width)
    wanted = x.clone()
    frame = grid[1] * grid[2]
    for i in range(count):
        t, y, column = i // frame, i // grid[2] % grid[1], i % grid[2]
        wanted[:, i, 0:2] = x[:, i - frame + 1, 0:2] if t else 0  # token k is at position k + 1
        wanted[:, i, 2:4] = x[:, i - grid[2] + 1, 2:4] if y else 0
        wanted[:, i, 4:6] = x[:, i, 4:6] if column else 0
    assert torch.equal(TokenShift()(x, grid), wanted)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("given", [0, 1])
def test_shift_step_by_step_is_the_whole(grid, given):
    """Beyond the given frames too, and without knowing how many there will be."""
    long = (grid[0] + 2, grid[1], grid[2])
    count, shift = math.prod(long), TokenShift()
    x = draw(2, count, 12)
    whole = shift(x, long)
    cache = shift.cache(2, 12, grid, dtype=torch.float32)
    start = given * grid[1] * grid[2]
    if start:
        assert torch.equal(shift(x[:, :start], (given, grid[1], grid[2]), cache), whole[:, :start])
    for i in range(start, count):
        assert torch.equal(shift.step(x[:, i : i + 1], torch.tensor([i]), cache)[:, 0], whole[:, i])


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_flex_is_the_reference_on_a_gpu(masked):
    for grid, window in (((5, 8, 8), Window((3, 3, 3))), ((5, 7, 9), Window((3, 3, 3), 2))):
        count = math.prod(grid)
        mask = (draw(2, count) > -0.3).cuda() if masked else None
        results = []
        for backend in ("flex", "dense"):
            call = torch.compile(nearby_attend, dynamic=False) if backend == "flex" else nearby_attend
            q, k, v = (draw(2, 2, count, 32 + n)[..., :32].cuda().requires_grad_() for n in range(3))
            out = call(q, k, v, grid, window, mask, backend=backend)
            (out * draw(*out.shape).cuda()).sum().backward()
            results.append([out, q.grad, k.grad, v.grad])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)  # TF32 products
