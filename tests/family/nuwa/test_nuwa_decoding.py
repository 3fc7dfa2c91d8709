"""Decoding sessions: one for all windows and batches of a shape, and weights that are copied once per call."""

import pytest
import torch

from kineograph.core.batch import Prompts
from kineograph.core.noise import Noise
from kineograph.core.task import freeze
from kineograph.family.nuwa import NuwaSample, decoding

from .conftest import CAPTIONS, FRAMES, batch_of, clips, train

OPTIONS = NuwaSample(guidance=2, overlap=2)


def prompts(rows: int = 3, first: int = 0, seed: int = 5, **keys) -> Prompts:
    keys = {"captions": CAPTIONS[first : first + rows], **keys}
    return Prompts(noise=Noise(seed, 0, first + torch.arange(rows)), **keys)


@pytest.fixture
def made(monkeypatch) -> list[decoding.DecodingSession]:
    """Every session that is created."""
    found: list[decoding.DecodingSession] = []
    build = decoding.DecodingSession.__init__

    def spy(self, *arguments):
        found.append(self)
        build(self, *arguments)

    monkeypatch.setattr(decoding.DecodingSession, "__init__", spy)
    return found


@pytest.mark.parametrize("keys", [{}, {"positions": "rotary", "window": None}])
def test_windows_and_batches_share_a_session_and_sample_as_in_new_ones(make, made, keys):
    """Other captions and seeds, with and without a prime, and a shorter last window: all in the same memory."""
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
            nuwa.sessions.sessions.clear()
            anew.append(nuwa.sample(call, OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(reused, anew, strict=True))
    assert not torch.equal(reused[0], reused[1])


def test_a_session_serves_inference_mode_and_no_grad(make, made):
    nuwa = freeze(make(depth=1))
    with torch.inference_mode():
        first = nuwa.sample(prompts(), OPTIONS)
    with torch.no_grad():
        assert torch.equal(nuwa.sample(prompts(), OPTIONS), first)
    assert len(made) == 1


def test_nan_in_a_cache_does_not_persist(make, made):
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
    assert len(made) == 4  # the one of one row was evicted
    assert len(nuwa.sessions.sessions) == decoding.MAX_SESSIONS
    nuwa.sample(prompts(3, frames=1), OPTIONS)
    assert len(made) == 4
    nuwa.sample(prompts(3, frames=1), OPTIONS.model_copy(update={"temperature": 0.5}))  # is captured in the graph
    assert len(made) == 5


def test_a_trainable_task_frees_its_sessions(make, made):
    nuwa = make(depth=1).eval()
    nuwa.sample(prompts(frames=2 * FRAMES), OPTIONS)
    assert len(made) == 1
    assert not nuwa.sessions.sessions
    assert not any(name.startswith("sessions") for name in nuwa.state_dict())


# Copied weights --------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch):
    monkeypatch.setattr(decoding, "uses_weight_copy", lambda device: True)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("keys", [{}, {"positions": "rotary"}, {"norm": "layer", "qk_norm": False, "mlp": "gelu"}])
def test_the_copy_samples_the_same_as_the_weights(make, monkeypatch, keys, half):
    """In bf16 too: matrices are cast as autocast casts them, the rest keeps its dtype."""
    nuwa = make(**keys, depth=2).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        expected = nuwa.sample(prompts(), OPTIONS)
        monkeypatch.setattr(decoding, "uses_weight_copy", lambda device: True)
        assert torch.equal(nuwa.sample(prompts(), OPTIONS), expected)
    copy = nuwa.sessions.weights
    assert copy.network is not nuwa.network
    matrix = torch.bfloat16 if half else torch.float32
    assert copy.network.blocks[0].mlp is not nuwa.network.blocks[0].mlp
    assert {copy.head.weight.dtype, copy.network.blocks[0].attention.qkv.weight.dtype} == {matrix}
    assert {copy.network.tokens.weight.dtype, nuwa.head.weight.dtype} == {torch.float32}
    assert not any(p.requires_grad for p in copy.network.parameters())


@pytest.mark.parametrize("half", [False, True])
def test_every_step_reads_matrices_in_the_autocast_dtype(make, copied, half):
    nuwa = make(depth=1).eval()
    seen = []

    def spy(network, token, index, state):
        seen.append(network)
        return network.step(token, index, state)

    nuwa.decode_step.forward = spy
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        nuwa.sample(prompts(frames=1), OPTIONS)
    assert seen and all(network is nuwa.sessions.weights.network for network in seen)
    linear = [part for part in seen[0].modules() if isinstance(part, torch.nn.Linear)]
    assert all((part.weight.dtype == torch.bfloat16) == half for part in linear)


def test_a_copy_follows_the_weights(make, copied):
    """Training and swapped-in EMA weights show in the next call; the trained weights are not touched."""
    nuwa = make(depth=1).eval()
    first = nuwa.sample(prompts(), OPTIONS)
    copy = nuwa.sessions.weights
    place = copy.head.weight.data_ptr()
    train(nuwa, batch_of(3), 3)
    second = nuwa.sample(prompts(), OPTIONS)
    assert not torch.equal(first, second)
    kept = nuwa.head.weight.data
    nuwa.head.weight.data = torch.randn_like(kept)  # as the EMA is swapped in
    third = nuwa.sample(prompts(), OPTIONS)
    nuwa.head.weight.data = kept
    assert not torch.equal(third, second)
    assert torch.equal(nuwa.sample(prompts(), OPTIONS), second)
    assert nuwa.sessions.weights is copy and copy.head.weight.data_ptr() == place
    assert nuwa.head.weight.requires_grad and nuwa.head.weight.data_ptr() == kept.data_ptr()


def test_checkpointed_blocks_are_copied_too(make, copied):
    from kineograph.train.activation_checkpointing import checkpoint_activations

    nuwa = make(depth=1).eval()
    prime = clips(3, 2).float() / 255
    expected = nuwa.sample(prompts(prime=prime), OPTIONS)
    for block in nuwa.blocks():
        checkpoint_activations(block)
    assert torch.equal(nuwa.sample(prompts(prime=prime), OPTIONS), expected)
