"""Sampling with Muse: captions, guidance, negative prompts, chunks."""

import pytest
import torch

from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import SupportsSampling
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise
from kineograph.family.muse import Condition, MuseSample
from kineograph.process.guidance import make_guided
from kineograph.text.conditioning import encode_captions, encode_null

from .conftest import CAPTIONS, batch_of, train


def prompts(captions, seed: int = 0, first: int = 0, **keys) -> Prompts:
    rows = len(captions) if captions is not None else 4
    return Prompts(Noise(seed, 0, first + torch.arange(rows)), captions, **keys)


def test_overfits_captions(make):
    batch = batch_of(8)
    many = Batch(slots=torch.arange(16), pixels=batch.pixels.repeat(2, 1, 1, 1, 1), captions=batch.captions * 2)
    muse = make(width=64, heads=4, text={"width": 32, "heads": 2, "depth": 1, "length": 24})
    train(muse, many, 90)
    options = MuseSample(steps=6, guidance=2.0, temperature=0.7, noise=1.0)
    drawn = muse.sample_tokens(prompts(CAPTIONS), options).flatten(1)
    right = (drawn == muse.get_tokens(batch)).float().mean(1)
    assert right.min() > 0.9, right
    swapped = muse.sample_tokens(prompts(CAPTIONS[::-1]), options).flatten(1)
    assert float((swapped == muse.get_tokens(batch).flip(0)).float().mean()) > 0.95  # the caption decides, not the row
    unseen = muse.sample(prompts(["a cat on the moon", "Zwölf 🙂"]), options)
    assert unseen.shape == (2, 1, 3, 16, 16)


def test_pixels_are_in_range_and_no_mask_is_left(make):
    muse = make().eval()
    pixels = muse.sample(prompts(CAPTIONS[:3]), MuseSample(steps=4))
    assert pixels.shape == (3, 1, 3, 16, 16)
    assert float(pixels.min()) >= 0
    assert float(pixels.max()) <= 1
    assert isinstance(muse, SupportsSampling)


def test_reproducible_and_independent_of_chunks(make):
    muse = make().eval()
    options = MuseSample(steps=5)
    whole = muse.sample_tokens(prompts(CAPTIONS[:5]), options)
    parts = [
        muse.sample_tokens(prompts(CAPTIONS[:2]), options),
        muse.sample_tokens(prompts(CAPTIONS[2:5], first=2), options),
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole, muse.sample_tokens(prompts(CAPTIONS[:5]), options))
    assert not torch.equal(whole, muse.sample_tokens(prompts(CAPTIONS[:5], seed=1), options))


def test_guided_hidden_states_equal_guided_logits(make):
    muse = make().eval()
    positive = Condition(*encode_captions(muse.text, CAPTIONS[:3]))
    negative = Condition(*encode_null(muse.text, 3, torch.device("cpu")))
    tokens = torch.randint(0, 17, (3, 16), generator=torch.Generator().manual_seed(0))
    both = positive.concat(negative)
    hidden = make_guided(lambda x, step: muse.compute_hidden(x, both), lambda step: 3.0)(tokens, 0)
    a, b = (muse.head.logits(muse.compute_hidden(tokens, condition)) for condition in (positive, negative))
    torch.testing.assert_close(muse.head.logits(hidden), b + 3.0 * (a - b), rtol=1e-4, atol=1e-4)


