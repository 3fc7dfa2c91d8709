"""Sketch conditioning: the window of a position, padding, no sketch, and samples that follow their sketch."""

import pytest
import torch
from einops import rearrange, repeat
from torch import Tensor

from kineograph.core.batch import Batch, Prompts
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.task import freeze
from kineograph.family.nuwa import Nuwa, NuwaSample
from kineograph.family.nuwa.sketch import SketchProjection, SketchWindow, find_window_tokens

from .conftest import CAPTIONS, FRAMES, SIDE, PatchCodec, batch_of, train

PLACES = SIDE * SIDE
LEVELS = 4


@pytest.fixture
def sketched(make):
    """A NUWA whose sketches have 2 channels and 4 levels."""

    def build(patch: int = 4, **keys) -> Nuwa:
        stages = {"outlines": freeze(PatchCodec(vocabulary=LEVELS, patch=patch))}
        return make(stages=stages, sketch="outlines", **keys)

    return build


def sketches(rows: int, frames: int = FRAMES, seed: int = 0) -> Tensor:
    """B T 2 H W uint8."""
    levels = torch.randint(0, LEVELS, (rows, frames, SIDE, SIDE), generator=torch.Generator().manual_seed(seed)) * 85
    return repeat(levels, "b t h w -> b t 2 (h p) (w q)", p=4, q=4).to(torch.uint8)


def with_sketch(rows: int = 4, seed: int = 0) -> Batch:
    batch = batch_of(rows, seed=seed)
    batch.extra["sketch"] = sketches(rows, seed=seed)
    return batch


def hidden(nuwa, batch):
    condition = nuwa.encode_batch(batch)
    return nuwa.network(nuwa.get_tokens(batch).flatten(1), *condition)


