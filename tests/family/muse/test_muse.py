"""Training of Muse: masking, loss, conditions."""

import pytest
import torch
import torch.nn.functional as F

from kineograph.core.batch import Batch
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import player_parameters
from kineograph.family.muse import Muse, MuseConfig
from kineograph.process.masking import mask_tokens
from kineograph.text.conditioning import encode_captions, encode_null

from .conftest import CAPTIONS, PatchCodec, batch_of, train


def value(task, batch, noise):
    return task.loss("model", task(batch, noise)).total.value()


def test_found_by_name():
    assert find_task("muse") is Muse


def test_loss_on_masked_rows_equals_that_of_all_logits(make, batch, noise):
    muse = make(label_smoothing=0.1).eval()
    tokens = muse.get_tokens(batch)
    mask = mask_tokens(noise, 16).mask
    condition = muse.encode_batch(batch)
    logits = muse.head.logits(muse.compute_hidden(tokens.masked_fill(mask, muse.mask_id), condition))
    expected = F.cross_entropy(logits[mask], tokens[mask], label_smoothing=0.1)
    loss = muse.loss("model", muse(batch, noise))
    torch.testing.assert_close(loss.total.value(), expected)
    torch.testing.assert_close(loss.terms["accuracy"].value(), (logits.argmax(-1) == tokens)[mask].float().mean())
    names = [name for name, p in muse.named_parameters()]
    expected_gradients = torch.autograd.grad(expected, list(muse.parameters()), allow_unused=True)
    gradients = torch.autograd.grad(loss.total.value(), list(muse.parameters()), allow_unused=True)
    for name, a, b in zip(names, expected_gradients, gradients, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)


def test_masked_tokens_are_not_read(make, batch, noise):
    muse = make().eval()
    tokens, condition = muse.get_tokens(batch), muse.encode_batch(batch)
    mask = mask_tokens(noise, 16).mask
    changed = torch.where(mask, (tokens + 3) % 16, tokens)
    a, b = (muse.predict(t, condition, noise)[1] for t in (tokens, changed))
    assert torch.equal(a, b)


def test_captions_condition_the_network_and_empty_ones_are_the_null_text(make, noise):
    muse = make().eval()
    tokens = torch.full((2, 16), muse.mask_id)
    both = Batch(slots=torch.arange(2), captions=["a red one", "a blue one"])
    hidden = muse.compute_hidden(tokens, muse.encode_batch(both))
    assert not torch.allclose(hidden[0], hidden[1], atol=1e-3)
    text, mask = encode_captions(muse.text, ["", "  "])
    null, null_mask = encode_null(muse.text, 2, torch.device("cpu"))
    torch.testing.assert_close(text, null)
    assert torch.equal(mask, null_mask)


def test_captions_are_dropped_in_training_at_the_given_rate_and_never_in_validation(make):
    muse = make(caption_dropout=0.25)
    rows = 256
    batch = Batch(
        slots=torch.arange(rows), tokens=torch.zeros(rows, 1, 4, 4, dtype=torch.int64), captions=[CAPTIONS[0]] * rows
    )
    null = encode_null(muse.text, 1, torch.device("cpu"))
    counts = []
    inner = muse.network.forward

    def spy(tokens, text, mask, *rest):
        dropped = (mask == null[1]).all(1)
        torch.testing.assert_close(text[dropped], null[0].expand(int(dropped.sum()), -1, -1))  # the null of sampling
        counts.append(int(dropped.sum()))
        return inner(tokens, text, mask, *rest)

    muse.network.forward = spy
    for step in range(4):
        muse(batch, Noise(0, step, batch.slots))
    assert sum(counts) / (4 * rows) == pytest.approx(0.25, abs=0.05)
    assert len(set(counts)) > 1
    counts.clear()
    muse.eval()(batch, Noise(0, 0, batch.slots))
    assert counts == [0]


def test_null_text_gets_a_gradient(make, batch, noise):
    muse = make(caption_dropout=1.0)
    value(muse, batch, noise).backward()
    assert muse.text.null.token.grad.abs().sum() > 0


