"""Sampling clips: caches agree with a full pass, guidance, primes, clips longer than trained."""

import pytest
import torch
from torch import Tensor

from kineograph.core.batch import Prompts
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise
from kineograph.core.task import freeze
from kineograph.family.nuwa import NuwaSample
from kineograph.family.nuwa.network import Condition
from kineograph.text.conditioning import encode_captions, encode_prompts

from .conftest import CAPTIONS, CODES, FRAMES, SIDE, PatchCodec, batch_of, clips, train

PLACES = SIDE * SIDE
GREEDY = NuwaSample(temperature=0, guidance=1)


def prompts(rows: int = 3, first: int = 0, seed: int = 5, **keys) -> Prompts:
    keys = {"captions": CAPTIONS[first : first + rows], **keys}
    return Prompts(noise=Noise(seed, 0, first + torch.arange(rows)), **keys)


def tokens_of(codec: PatchCodec, pixels: Tensor) -> Tensor:
    return codec.encode(pixels)


@torch.no_grad()
def all_logits(nuwa, tokens: Tensor, condition: Condition) -> Tensor:
    """Every position at once, no cache: B N V."""
    return nuwa.head.logits(nuwa.network(tokens.flatten(1), *condition))


@torch.no_grad()
def greedy(nuwa, given: Tensor, times: int, captions: list[str], scale: float = 1.0) -> Tensor:
    """The naive loop: the whole prefix for every token, conditional and unconditional apart. B t h w."""
    wanted = Condition(*encode_captions(nuwa.text, captions))
    null = Condition(*encode_captions(nuwa.text, [""] * len(captions)))
    tokens = torch.zeros(len(captions), times * PLACES, dtype=torch.int64)
    tokens[:, : given[0].numel()] = given.flatten(1)
    for place in range(given[0].numel(), times * PLACES):
        clip = tokens.view(-1, times, SIDE, SIDE)
        logits = all_logits(nuwa, clip, wanted)[:, place]
        other = all_logits(nuwa, clip, null)[:, place]
        tokens[:, place] = (other + scale * (logits - other)).argmax(-1)
    return tokens.view(-1, times, SIDE, SIDE)


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"window": None},
        {"positions": "rotary"},
        {"positions": "rotary", "window": None, "token_shift": False},
        {"token_shift": False},
        {"window": (3, 3, 3), "dilations": (1, 2, 4)},
        {"text": {"kind": "none"}},
        {"norm": "layer", "qk_norm": False, "mlp": "gelu"},
    ],
)
@torch.no_grad()
def test_step_by_step_equals_one_pass(make, batch, keys, given):
    """Rows of different captions, with and without given frames; logits within 1e-4."""
    nuwa = make(**keys).eval()
    tokens = nuwa.get_tokens(batch)
    condition = nuwa.encode_batch(batch)
    expected = all_logits(nuwa, tokens, condition)
    flat = tokens.flatten(1)
    state = nuwa.network.init_state(condition, len(batch), FRAMES)
    if given:
        nuwa.network.prefill(flat[:, : given * PLACES], state)
    for place in range(given * PLACES, FRAMES * PLACES):
        before = flat[:, place - 1 : place] if place else torch.full((4, 1), nuwa.network.bos)
        found = nuwa.head.logits(nuwa.decode_step(nuwa.network, before, torch.tensor([place]), state))[:, 0]
        torch.testing.assert_close(found, expected[:, place], rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("keys", [{}, {"window": None, "positions": "rotary"}])
def test_sampling_equals_the_naive_loop(make, codec, keys, scale):
    """With and without guidance against the null text."""
    nuwa = make(**keys).eval()
    drawn = tokens_of(codec, nuwa.sample(prompts(frames=2), GREEDY.model_copy(update={"guidance": scale})))
    expected = greedy(nuwa, torch.zeros(3, 0, SIDE, SIDE, dtype=torch.int64), 2, CAPTIONS[:3], scale)
    assert torch.equal(drawn, expected)


def test_one_step_per_token_and_the_text_is_encoded_once(make):
    nuwa = make().eval()
    calls = {"steps": 0, "text": 0, "logits": []}
    step, text, logits = nuwa.network.step, nuwa.network.text.forward, nuwa.head.logits

    def spy_step(token, *rest):
        assert token.shape == (6, 1)  # conditional and unconditional rows in one batch
        calls["steps"] += 1
        return step(token, *rest)

    nuwa.network.step = spy_step
    nuwa.network.text.forward = lambda x: calls.update(text=calls["text"] + 1) or text(x)
    nuwa.head.logits = lambda x: calls["logits"].append(tuple(x.shape)) or logits(x)
    nuwa.sample(prompts(), NuwaSample(guidance=2))
    assert calls["steps"] == FRAMES * PLACES
    assert calls["text"] == 1
    assert set(calls["logits"]) == {(3, 32)}  # one position, guided before the head


def test_seeds_repeat_and_do_not_depend_on_the_batch(make):
    nuwa = make(depth=2).eval()
    options = NuwaSample(guidance=2)
    whole = nuwa.sample(prompts(), options)
    assert whole.shape == (3, FRAMES, 3, 4 * SIDE, 4 * SIDE)
    assert torch.equal(whole, nuwa.sample(prompts(), options))
    parts = [nuwa.sample(prompts(rows, first), options) for first, rows in ((0, 1), (1, 2))]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, nuwa.sample(prompts(seed=6), options))


