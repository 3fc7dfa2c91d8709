"""What stages do with text: captions, given embeddings, the null text, prompts."""

import pytest
import torch

from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext
from kineograph.text import TextConfig, build_text
from kineograph.text.conditioning import (
    TextEmbeddings,
    compute_cached_text,
    encode_batch,
    encode_captions,
    encode_null,
    encode_prompts,
    get_precomputed,
)

CAPTIONS = ["a red one", "two blue ones", "   "]
CPU = torch.device("cpu")


@pytest.fixture
def learned():
    torch.manual_seed(0)
    context = BuildContext(Shape(1, 8, 8, 3, 8.0), captions=lambda: CAPTIONS)
    return build_text(TextConfig(width=16, heads=2, depth=1, length=12), context)


@pytest.fixture
def given():
    return build_text(TextConfig(kind="given", width=16, length=12), BuildContext(Shape(1, 8, 8, 3, 8.0)))


def embedded(rows: int = 3, length: int = 5, width: int = 16, mask: torch.Tensor | None = None) -> Batch:
    embeds = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(0))
    return Batch(torch.arange(rows), captions=CAPTIONS[:rows], text_embeds=embeds, text_mask=mask)


def same(a: TextEmbeddings, b: TextEmbeddings) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_empty_captions_are_the_null_text(learned):
    words, null = encode_captions(learned, CAPTIONS), encode_null(learned, 3, CPU)
    assert torch.equal(words.mask[2], null.mask[2])
    assert torch.equal(words.embeddings[2], null.embeddings[2])
    assert not torch.equal(words.embeddings[0], null.embeddings[0])
    with pytest.raises(InputError, match=r"text\.kind=none"):
        encode_captions(learned, None)


def test_dropped_rows_are_the_null_text_and_the_others_stay(learned):
    batch = Batch(torch.arange(3), captions=CAPTIONS)
    dropped = encode_batch(learned, batch, torch.tensor([True, False, False]))
    assert torch.equal(dropped.embeddings[0], encode_null(learned, 1, CPU).embeddings[0])
    assert torch.equal(dropped.embeddings[1], encode_captions(learned, CAPTIONS).embeddings[1])


def test_given_embeddings_are_read_by_frozen_encoders_alone(learned, given):
    batch = embedded()
    assert torch.equal(encode_batch(given, batch).embeddings, batch.text_embeds)
    assert get_precomputed(learned, batch) is None
    assert same(encode_batch(learned, batch), encode_captions(learned, CAPTIONS))
    batch.text_embeds[0, 3:] = 0  # without a mask: what is 0 is padding
    assert get_precomputed(given, batch).mask.sum(1).tolist() == [3, 5, 5]
    with pytest.raises(InputError, match="8 channels"):
        encode_batch(given, embedded(width=8))


def test_without_text_there_are_no_words():
    prompts = Prompts(Noise.for_rows(0, 0, 2), captions=["a", "b"])
    assert encode_batch(None, embedded(), torch.ones(3, dtype=torch.bool)) == TextEmbeddings(None, None)
    assert encode_prompts(None, prompts) == (TextEmbeddings(None, None), None)
    assert TextEmbeddings().join(TextEmbeddings()) == TextEmbeddings().detach() == TextEmbeddings()
    assert compute_cached_text(None, embedded()) == {}


def test_prompts(learned, given):
    noise = Noise.for_rows(0, 0, 3)
    null = encode_null(learned, 3, CPU)
    wanted, other = encode_prompts(learned, Prompts(noise, CAPTIONS))
    assert same(wanted, encode_captions(learned, CAPTIONS))
    assert same(other, null)
    _, other = encode_prompts(learned, Prompts(noise, CAPTIONS, negative=["bad"] * 3))
    assert same(other, encode_captions(learned, ["bad"] * 3))
    wanted, other = encode_prompts(learned, Prompts(noise))  # nothing is asked for
    assert same(wanted, null)
    assert other is None
    wanted, other = encode_prompts(given, Prompts(noise, batch=embedded()))
    assert torch.equal(wanted.embeddings, embedded().text_embeds)
    assert wanted.join(other).embeddings.shape == (6, 5, 16)  # the null is as long as what was given


def test_words_join_and_let_go_of_their_encoder(learned):
    a, b = encode_captions(learned, CAPTIONS[:1]), encode_captions(learned, CAPTIONS[1:])
    both = a.join(b)
    torch.testing.assert_close(both.embeddings, encode_captions(learned, CAPTIONS).embeddings)
    assert both.embeddings.requires_grad
    assert not both.detach().embeddings.requires_grad


def test_what_a_cache_may_hold(learned, given):
    assert compute_cached_text(learned, embedded()) == {}  # it changes while it learns
    batch = embedded()
    made = compute_cached_text(given, batch)
    assert made["text_embeds"] is batch.text_embeds
    assert made["text_mask"].all()
    assert compute_cached_text(given, Batch(torch.arange(2))) == {}


def test_a_blank_caption_is_the_null_text_in_a_cache_too(given, monkeypatch):
    """A tokenizer adds an end token, so that an empty caption has an encoding of its own."""

    def encode(captions):
        embeddings = torch.stack([torch.full((12, 16), float(len(caption))) for caption in captions])
        return embeddings, torch.ones(len(captions), 12, dtype=torch.bool)

    monkeypatch.setattr(given, "encode", encode)
    batch = Batch(torch.arange(3), captions=CAPTIONS)
    cached = Batch(torch.arange(3), captions=CAPTIONS, **compute_cached_text(given, batch))
    assert same(encode_batch(given, cached), encode_batch(given, batch))
    assert torch.equal(encode_batch(given, cached).embeddings[2], encode_null(given, 1, CPU).embeddings[0])


def test_captions_are_read_where_an_encoder_reads_them():
    assert "captions" in TextConfig().reads()
    assert "captions" not in TextConfig(kind="none").reads()
    assert "captions" not in TextConfig(kind="given", width=8).reads()