@pytest.mark.parametrize("grid", [(3, 4, 5), (1, 3, 3)])
@pytest.mark.parametrize("window", [(3, 3, 3), (1, 5, 1)])
def test_the_window_is_centred_on_the_position(grid, window):
    indices, inside = find_window_tokens(grid, grid, window)
    mask = SketchWindow(grid, grid, window, 8).mask
    cells = [(t, y, x) for t in range(grid[0]) for y in range(grid[1]) for x in range(grid[2])]
    for place, cell in enumerate(cells):
        expected = {
            number
            for number, other in enumerate(cells)
            if all(abs(a - b) <= size // 2 for a, b, size in zip(cell, other, window, strict=True))
        }
        assert set(indices[place][inside[place]].tolist()) == expected
        assert set(mask[place].nonzero()[:, 0].tolist()) == expected


def test_grids_of_different_sizes_cover_the_same_clip():
    indices, inside = find_window_tokens((1, 4, 4), (1, 2, 2), (1, 1, 1))
    assert indices[:, 0].view(4, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    assert bool(inside.all())


def test_a_position_reads_its_window_later_frames_included(sketched):
    alone = {"window": (1, 1, 1), "dilations": 1}  # no position passes on what it has read
    nuwa = sketched(depth=1, token_shift=False, sketch_window=(3, 1, 1), **alone).eval()
    batch = with_sketch()
    plain = hidden(nuwa, batch)
    batch.extra["sketch"][:, 2, :, :4, :4] = 255 - batch.extra["sketch"][:, 2, :, :4, :4]  # cell (2, 0, 0)
    moved = ((hidden(nuwa, batch) - plain).abs().amax(-1) > 1e-6).all(0).view(FRAMES, SIDE, SIDE)
    assert moved.nonzero().tolist() == [[1, 0, 0], [2, 0, 0], [3, 0, 0]]


@torch.no_grad()
def test_the_projection_is_a_convolution_if_both_grids_are_equal():
    grid, window, width = (3, 4, 5), (3, 3, 1), 8
    projection = SketchProjection(width, SketchWindow(grid, grid, window, 8))
    sketch = torch.randn(2, 60, width, generator=torch.Generator().manual_seed(0))
    weight = rearrange(
        torch.stack([linear.weight for linear in projection.offsets]), "(t h w) o i -> o i t h w", t=3, h=3, w=1
    )
    volume = rearrange(sketch, "b (t h w) d -> b d t h w", t=3, h=4)
    expected = rearrange(torch.nn.functional.conv3d(volume, weight, padding=(1, 1, 0)), "b d t h w -> b (t h w) d")
    torch.testing.assert_close(projection(sketch, 60), expected)
    torch.testing.assert_close(projection(sketch, 20), expected[:, :20])


@torch.no_grad()
def test_the_projection_reads_the_sketch_before_the_first_block(sketched):
    """Without sketch attention. Both grids cover the same clip."""
    nuwa = sketched(patch=2, depth=1, sketch_window=(1, 1, 1)).eval()
    for block in nuwa.network.blocks:
        block.sketch.out.weight.zero_()
    batch = with_sketch()
    plain = hidden(nuwa, batch)
    batch.extra["sketch"][:, -1, :, -2:, -2:] = (
        255 - batch.extra["sketch"][:, -1, :, -2:, -2:]
    )  # read by the last position only
    moved = ((hidden(nuwa, batch) - plain).abs().amax(-1) > 1e-6).all(0)
    assert moved.nonzero().tolist() == [[FRAMES * PLACES - 1]]


@torch.no_grad()
def test_a_reset_state_has_the_new_sketch(sketched):
    nuwa = sketched().eval()
    one, other = (with_sketch(seed=seed) for seed in (0, 1))
    state = nuwa.network.init_state(nuwa.encode_batch(one), 4, FRAMES)
    nuwa.network.reset_state(nuwa.encode_batch(other), state)
    fresh = nuwa.network.init_state(nuwa.encode_batch(other), 4, FRAMES)
    assert torch.equal(state.embedding, fresh.embedding)
    assert not torch.equal(nuwa.network.init_state(nuwa.encode_batch(one), 4, FRAMES).embedding, fresh.embedding)


@pytest.mark.parametrize("patch", [4, 2, 12])
@torch.no_grad()
def test_step_by_step_equals_one_pass(sketched, patch):
    nuwa = sketched(patch=patch).eval()
    batch = with_sketch()
    condition, flat = nuwa.encode_batch(batch), nuwa.get_tokens(batch).flatten(1)
    expected = hidden(nuwa, batch)
    state = nuwa.network.init_state(condition, 4, FRAMES)
    nuwa.network.prefill(flat[:, :PLACES], state)
    for place in range(PLACES, FRAMES * PLACES):
        found = nuwa.decode_step(nuwa.network, flat[:, place - 1 : place], torch.tensor([place]), state)
        torch.testing.assert_close(found[:, 0], expected[:, place], rtol=0, atol=1e-4)


def test_padded_frames_of_a_sketch_are_blank(sketched):
    nuwa = sketched().eval()
    batch = with_sketch()
    batch.frame_mask = torch.tensor([[True, True, False, False]] * 4)
    plain = hidden(nuwa, batch)
    batch.extra["sketch"][:, 2:] = 255 - batch.extra["sketch"][:, 2:]
    assert torch.equal(hidden(nuwa, batch), plain)
    batch.frame_mask = None
    real = hidden(nuwa, batch)[:, : 2 * PLACES]
    assert not torch.allclose(real, plain[:, : 2 * PLACES], atol=1e-4)  # frame 1 reads frame 2 if it is real


def test_sketches_are_dropped_in_training_at_the_given_rate(sketched):
    nuwa = sketched(sketch_dropout=0.25, caption_dropout=0.5)
    batch = with_sketch(200)
    shares = []
    for step in range(2):
        condition = nuwa.encode_batch(batch, Noise(0, step, batch.slots))
        shares.append((condition.sketch == LEVELS).all(1).float().mean())
        assert bool(((condition.sketch == LEVELS).any(1) == (condition.sketch == LEVELS).all(1)).all())
    assert float(sum(shares)) / 2 == pytest.approx(0.25, abs=0.06)
    assert not bool((nuwa.eval().encode_batch(batch, Noise(0, 0, batch.slots)).sketch == LEVELS).any())


def test_every_parameter_gets_a_gradient(sketched):
    nuwa = sketched()
    batch = with_sketch()
    nuwa.loss("model", nuwa(batch, Noise(0, 0, batch.slots))).total.value().backward()
    assert [name for name, p in nuwa.named_parameters() if p.grad is None] == []


def test_requirements(sketched, make):
    nuwa = sketched()
    assert "sketch" in nuwa.reads
    assert "sketch" not in make().reads
    assert not Nuwa.can_cache(nuwa.config)
    assert Nuwa.can_cache(make().config)
    with pytest.raises(InputError, match="samples have none"):
        nuwa(batch_of(), Noise.for_rows(0, 0, 4))
    with pytest.raises(ConfigError, match="sketch=raw gives no tokens"):
        make(stages={"raw": PatchCodec(vocabulary=None)}, sketch="raw")


def prompts(batch: Batch | None, frames: int = FRAMES, rows: int = 4) -> Prompts:
    return Prompts(Noise.for_rows(3, 0, rows), captions=CAPTIONS[:rows], frames=frames, batch=batch)


def test_it_follows_sketches_that_it_has_not_seen(sketched):
    """Clips that are their sketches: after a little training the clip of a new sketch is that sketch, guided or not, and past the trained length."""
    nuwa = sketched(depth=1, token_shift=False, sketch_window=(1, 1, 1), sketch_dropout=0.05)
    batch = with_sketch(16)
    batch.pixels = batch.extra["sketch"][:, :, :1].expand(-1, -1, 3, -1, -1).contiguous()
    train(nuwa, batch, 50, lr=1e-2)
    new = with_sketch(4, seed=7)
    new.extra["sketch"] = sketches(4, 2 * FRAMES, seed=7)
    for guidance, frames in ((1, FRAMES), (2, 2 * FRAMES)):
        drawn = nuwa.sample(prompts(new, frames), NuwaSample(guidance=guidance, temperature=0, overlap=2))
        wanted = new.extra["sketch"][:, :frames, :1].float() / 255
        assert ((drawn[:, :, :1] - wanted).abs() < 0.05).float().mean() > 0.95


def test_no_sketch_equals_a_blank_sketch(sketched):
    nuwa = sketched(depth=1).eval()
    options = NuwaSample(temperature=0, guidance=2)
    drawn = nuwa.sample(prompts(None), options)
    assert drawn.shape == (4, FRAMES, 3, 12, 12)
    blank = with_sketch()
    blank.frame_mask = torch.zeros(4, FRAMES, dtype=torch.bool)
    assert torch.equal(nuwa.sample(prompts(blank), options), drawn)
    assert not torch.equal(nuwa.sample(prompts(with_sketch()), options), drawn)