def test_options_of_drawing_do_something(make):
    nuwa = make(depth=2).eval()

    def asked(**keys) -> Prompts:
        return prompts(frames=2, **keys)

    likeliest = nuwa.sample(asked(), GREEDY)
    plain = nuwa.sample(asked(), NuwaSample(guidance=1))
    assert not torch.equal(plain, likeliest)
    for options in (NuwaSample(guidance=1, top_k=1), NuwaSample(guidance=1, top_p=1e-6)):
        assert torch.equal(nuwa.sample(asked(), options), likeliest)
    for options in (NuwaSample(guidance=1, temperature=0.3), NuwaSample(guidance=5)):
        assert not torch.equal(nuwa.sample(asked(), options), plain)
    negative = nuwa.sample(asked(negative=["a cat below"] * 3), NuwaSample(guidance=5))
    assert not torch.equal(negative, nuwa.sample(asked(), NuwaSample(guidance=5)))
    same = nuwa.sample(asked(negative=[""] * 3), NuwaSample(guidance=5))
    assert torch.equal(same, nuwa.sample(asked(), NuwaSample(guidance=5)))


def test_no_caption_means_the_null_text_and_no_guidance(make):
    nuwa = make().eval()
    assert encode_prompts(nuwa.text, prompts(captions=None))[1] is None
    found = nuwa.sample(prompts(captions=None), NuwaSample(guidance=5))
    assert torch.equal(found, nuwa.sample(prompts(captions=[""] * 3), NuwaSample(guidance=1)))
    plain = make(text={"kind": "none"}).eval()
    assert plain.sample(prompts(captions=None), NuwaSample(guidance=5)).shape[1] == FRAMES


def test_fewer_frames_are_the_beginning_of_more(make):
    nuwa = make().eval()
    assert torch.equal(nuwa.sample(prompts(frames=2), GREEDY), nuwa.sample(prompts(), GREEDY)[:, :2])


# Primes -----------------------------------------------------------------------------------------------------------


def test_a_prime_comes_first_and_is_continued(make, codec):
    nuwa = make().eval()
    prime = clips(3, 2).float() / 255
    drawn = nuwa.sample(prompts(prime=prime), GREEDY)
    torch.testing.assert_close(drawn[:, :2], codec.decode(codec.encode(prime)).float())
    assert torch.equal(tokens_of(codec, drawn), greedy(nuwa, codec.encode(prime), FRAMES, CAPTIONS[:3]))
    with pytest.raises(InputError, match="nothing is left"):
        nuwa.sample(prompts(prime=clips(3, 4).float() / 255), GREEDY)


@pytest.mark.parametrize("keys", [{}, {"window": None}])
def test_its_own_frames_as_prime_give_the_same_clip(make, keys):
    """Noise is keyed by position, and a prefilled cache equals one filled token by token."""
    nuwa = make(**keys).eval()
    drawn = nuwa.sample(prompts(), NuwaSample(guidance=2))
    for frames in (1, 3):
        assert torch.equal(nuwa.sample(prompts(prime=drawn[:, :frames]), NuwaSample(guidance=2)), drawn)