def test_one_forward_pass_per_step(make):
    muse = make().eval()
    rows = []
    inner = muse.network.forward
    muse.network.forward = lambda tokens, *rest: rows.append(len(tokens)) or inner(tokens, *rest)
    muse.sample_tokens(prompts(CAPTIONS[:3]), MuseSample(steps=4, guidance=2.0))
    muse.sample_tokens(prompts(CAPTIONS[:3]), MuseSample(steps=4, guidance=1.0))
    muse.sample_tokens(prompts(None), MuseSample(steps=2, guidance=2.0))  # null text: nothing to guide
    assert rows == [6] * 4 + [3] * 4 + [4] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 3},
        {"guidance": 9.0},
        {"guidance_schedule": "linear", "guidance": 20.0},
        {"temperature": 0.1},
        {"top_k": 1},
        {"noise": 0.0},
    ],
)
def test_every_sampling_option_changes_samples(make, change):
    muse = make().eval()
    base = MuseSample(steps=6, guidance=change.get("guidance", 3.0) if "guidance_schedule" in change else 3.0)
    with torch.no_grad():
        muse.head.weight.mul_(3)
    plain = muse.sample_tokens(prompts(CAPTIONS), base)
    assert not torch.equal(plain, muse.sample_tokens(prompts(CAPTIONS), base.model_copy(update=change)))


def test_critic_noise_changes_samples(make):
    muse = make(critic="self").eval()
    few, much = (muse.sample_tokens(prompts(CAPTIONS), MuseSample(steps=6, critic_noise=x)) for x in (0.0, 50.0))
    assert not torch.equal(few, much)


def test_negative_prompts_change_the_result_and_steer_away(make):
    muse = make().eval()
    with torch.no_grad():
        muse.head.weight.mul_(3)
    options = MuseSample(steps=4, guidance=4.0)
    plain = muse.sample_tokens(prompts(CAPTIONS), options)
    negative = muse.sample_tokens(prompts(CAPTIONS, negative=["a blue one"] * 8), options)
    assert not torch.equal(plain, negative)
    empty = muse.sample_tokens(prompts(CAPTIONS, negative=[""] * 8), options)
    assert torch.equal(plain, empty)  # an empty negative is the null text
    same = muse.sample_tokens(
        prompts(CAPTIONS, negative=CAPTIONS), options
    )  # away from and towards the same: no guidance at all
    assert torch.equal(same, muse.sample_tokens(prompts(CAPTIONS), options.model_copy(update={"guidance": 1.0})))


def test_unconditional_model_ignores_captions(make):
    muse = make(text={"kind": "none"}).eval()
    a = muse.sample_tokens(prompts(None), MuseSample(steps=3))
    assert torch.equal(a, muse.sample_tokens(prompts(CAPTIONS[:4]), MuseSample(steps=3)))


def test_embeddings_in_the_data_change_samples(make):
    muse = make(text={"kind": "given", "width": 24, "length": 5}).eval()
    with torch.no_grad():
        muse.head.weight.mul_(3)
    drawn = []
    for seed in (0, 1):
        embeds = torch.randn(4, 5, 24, generator=torch.Generator().manual_seed(seed)) * 5
        drawn.append(
            muse.sample_tokens(
                prompts(None, batch=Batch(slots=torch.arange(4), text_embeds=embeds)), MuseSample(steps=3)
            )
        )
    assert not torch.equal(*drawn)


def test_self_conditioning_carries_hidden_states_from_step_to_step(make):
    muse = make(self_conditioning=True).eval()
    seen = []
    inner = muse.network.forward

    def spy(tokens, text, mask, low, previous, memory):
        hidden = inner(tokens, text, mask, low, previous, memory)
        seen.append((previous, hidden))
        return hidden

    muse.network.forward = spy
    muse.sample_tokens(prompts(CAPTIONS[:2]), MuseSample(steps=3))
    assert float(seen[0][0].abs().sum()) == 0
    assert torch.equal(seen[1][0], seen[0][1])
    assert torch.equal(seen[2][0], seen[1][1])


def test_other_sizes_are_refused(make):
    muse = make().eval()
    for keys in ({"frames": 4}, {"height": 32}):
        with pytest.raises(InputError, match="trained for"):
            muse.sample(prompts(CAPTIONS[:1], **keys), MuseSample())


def test_sampling_keeps_training_mode(make):
    muse = make(dropout=0.3)
    muse.train()
    muse.sample_tokens(prompts(CAPTIONS[:1]), MuseSample(steps=2))
    assert muse.training
    assert muse.network.training
