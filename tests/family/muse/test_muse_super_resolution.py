"""Super-resolution: conditioning on the tokens of a smaller image."""

import pytest
import torch

from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import takes_captions
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.task import freeze
from kineograph.family.muse import Condition, MuseSample
from kineograph.text.conditioning import encode_captions

from .conftest import CAPTIONS, PatchCodec, batch_of, train


@pytest.fixture
def base(make):
    return freeze(make(size=16))


@pytest.fixture
def large(make, base):
    def large(**keys):
        return make(stages={"base": base, "small": freeze(PatchCodec())}, size=32, **{"low_res": "base", **keys})

    return large


def test_low_res_tokens_are_those_of_the_smaller_image(large, codec):
    task = large()
    batch = batch_of(3, size=32)
    small = torch.nn.functional.interpolate(batch.video[:, 0], (16, 16), mode="bicubic", antialias=True).clamp(0, 1)
    assert torch.equal(task.get_low_res_tokens(batch), codec.encode(small[:, None]).flatten(1))
    assert task.get_low_res_tokens(batch).shape == (3, 16)
    assert task.get_tokens(batch).shape == (3, 64)


def test_perturbed_low_res_tokens_change_the_logits(large):
    task = large().eval()
    tokens = torch.full((1, 64), task.mask_id)
    text, mask = encode_captions(task.text, CAPTIONS[:1])
    low = torch.zeros(1, 16, dtype=torch.int64)
    before = task.head.logits(task.compute_hidden(tokens, Condition(text, mask, low)))
    for index in (0, 15):
        changed = low.clone()
        changed[0, index] = 9
        after = task.head.logits(task.compute_hidden(tokens, Condition(text, mask, changed)))
        change = (after - before).abs().sum(-1)[0].view(8, 8)
        assert change.min() > 0  # every token attends to it
        y, x = 2 * (index // 4), 2 * (index % 4)
        assert change[y : y + 2, x : x + 2].mean() > 2 * change.mean()  # the tokens that it covers change most


def test_low_res_tokens_lower_the_loss(large, monkeypatch):
    task = large(text={"kind": "none"}, width=48)
    losses = train(task, batch_of(8, size=32), 30)
    held_out = batch_of(8, size=32, seed=5)
    noise = Noise(0, 0, held_out.slots)
    with torch.no_grad():
        true = float(task.validate(held_out, noise)["loss"].value())
        monkeypatch.setattr(task, "encode_low_res", lambda pixels: torch.randint(0, 16, (8, 16)))
        random = float(task.validate(held_out, noise)["loss"].value())
    assert losses[-1] < losses[0]
    assert true < random - 0.05


def test_sampling_starts_from_the_base_sample(large, base, monkeypatch):
    task = large().eval()
    with torch.no_grad():
        task.head.weight.mul_(3)
    prompts = Prompts(Noise.for_rows(0, 0, 2), CAPTIONS[:2])
    options = MuseSample(steps=3)
    drawn = task.sample_tokens(prompts, options)
    assert drawn.shape == (2, 1, 8, 8)
    assert task.sample(prompts, options).shape == (2, 1, 3, 32, 32)
    expected = base.sample_tokens(prompts, base.config.sample).flatten(1)
    assert torch.equal(task.encode_prompts(prompts)[0].low_res, expected)
    monkeypatch.setattr(
        type(base), "get_prompted_low_res", lambda self, p, o=None: None if self is base else (expected + 5) % 16
    )
    assert not torch.equal(drawn, task.sample_tokens(prompts, options))


def test_super_resolution_draws_other_random_numbers_than_its_base(large, base, monkeypatch):
    """And the base the same ones in a cascade as alone."""
    task, names = large().eval(), []
    inner = Noise.uniform

    def spy(noise, name, *shape):
        names.append((noise.seed, name))
        return inner(noise, name, *shape)

    monkeypatch.setattr(Noise, "uniform", spy)
    prompts = Prompts(Noise.for_rows(0, 0, 2), CAPTIONS[:2])
    task.sample_tokens(prompts, MuseSample(steps=3))
    both, names[:] = names[:], []
    base.sample_tokens(prompts, base.config.sample)
    assert len(set(both)) == len(both) == 4
    assert both[:2] == names


def test_given_image_is_upscaled(large, codec):
    task = large().eval()
    picture = batch_of(2, size=32).video
    prompts = Prompts(Noise.for_rows(0, 0, 2), CAPTIONS[:2], prime=picture)
    assert torch.equal(task.encode_prompts(prompts)[0].low_res, task.encode_low_res(picture))


def test_codec_as_low_res(large):
    task = large(low_res="small").eval()
    assert task.low_res_size == (16, 16)
    assert large(low_res="small", low_res_size=8).low_res_size == (8, 8)
    real = batch_of(2, size=32)
    drawn = task.sample(Prompts(Noise.for_rows(0, 0, 2), CAPTIONS[:2], batch=real), MuseSample(steps=2))
    assert drawn.shape == (2, 1, 3, 32, 32)
    with pytest.raises(InputError, match="--prime"):
        task.sample(Prompts(Noise.for_rows(0, 0, 2), CAPTIONS[:2]), MuseSample(steps=2))


def test_size_other_than_the_base_size_is_refused(large):
    with pytest.raises(ConfigError, match="low_res_size"):
        large(low_res_size=8)


def test_cached_tokens_of_both_pictures_train_as_pixels_do(large):
    task, batch = large(), batch_of(2, size=32)
    rows = task.precompute(batch)
    assert rows["low_res_tokens"].shape == (2, 16)
    cached = Batch(
        slots=batch.slots,
        tokens=rows["tokens"],
        captions=batch.captions,
        extra={"low_res_tokens": rows["low_res_tokens"]},
    )
    noise = Noise(0, 0, batch.slots)
    expected, found = (task.eval()(given, noise).loss(1.0).total.value() for given in (batch, cached))
    assert torch.equal(expected, found)
    cached.extra["low_res_tokens"] = (cached.extra["low_res_tokens"] + 3) % 16
    assert not torch.equal(expected, task(cached, noise).loss(1.0).total.value())


def test_cached_tokens_without_pixels_are_refused(large):
    batch = Batch(slots=torch.arange(2), tokens=torch.zeros(2, 1, 8, 8, dtype=torch.int64), captions=CAPTIONS[:2])
    with pytest.raises(InputError, match="train from pixels, or run kineo cache"):
        large()(batch, Noise(0, 0, batch.slots))


def test_small_image_is_not_resized(large, codec):
    task = large()
    assert task.prime_size(task.config.sample) == (16, 16)
    small = torch.rand(2, 1, 3, 16, 16)
    prompts = Prompts(Noise.for_rows(0, 0, 2), CAPTIONS[:2], prime=small)
    assert torch.equal(task.get_prompted_low_res(prompts), codec.encode(small).flatten(1))
    assert task.describe_start(Prompts(prompts.noise, CAPTIONS[:2])) is None
    assert (
        large(low_res="small").describe_start(Prompts(prompts.noise, CAPTIONS[:2]))
        == "real pictures made smaller, 16 × 16"
    )


def test_a_stage_without_text_passes_captions_and_guidance_to_its_base(large, base):
    task = large(text={"kind": "none"}).eval()
    assert "captions" not in task.reads
    assert takes_captions(task)
    assert not takes_captions(large(low_res="small", text={"kind": "none"}))  # enlarges given pictures
    with torch.no_grad():
        base.head.weight.mul_(3)
    prompts = Prompts(Noise.for_rows(0, 0, 4), CAPTIONS[:4])

    def low_res(**options):
        return task.encode_prompts(prompts, task.config.sample.model_copy(update=options))[0].low_res

    def drawn(**options):
        return base.sample_tokens(prompts, base.config.sample.model_copy(update=options)).flatten(1)

    assert torch.equal(low_res(steps=2), drawn())
    assert torch.equal(low_res(guidance=9.0), drawn(guidance=9.0))
    assert not torch.equal(drawn(), drawn(guidance=9.0))
    read = large().eval()  # has text of its own
    assert torch.equal(read.encode_prompts(prompts, MuseSample(guidance=9.0))[0].low_res, drawn())