def test_the_player_owns_all_but_the_codec(make, codec):
    muse = make(critic="self", self_conditioning=True)
    assert player_parameters(muse, "model").keys() == dict(muse.named_parameters()).keys()
    assert not any(name.startswith("stages") for name, _ in muse.named_parameters())
    assert set(muse.blocks()) == set(muse.network.transformer.blocks)
    assert muse.tokens_per_clip() == 16
    assert {muse.network, muse.text.transformer} <= set(muse.compile_targets())


@pytest.mark.parametrize("keys", [{}, {"critic": "self"}, {"self_conditioning": True}, {"text": {"kind": "none"}}])
def test_every_parameter_gets_a_gradient_at_every_step(make, batch, keys):
    muse = make(**keys)
    for step in range(2):
        muse.zero_grad(set_to_none=True)
        value(muse, batch, Noise(0, step, batch.slots)).backward()
        assert [name for name, p in muse.named_parameters() if p.grad is None] == []


def test_validation_is_deterministic_and_reports_accuracy(make, batch, noise):
    muse = make(critic="self").eval()
    with torch.no_grad():
        first, second = muse.validate(batch, noise), muse.validate(batch, noise)
    ranges = {name for name in first if name.startswith("loss/masked")}
    named = {"loss", "cross_entropy", "accuracy", "critic", "tokens/distinct", "tokens/entropy"}
    assert first.keys() - ranges == named and len(ranges) == 4
    total = sum(float(first[name].sum) for name in ranges)
    assert total == pytest.approx(float(first["cross_entropy"].sum), rel=1e-5)
    assert all(torch.equal(first[name].sum, second[name].sum) for name in first)
    assert 0 <= float(first["accuracy"].value()) <= 1


def test_micro_batches_add_up(make):
    muse = make().eval()
    whole = batch_of(6)
    noise = Noise(3, 4, whole.slots)
    total = muse.loss("model", muse(whole, noise)).total
    sums, counts = 0.0, 0.0
    for start, stop in ((0, 2), (2, 6)):
        part = Batch(
            slots=whole.slots[start:stop], pixels=whole.pixels[start:stop], captions=whole.captions[start:stop]
        )
        mean = muse.loss("model", muse(part, Noise(3, 4, part.slots))).total
        sums, counts = sums + mean.sum, counts + mean.count
    torch.testing.assert_close(sums / counts, total.value())


def test_cached_tokens_replace_the_codec(make, batch, noise, codec):
    muse = make().eval()
    from_pixels = value(muse, batch, noise)
    calls = codec.calls
    cached = Batch(slots=batch.slots, tokens=codec.encode(batch.video), captions=batch.captions)
    torch.testing.assert_close(value(muse, cached, noise), from_pixels)
    assert codec.calls == calls + 1  # by this test alone
    with pytest.raises(InputError, match=r"data\.size"):
        muse(
            Batch(slots=batch.slots, tokens=torch.zeros(4, 1, 2, 2, dtype=torch.int64), captions=batch.captions), noise
        )


def test_text_embeddings_in_the_data_are_used(make, batch, noise):
    muse = make(text={"kind": "given", "width": 24, "length": 5})
    muse.eval()
    losses = []
    for seed in (0, 1):
        batch.text_embeds = torch.randn(4, 5, 24, generator=torch.Generator().manual_seed(seed))
        losses.append(float(value(muse, batch, noise).detach()))
    assert losses[0] != losses[1]
    masked = batch.text_embeds.clone()
    batch.text_mask = torch.tensor([[True, True, False, False, False]] * 4)
    short = value(muse, batch, noise)
    masked[:, 2:] = 9.0
    batch.text_embeds = masked
    torch.testing.assert_close(value(muse, batch, noise), short)
    batch.text_embeds = torch.zeros(4, 5, 8)
    with pytest.raises(InputError, match="8 channels"):
        muse(batch, noise)


def test_learned_encoder_ignores_stored_embeddings(make, batch, noise):
    muse = make().eval()
    plain = value(muse, batch, noise)
    batch.text_embeds, batch.text_mask = torch.randn(4, 16, 32), torch.ones(4, 16, dtype=torch.bool)
    torch.testing.assert_close(value(muse, batch, noise), plain)


