"""NUWA's training: causality, scoring, padding, conditions."""

import pytest
import torch
import torch.nn.functional as F

from kineograph.core.batch import Batch, Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, load_weights, player_parameters, task_state_dict
from kineograph.family.nuwa import Nuwa, NuwaConfig
from kineograph.text.conditioning import encode_null

from .conftest import CAPTIONS, CODES, FRAMES, SIDE, PatchCodec, batch_of, train

PLACES = SIDE * SIDE
VARIANTS = [
    {},
    {"window": None},
    {"positions": "rotary"},
    {"token_shift": False},
    {"text": {"kind": "none"}},
    {"window": (9, 9, 9), "dilations": 1},
]


def value(task, batch, noise):
    return task.loss("model", task(batch, noise)).total.value()


def hidden(nuwa, tokens, batch):
    condition = nuwa.encode_batch(batch)
    return nuwa.network(tokens.flatten(1), *condition)


def test_found_by_name():
    assert find_task("nuwa") is Nuwa


def test_the_chunked_loss_equals_the_cross_entropy_of_all_logits(make, batch, noise):
    nuwa = make(label_smoothing=0.1).eval()
    tokens = nuwa.get_tokens(batch)
    logits = nuwa.head.logits(hidden(nuwa, tokens, batch))
    expected = F.cross_entropy(logits.transpose(1, 2), tokens.flatten(1), label_smoothing=0.1)
    found = nuwa.loss("model", nuwa(batch, noise))
    torch.testing.assert_close(found.total.value(), expected)
    right = (logits.argmax(-1) == tokens.flatten(1)).float().mean()
    torch.testing.assert_close(found.terms["accuracy"].value(), right)
    expected_gradients = torch.autograd.grad(expected, list(nuwa.parameters()), allow_unused=True)
    gradients = torch.autograd.grad(found.total.value(), list(nuwa.parameters()), allow_unused=True)
    for (name, _), a, b in zip(nuwa.named_parameters(), expected_gradients, gradients, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("keys", VARIANTS)
def test_no_token_sees_itself_or_later_ones(make, batch, keys):
    nuwa = make(**keys).eval()
    tokens = nuwa.get_tokens(batch)
    plain = hidden(nuwa, tokens, batch)
    for place in (0, 1, SIDE, PLACES - 1, PLACES, 2 * PLACES + 4):
        changed = tokens.flatten(1).clone()
        changed[:, place] = (changed[:, place] + 1) % CODES
        other = hidden(nuwa, changed.view_as(tokens), batch)
        assert torch.equal(other[:, : place + 1], plain[:, : place + 1])
        assert not torch.allclose(other[:, place + 1 :], plain[:, place + 1 :], atol=1e-4)


def test_a_block_sees_exactly_the_window_around_the_target(make, batch):
    """On all sides in earlier frames; nothing outside."""
    nuwa = make(depth=1, token_shift=False).eval()
    tokens = nuwa.get_tokens(batch)
    plain = hidden(nuwa, tokens, batch)
    target = (2, 1, 1)
    place = (target[0] * SIDE + target[1]) * SIDE + target[2]

    def moves(t, y, x):
        changed = tokens.clone()
        changed[:, t, y, x] = (changed[:, t, y, x] + 1) % CODES
        return not torch.equal(hidden(nuwa, changed, batch)[:, place], plain[:, place])

    assert all(moves(1, y, x) for y in range(SIDE) for x in range(SIDE))  # ±1 is all of a 3 × 3 frame
    assert all(moves(2, y, x) for y, x in ((0, 0), (0, 1), (0, 2), (1, 0)))
    assert not any(moves(0, y, x) for y in range(SIDE) for x in range(SIDE))  # two frames earlier
    corner = 2 * PLACES  # position (2, 0, 0) sees (1, 0 … 1, 0 … 1)
    seen = []
    for y, x in ((0, 0), (1, 1), (0, 2), (2, 0), (2, 2)):
        changed = tokens.clone()
        changed[:, 1, y, x] = (changed[:, 1, y, x] + 1) % CODES
        seen.append(not torch.equal(hidden(nuwa, changed, batch)[:, corner], plain[:, corner]))
    # (1, 2, 2) is what the position itself holds; attention sees (0, 0) and (1, 1) alone
    assert seen == [True, True, False, False, True]


def test_bos_is_not_a_codec_token(make, batch):
    nuwa = make()
    assert nuwa.network.bos == CODES == nuwa.vocabulary
    assert nuwa.network.tokens.num_embeddings == CODES + 1
    assert nuwa.head.vocabulary == CODES  # BOS is never sampled


def test_padding_is_neither_scored_nor_seen(make, noise):
    nuwa = make().eval()
    short, long = batch_of(4, frames=2), batch_of(4)
    long.pixels[:, :2] = short.pixels
    long.frame_mask = torch.tensor([[True, True, False, False]] * 4)
    found = nuwa.loss("model", nuwa(long, noise)).total
    assert float(found.count) == 4 * 2 * PLACES
    torch.testing.assert_close(found.value(), value(nuwa, short, noise))
    long.pixels[:, 2:] = 0
    torch.testing.assert_close(value(nuwa, long, noise), found.value())


def test_captions_are_dropped_in_training_at_the_given_rate_and_never_in_validation(make):
    nuwa = make(caption_dropout=0.25)
    rows = 256
    batch = Batch(
        slots=torch.arange(rows),
        tokens=torch.zeros(rows, 1, SIDE, SIDE, dtype=torch.int64),
        captions=[CAPTIONS[0]] * rows,
    )
    null = encode_null(nuwa.text, 1, torch.device("cpu"))
    counts = []
    inner = nuwa.network.forward

    def spy(tokens, text, mask, sketch):
        dropped = (mask == null.mask).all(1)
        torch.testing.assert_close(text[dropped], null.embeddings.expand(int(dropped.sum()), -1, -1))
        counts.append(int(dropped.sum()))
        return inner(tokens, text, mask, sketch)

    nuwa.network.forward = spy
    for step in range(4):
        nuwa(batch, Noise(0, step, batch.slots))
    assert sum(counts) / (4 * rows) == pytest.approx(0.25, abs=0.05)
    counts.clear()
    nuwa.eval()(batch, Noise(0, 0, batch.slots))
    assert counts == [0]


def test_captions_condition_every_token(make, batch):
    nuwa = make().eval()
    tokens = nuwa.get_tokens(batch)
    plain = hidden(nuwa, tokens, batch)
    batch.captions = [CAPTIONS[5], *batch.captions[1:]]
    other = hidden(nuwa, tokens, batch)
    assert bool(((other[0] - plain[0]).abs().amax(-1) > 1e-4).all())
    torch.testing.assert_close(other[1:], plain[1:])


def test_the_text_encoder_is_trained(make, batch, noise):
    nuwa = make()
    value(nuwa, batch, noise).backward()
    assert nuwa.text.tokens.weight.grad.abs().sum() > 0
    assert nuwa.text.transformer in nuwa.compile_targets()


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_part_of_the_gradient_reaches_the_token_embeddings(make, batch, noise, share):
    losses, gradients = [], []
    for fraction in (1.0, share):
        nuwa = make(embedding_gradient=fraction)
        loss = value(nuwa, batch, noise)
        loss.backward()
        losses.append(loss.detach())
        gradients.append((nuwa.network.tokens.weight.grad, nuwa.head.weight.grad))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0][0] * share, gradients[1][0])
    torch.testing.assert_close(gradients[0][1], gradients[1][1])
    assert gradients[0][0].abs().sum() > 0