# Longer than trained ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "overlap", "windows"),
    [({}, None, 5), ({"positions": "rotary"}, 3, 5), ({"window": None}, 2, 3), ({"positions": "rotary"}, 1, 3)],
)
def test_a_clip_of_twice_the_length_is_sampled_in_windows(make, codec, keys, overlap, windows):
    """Each window begins with the last frames of the one before, as if the clip began there."""
    nuwa = make(**keys, depth=2).eval()
    filled = []
    fill = nuwa.network.prefill
    nuwa.network.prefill = lambda tokens, state: filled.append(tokens.shape[1] // PLACES) or fill(tokens, state)
    options = GREEDY.model_copy(update={"overlap": overlap})
    drawn = nuwa.sample(prompts(frames=2 * FRAMES), options)
    kept = overlap or FRAMES - 1
    assert filled == [kept] * (windows - 1)
    expected = greedy(nuwa, torch.zeros(3, 0, SIDE, SIDE, dtype=torch.int64), FRAMES, CAPTIONS[:3])
    while expected.shape[1] < 2 * FRAMES:
        window = greedy(nuwa, expected[:, -kept:], FRAMES, CAPTIONS[:3])
        expected = torch.cat([expected, window[:, kept:]], dim=1)
    assert torch.equal(tokens_of(codec, drawn), expected[:, : 2 * FRAMES])


def test_a_prime_longer_than_a_window(make, codec):
    nuwa = make().eval()
    prime = clips(3, FRAMES + 1).float() / 255
    drawn = tokens_of(codec, nuwa.sample(prompts(prime=prime, frames=FRAMES + 2), GREEDY))
    given = codec.encode(prime)
    assert torch.equal(drawn[:, :-1], given)
    assert torch.equal(drawn[:, -1], greedy(nuwa, given[:, -3:], FRAMES, CAPTIONS[:3])[:, -1])


@pytest.mark.parametrize(("overlap", "kept"), [(None, 3), (1, 1)])
def test_overlapping_frames_are_encoded_again_if_a_latent_frame_covers_several(make, overlap, kept):
    """Latent frames 1 + 3 of 1 + 6 frames: the first one of a window is a single frame, so tokens alone cannot slide."""
    codec = freeze(PatchCodec(pair=2))
    nuwa = make(stages={"pairs": codec}, codec="pairs", frames=7).eval()
    assert nuwa.grid == (4, SIDE, SIDE)
    drawn = nuwa.sample(prompts(frames=11), GREEDY.model_copy(update={"overlap": overlap}))
    assert drawn.shape[1] == 11
    first = nuwa.sample(prompts(), GREEDY)
    assert torch.equal(drawn[:, :7], first)
    frames = 1 + 2 * (kept - 1)
    window = codec.encode(first[:, -frames:])
    expected = codec.decode(greedy(nuwa, window, kept + 1, CAPTIONS[:3]))[:, frames:]
    torch.testing.assert_close(drawn[:, 7:9], expected[:, :2].float())


def test_impossible_requests_are_refused(make):
    nuwa = make().eval()
    with pytest.raises(InputError, match=r"\(8, 8\) cannot be drawn"):
        nuwa.sample(prompts(height=8, width=8), GREEDY)
    with pytest.raises(InputError, match=r"sample\.overlap=4 .*use 3 or fewer"):
        nuwa.sample(prompts(frames=6), NuwaSample(overlap=4))
    with pytest.raises(InputError, match=r"data\.frames"):
        make(frames=1).eval().sample(prompts(frames=2), GREEDY)


def test_overfitted_clips_follow_their_captions(make, codec):
    """Four captions with a random clip each."""
    nuwa = make(width=48, depth=2, frames=2)
    batch = batch_of(4, frames=2)
    train(nuwa, batch, 80, lr=6e-3)
    drawn = nuwa.sample(prompts(4), NuwaSample(guidance=1.5, temperature=0))
    assert (tokens_of(codec, drawn) == nuwa.get_tokens(batch)).float().mean() > 0.95


def test_sampling_in_inference_mode_does_not_disturb_training(make, batch, noise):
    nuwa = make()
    with torch.inference_mode():
        nuwa.sample(prompts(), NuwaSample(guidance=2))
    nuwa.loss("model", nuwa(batch, noise)).total.value().backward()
    assert nuwa.network.tokens.weight.grad.abs().sum() > 0
    assert nuwa.vocabulary == CODES