def test_unconditional_needs_no_captions(make, batch, noise):
    muse = make(text={"kind": "none"})
    batch.captions = None
    assert muse.network.transformer.blocks[0].cross is None
    assert "captions" not in muse.reads
    assert "captions" not in muse.config.reads()
    value(muse, batch, noise).backward()
    with pytest.raises(InputError, match=r"text\.kind=none"):
        make()(batch, noise)


@pytest.fixture
def conditioned(make):
    """A self-conditioned Muse, and what its network has read of the step before: 0 for nothing."""
    muse = make(self_conditioning=True)
    calls = []
    inner = muse.network.forward

    def spy(tokens, text, mask, low, previous, *rest):
        calls.append(float(previous.abs().sum()))
        return inner(tokens, text, mask, low, previous, *rest)

    muse.network.forward = spy
    return muse, calls


def test_self_conditioning_reads_the_last_hidden_states_on_some_steps(conditioned, batch):
    muse, calls = conditioned
    for step in range(20):
        muse(batch, Noise(0, step, batch.slots))
    assert 22 <= len(calls) <= 38
    assert any(calls)
    assert not all(calls)
    tokens, condition = muse.get_tokens(batch), muse.encode_batch(batch)
    a = muse.compute_hidden(tokens, condition)
    assert not torch.allclose(a, muse.compute_hidden(tokens, condition, torch.randn(4, 16, 32)), atol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_validation_self_conditions_as_sampling_does(conditioned, batch, seed):
    """Whatever the seed: every validation of a run has one key, and half of all keys chose a single pass."""
    muse, calls = conditioned
    muse.eval().validate(batch, Noise(seed, 0, batch.slots))
    assert len(calls) == 2 and calls[0] == 0 and calls[1] > 0


@pytest.mark.parametrize(("key", "other"), [("positions", "sincos"), ("rotary", False), ("label_smoothing", 0.2)])
def test_options_change_the_loss(make, batch, noise, key, other):
    assert float(value(make(), batch, noise).detach()) != float(value(make(**{key: other}), batch, noise).detach())


def test_shapes_that_do_not_fit_are_refused(make):
    with pytest.raises(ConfigError, match=r"data.frames=4 .*data.frames=1"):
        make(frames=4)
    with pytest.raises(ConfigError, match="codec=latents gives no tokens"):
        make(stages={"latents": PatchCodec(vocabulary=None)}, codec="latents")
    with pytest.raises(ConfigError, match=r"did you mean stages\.x\.caption_dropout"):
        parse(MuseConfig, {"task": "muse", "codec": "t", "caption_droput": 0.1}, "stages.x")


def test_a_rebuilt_stage_needs_no_captions(make, batch, noise, codec):
    muse = make().eval()
    from kineograph.core.batch import Shape
    from kineograph.core.task import BuildContext, load_weights, task_state_dict

    def never():
        raise AssertionError("captions were read")

    context = BuildContext(Shape(1, 16, 16, 3, 8.0), stage=lambda name: codec, captions=never, assets=muse.assets())
    again = Muse.build(muse.config, context).eval()
    load_weights(again, task_state_dict(muse))
    torch.testing.assert_close(value(again, batch, noise), value(muse, batch, noise))


def test_parameter_count_of_the_peer(monkeypatch):
    """8 layers, width 512, 256 tokens, 65,536 codes, text 768: muse-maskgit-pytorch has 103.3 million parameters."""
    from kineograph.core.batch import Shape
    from kineograph.core.task import BuildContext

    config = parse(
        MuseConfig,
        {
            "task": "muse",
            "codec": "t",
            "width": 512,
            "depth": 8,
            "heads": 8,
            "text": {"kind": "given", "width": 768, "length": 64},
        },
    )
    with torch.device("meta"):
        muse = Muse.build(config, BuildContext(Shape(1, 256, 256, 3, 8.0), stage=lambda name: PatchCodec(65536, 16)))
    assert sum(p.numel() for p in muse.parameters()) == pytest.approx(103.3e6, rel=0.05)


def test_training_lowers_the_loss_and_dropout_is_active(make, batch):
    losses = train(make(dropout=0.1), batch, 25)
    assert losses[-1] < losses[0] - 0.5
    muse = make(dropout=0.5)
    noise = Noise(0, 0, batch.slots)
    assert value(muse, batch, noise) != value(muse, batch, noise)