@pytest.mark.parametrize("keys", [*VARIANTS, {"embedding_gradient": 0.5}])
def test_every_parameter_gets_a_gradient_at_every_step(make, batch, keys):
    nuwa = make(**keys)
    for step in range(2):
        nuwa.zero_grad(set_to_none=True)
        value(nuwa, batch, Noise(0, step, batch.slots)).backward()
        assert [name for name, p in nuwa.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("positions", "rotary"),
        ("token_shift", False),
        ("window", None),
        ("window", (3, 3, 3)),
        ("dilations", (1,)),
        ("label_smoothing", 0.2),
    ],
)
def test_options_do_something(make, batch, noise, key, other):
    assert float(value(make(), batch, noise).detach()) != float(value(make(**{key: other}), batch, noise).detach())


def test_dilations_cycle_over_the_blocks(make):
    nuwa = make(depth=5, dilations=(1, 2, 4))
    assert [block.attention.window.dilation for block in nuwa.network.blocks] == [1, 2, 4, 1, 2]


def test_one_player_owns_everything_but_the_codec(make):
    nuwa = make()
    assert player_parameters(nuwa, "model").keys() == dict(nuwa.named_parameters()).keys()
    assert not any(name.startswith(("stages", "decode_step")) for name, _ in nuwa.named_parameters())
    assert set(nuwa.blocks()) == set(nuwa.network.blocks)
    assert nuwa.tokens_per_clip() == FRAMES * PLACES
    assert {nuwa.network, nuwa.decode_step} <= set(nuwa.compile_targets())
    assert nuwa.can_continue()


