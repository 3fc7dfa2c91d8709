"""Where drawing happens: one canvas for all windows and batches of a shape, weights that are copied once a call."""

import pytest
import torch

from kineograph.core.batch import Prompts
from kineograph.core.noise import Noise
from kineograph.core.task import freeze
from kineograph.family.nuwa import NuwaSample, canvas

from .conftest import CAPTIONS, FRAMES, batch_of, clips, train

OPTIONS = NuwaSample(guidance=2, overlap=2)


def prompts(rows: int = 3, first: int = 0, seed: int = 5, **keys) -> Prompts:
    keys = {"captions": CAPTIONS[first : first + rows], **keys}
    return Prompts(noise=Noise(seed, 0, first + torch.arange(rows)), **keys)


@pytest.fixture
def made(monkeypatch) -> list[canvas.Canvas]:
    """Every canvas that comes to be."""
    found: list[canvas.Canvas] = []
    build = canvas.Canvas.__init__

    def spy(self, *arguments):
        found.append(self)
        build(self, *arguments)

    monkeypatch.setattr(canvas.Canvas, "__init__", spy)
    return found


@pytest.mark.parametrize("keys", [{}, {"positions": "rotary", "window": None}])
def test_windows_and_batches_share_a_canvas_and_draw_as_on_new_ones(make, made, keys):
    """Other captions, other seeds, given frames or none, a last window that is shorter: all in the same memory."""
    nuwa = freeze(make(**keys, depth=2))
    calls = [
        prompts(frames=3 * FRAMES - 1),
        prompts(first=3, seed=6, frames=3 * FRAMES - 1),
        prompts(seed=7, prime=clips(3, 2).float() / 255),
        prompts(seed=5, negative=["a cat below"] * 3),
    ]
    with torch.inference_mode():
        reused = [nuwa.sample(call, OPTIONS) for call in calls]
        assert len(made) == 1
        anew = []
        for call in calls:
            nuwa.easel.clear()
            anew.append(nuwa.sample(call, OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(reused, anew, strict=True))
    assert not torch.equal(reused[0], reused[1])


def test_a_canvas_serves_drawers_of_any_mode(make, made):
    nuwa = freeze(make(depth=1))
    with torch.inference_mode():
        first = nuwa.sample(prompts(), OPTIONS)
    with torch.no_grad():
        assert torch.equal(nuwa.sample(prompts(), OPTIONS), first)
    assert len(made) == 1


def test_numbers_that_are_not_finite_do_not_stay(make, made):
    nuwa = freeze(make(depth=1))
    expected = nuwa.sample(prompts(), OPTIONS)
    for cache in made[0].state.caches:
        for part in (cache.attention.keys, cache.attention.values, cache.shift_mlp.kept):
            part.fill_(float("nan"))
    assert torch.equal(nuwa.sample(prompts(), OPTIONS), expected)
    assert len(made) == 1


def test_memory_is_bounded(make, made):
    nuwa = freeze(make(depth=1))
    for rows in (1, 2, 3, 1):
        nuwa.sample(prompts(rows, frames=1), OPTIONS)
    assert len(made) == 4  # one row's was the longest unused
    assert len(nuwa.easel._canvases) == canvas.KEPT
    nuwa.sample(prompts(3, frames=1), OPTIONS)
    assert len(made) == 4
    nuwa.sample(prompts(3, frames=1), OPTIONS.model_copy(update={"temperature": 0.5}))  # is in the recorded step
    assert len(made) == 5


def test_training_gets_the_memory_back(make, made):
    nuwa = make(depth=1).eval()
    nuwa.sample(prompts(frames=2 * FRAMES), OPTIONS)
    assert len(made) == 1
    assert not nuwa.easel._canvases
    assert not any(name.startswith("easel") for name in nuwa.state_dict())


# Copied weights --------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch):
    monkeypatch.setattr(canvas, "copies", lambda device: True)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("keys", [{}, {"positions": "rotary"}, {"norm": "layer", "qk_norm": False, "mlp": "gelu"}])
def test_a_copy_draws_what_the_weights_draw(make, monkeypatch, keys, half):
    """In half precision too: matrices are cast as autocast casts them, the rest stays as it is."""
    nuwa = make(**keys, depth=2).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        expected = nuwa.sample(prompts(), OPTIONS)
        monkeypatch.setattr(canvas, "copies", lambda device: True)
        assert torch.equal(nuwa.sample(prompts(), OPTIONS), expected)
    pen = nuwa.easel._pen
    assert pen.network is not nuwa.network
    matrix = torch.bfloat16 if half else torch.float32
    assert pen.network.blocks[0].mlp is not nuwa.network.blocks[0].mlp
    assert {pen.head.weight.dtype, pen.network.blocks[0].attention.qkv.weight.dtype} == {matrix}
    assert {pen.network.tokens.weight.dtype, nuwa.head.weight.dtype} == {torch.float32}
    assert not any(p.requires_grad for p in pen.network.parameters())


@pytest.mark.parametrize("half", [False, True])
def test_matrices_are_not_cast_for_every_token(make, copied, half):
    """Of the operations of a step none is given a matrix in float32."""
    nuwa = make(depth=1).eval()
    seen = []
    inner = nuwa.network.step

    def spy(network, token, index, state):
        seen.append(network)
        return network.step(token, index, state)

    nuwa.one_step.forward = spy
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        nuwa.sample(prompts(frames=1), OPTIONS)
    assert seen and all(network is nuwa.easel._pen.network for network in seen)
    linear = [part for part in seen[0].modules() if isinstance(part, torch.nn.Linear)]
    assert all((part.weight.dtype == torch.bfloat16) == half for part in linear)
    assert inner.__self__ is nuwa.network


def test_a_copy_follows_the_weights(make, copied):
    """What is trained on, and what averages swap in, is drawn from in the next call; what trains is not touched."""
    nuwa = make(depth=1).eval()
    first = nuwa.sample(prompts(), OPTIONS)
    pen = nuwa.easel._pen
    place = pen.head.weight.data_ptr()
    train(nuwa, batch_of(3), 3)
    second = nuwa.sample(prompts(), OPTIONS)
    assert not torch.equal(first, second)
    kept = nuwa.head.weight.data
    nuwa.head.weight.data = torch.randn_like(kept)  # as an average changes places with the weights
    third = nuwa.sample(prompts(), OPTIONS)
    nuwa.head.weight.data = kept
    assert not torch.equal(third, second)
    assert torch.equal(nuwa.sample(prompts(), OPTIONS), second)
    assert nuwa.easel._pen is pen and pen.head.weight.data_ptr() == place
    assert nuwa.head.weight.requires_grad and nuwa.head.weight.data_ptr() == kept.data_ptr()


def test_recomputed_blocks_are_copied_too(make, copied):
    from kineograph.train.activation_checkpointing import checkpoint_activations

    nuwa = make(depth=1).eval()
    prime = clips(3, 2).float() / 255
    expected = nuwa.sample(prompts(prime=prime), OPTIONS)
    for block in nuwa.blocks():
        checkpoint_activations(block)
    assert torch.equal(nuwa.sample(prompts(prime=prime), OPTIONS), expected)