@pytest.mark.parametrize("keys", [{}, {"window": None, "positions": "rotary"}])
def test_activation_checkpointing_gives_the_same_gradients(make, batch, noise, keys):
    from kineograph.train.activation_checkpointing import checkpoint_activations

    gradients = []
    for again in (False, True):
        nuwa = make(**keys)
        for block in nuwa.blocks() if again else []:
            checkpoint_activations(block)
        value(nuwa, batch, noise).backward()
        gradients.append([p.grad for p in nuwa.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("keys", VARIANTS)
def test_half_precision_stays_finite(make, batch, noise, keys):
    nuwa = make(**keys)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = value(nuwa, batch, noise)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(bool(p.grad.isfinite().all()) for p in nuwa.parameters())
    exact = value(nuwa, batch, noise)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.02)


def test_cached_tokens_give_the_same_loss(make, batch, noise, codec):
    nuwa = make().eval()
    from_pixels = value(nuwa, batch, noise)
    made = nuwa.precompute(batch)
    assert made.keys() == {"tokens"}  # the text encoder is trained
    calls = codec.calls
    cached = Batch(slots=batch.slots, tokens=made["tokens"], captions=batch.captions)
    torch.testing.assert_close(value(nuwa, cached, noise), from_pixels)
    assert codec.calls == calls
    cached.tokens = torch.zeros(4, FRAMES, 2, 2, dtype=torch.int64)
    with pytest.raises(InputError, match=r"data\.size"):
        nuwa(cached, noise)
    cached.tokens = torch.zeros(4, FRAMES + 1, SIDE, SIDE, dtype=torch.int64)
    with pytest.raises(InputError, match=r"data\.frames"):
        nuwa(cached, noise)


def test_frozen_text_embeddings_are_cached(make, batch):
    nuwa = make(text={"kind": "given", "width": 24, "length": 5})
    batch.text_embeds = torch.randn(4, 5, 24)
    assert nuwa.precompute(batch).keys() == {"tokens", "text_embeds", "text_mask"}


def test_micro_batches_join_to_the_whole(make):
    nuwa = make().eval()
    whole = batch_of(6)
    whole.frame_mask = torch.arange(FRAMES) < torch.tensor([4, 2, 4, 1, 3, 4])[:, None]
    total = nuwa.loss("model", nuwa(whole, Noise(3, 4, whole.slots))).total
    sums, counts = 0.0, 0.0
    for rows in ([0, 1], [2, 3, 4, 5]):
        part = whole.rows(rows)
        mean = nuwa.loss("model", nuwa(part, Noise(3, 4, part.slots))).total
        sums, counts = sums + mean.sum, counts + mean.count
    torch.testing.assert_close(sums / counts, total.value())


def test_validation_is_deterministic(make, batch, noise):
    nuwa = make(dropout=0.5).eval()
    with torch.no_grad():
        first, second = nuwa.validate(batch, noise), nuwa.validate(batch, noise)
    assert {"loss", "cross_entropy", "accuracy", "tokens/distinct", "tokens/entropy"} == first.keys()
    assert all(torch.equal(first[name].sum, second[name].sum) for name in first)
    nuwa.train()
    torch.manual_seed(0)
    assert float(value(nuwa, batch, noise).detach()) != float(value(nuwa, batch, noise).detach())


def test_unconditional_needs_no_captions(make, batch, noise):
    nuwa = make(text={"kind": "none"})
    batch.captions = None
    assert nuwa.network.blocks[0].cross is None
    assert "captions" not in nuwa.reads
    assert "captions" not in nuwa.config.reads()
    value(nuwa, batch, noise).backward()
    with pytest.raises(InputError, match=r"text\.kind=none"):
        make()(batch, noise)


def test_settings_that_do_not_fit_are_refused(make):
    with pytest.raises(ConfigError, match="codec=latents gives no tokens"):
        make(stages={"latents": PatchCodec(vocabulary=None)}, codec="latents")
    for tree, message in (
        ({"window": [5, 2, 3]}, "odd"),
        ({"window": [0, 3, 3]}, "odd|at least 1"),
        ({"dilations": [1, 0]}, "at least 1"),
        ({"dilations": [3], "window": None}, "has no effect with window=null"),
        ({"sketch_dropout": 0.5}, "has no effect with sketch=null"),
        ({"sketch": "s", "sketch_window": [3, 4, 3]}, "odd"),
        ({"caption_droput": 0.1}, r"did you mean stages\.x\.caption_dropout"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(NuwaConfig, {"codec": "t", **tree}, "stages.x")
    assert parse(NuwaConfig, {"codec": "t", "dilations": 2}).dilations == (2,)


def test_a_rebuilt_stage_needs_no_captions(make, batch, noise, codec):
    nuwa = make().eval()

    def never():
        raise AssertionError("asked for captions")

    shape = Shape(FRAMES, 4 * SIDE, 4 * SIDE, 3, 8.0)
    context = BuildContext(shape, stage=lambda name: codec, captions=never, assets=nuwa.assets())
    again = Nuwa.build(nuwa.config, context).eval()
    load_weights(again, task_state_dict(nuwa))
    torch.testing.assert_close(value(again, batch, noise), value(nuwa, batch, noise))


def test_training_lowers_the_loss(make, batch):
    losses = train(make(dropout=0.1), batch, 25)
    assert losses[-1] < losses[0] - 0.5
