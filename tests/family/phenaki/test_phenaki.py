"""Phenaki's training: masking, scoring, padding, conditions."""

import pytest
import torch
import torch.nn.functional as F

from kineograph.codec.vqgan import VQGAN, VQGANConfig
from kineograph.core.batch import Batch, Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, freeze, load_weights, player_parameters, task_state_dict
from kineograph.family.phenaki import Phenaki, PhenakiConfig
from kineograph.process.masking import mask_tokens
from tests.nn.made_tensors import made_tensors

from .conftest import CAPTIONS, VOCABULARY, ClipCodec, batch_of, clips, train


def value(task, batch, noise):
    return task.loss(task.players[0], task(batch, noise)).total.value()


def test_found_by_name():
    assert find_task("phenaki") is Phenaki


@pytest.mark.parametrize("bias", [1.0, 3.0])
def test_loss_is_the_cross_entropy_of_masked_tokens(make, batch, noise, bias):
    task = make(label_smoothing=0.1, mask_bias=bias).eval()
    found, words = task.get_clips(batch), task.encode_text(batch, noise, drop=False)
    assert found.tokens.shape == (4, 12)
    assert found.keep is None
    mask = mask_tokens(noise, 12, bias=bias).mask
    logits = task.head.logits(
        task.compute_hidden(found.replace_tokens(found.tokens.masked_fill(mask, task.mask_id)), words)
    )
    expected = F.cross_entropy(logits[mask], found.tokens[mask], label_smoothing=0.1)
    loss = task.loss("generator", task(batch, noise))
    torch.testing.assert_close(loss.total.value(), expected)
    right = (logits.argmax(-1) == found.tokens)[mask].float().mean()
    torch.testing.assert_close(loss.terms["accuracy"].value(), right)


def test_masked_tokens_are_invisible(make, batch, noise):
    task = make().eval()
    found, words = task.get_clips(batch), task.encode_text(batch, noise, drop=False)
    mask = mask_tokens(noise, 12).mask
    changed = found.replace_tokens(torch.where(mask, (found.tokens + 3) % VOCABULARY, found.tokens))
    a, b = (task.predict(c, words, noise)[1] for c in (found, changed))
    assert torch.equal(a, b)


# padding


def mixed() -> tuple[Batch, list[Batch]]:
    """An image, a whole clip and one of three frames in a batch, and each alone."""
    whole = batch_of(3)
    lengths = (1, 5, 3)
    mask = torch.stack([torch.arange(5) < length for length in lengths])
    pixels = torch.where(mask[:, :, None, None, None], whole.pixels, whole.pixels[:, :1])  # something else stands there
    alone = [
        Batch(slots=torch.tensor([row]), pixels=pixels[row : row + 1, :length], captions=[whole.captions[row]])
        for row, length in enumerate(lengths)
    ]
    return Batch(slots=torch.arange(3), pixels=pixels, frame_mask=mask, captions=whole.captions), alone


def test_an_image_in_a_batch_of_clips_is_as_it_is_alone(make):
    task = make().eval()
    together, alone = mixed()
    found = task.get_clips(together)
    words = task.encode_text(together, Noise(1, 2, together.slots), drop=False)
    hidden = task.compute_hidden(found, words)
    for row, single in enumerate(alone):
        own = task.get_clips(single)
        assert own.keep is None
        length = own.tokens.shape[1]
        assert found.keep[row].sum() == length
        torch.testing.assert_close(
            hidden[row, :length],
            task.compute_hidden(own, task.encode_text(single, None, drop=False))[0],
            atol=1e-5,
            rtol=1e-4,
        )


@pytest.mark.parametrize("critic", ["self", "network"])
def test_losses_of_padded_clips_are_the_sums_of_their_own(make, critic):
    task = make(critic=critic).eval()
    together, alone = mixed()
    shared = task(together, Noise(1, 2, together.slots))
    parts = [task(single, Noise(1, 2, single.slots)) for single in alone]
    for player in task.players:
        whole = task.loss(player, shared)
        each = [task.loss(player, part) for part in parts]
        assert float(whole.total.count) == sum(float(loss.total.count) for loss in each) < 3 * 12
        for name in ("total", *(name for name in whole.terms if not name.startswith("tokens/"))):  # those of a batch
            means = [loss.total if name == "total" else loss.terms[name] for loss in (whole, *each)]
            torch.testing.assert_close(means[0].sum, sum(mean.sum for mean in means[1:]), atol=1e-3, rtol=1e-4)


def test_padding_is_neither_hidden_scored_nor_seen(make, noise):
    task = make(critic="self")
    together, _ = mixed()
    found = task.get_clips(together)
    noise = Noise(1, 2, together.slots)
    masked = mask_tokens(noise, 12, found.keep)
    assert not (masked.mask & ~found.keep).any()
    assert found.keep.flatten()[masked.rows[masked.weights > 0]].all()
    changed = Batch(together.slots, together.pixels.clone(), together.frame_mask, captions=together.captions)
    changed.pixels[~together.frame_mask] = 255
    assert torch.equal(value(task, together, noise), value(task, changed, noise))
    assert not torch.equal(task.get_tokens(together), task.get_tokens(changed))  # the padding did differ


def test_a_frame_mask_that_is_not_of_this_clip_is_refused(make, noise):
    batch = Batch(noise.slots, tokens=clips(4), frame_mask=torch.ones(4, 3, dtype=torch.bool), captions=CAPTIONS[:4])
    with pytest.raises(InputError, match="3 frames stands for 2 latent frames, and the tokens have 3"):
        make()(batch, noise)


# conditions


def test_captions_are_dropped_in_training_at_the_given_rate_and_never_in_validation(make):
    task = make(caption_dropout=0.25)
    rows = 256
    batch = Batch(slots=torch.arange(rows), tokens=clips(rows), captions=[CAPTIONS[0]] * rows)
    null = task.text.drop(*task.text.encode(["x"]), torch.tensor([True]))
    counts = []
    inner = task.network.forward

    def spy(tokens, grid, text, mask, *rest):
        dropped = (mask == null[1]).all(1)
        torch.testing.assert_close(text[dropped], null[0].expand(int(dropped.sum()), -1, -1))  # the null of sampling
        counts.append(int(dropped.sum()))
        return inner(tokens, grid, text, mask, *rest)

    task.network.forward = spy
    for step in range(4):
        task(batch, Noise(0, step, batch.slots))
    assert sum(counts) / (4 * rows) == pytest.approx(0.25, abs=0.05)
    assert len(set(counts)) > 1
    counts.clear()
    task.eval()(batch, Noise(0, 0, batch.slots))
    assert counts == [0]


def test_typed_fields_tokens_embeddings_and_masks(make, noise, codec):
    """What a user's own Dataset gives: video_codebook_ids, video_frame_mask, text_embeds."""
    task = make(text={"kind": "given", "width": 24, "length": 5}).eval()
    batch = Batch(
        noise.slots,
        tokens=clips(4),
        frame_mask=torch.arange(5)[None] < torch.tensor([[1], [3], [5], [5]]),
        text_embeds=torch.randn(4, 5, 24, generator=torch.Generator().manual_seed(0)),
        text_mask=torch.tensor([[True, True, False, False, False]] * 4),
    )
    loss = value(task, batch, noise)
    assert not codec.encoded  # nothing was encoded
    assert "captions" not in task.reads
    assert "captions" not in task.config.reads()

    def with_(**changes):
        return value(task, Batch(**{**vars(batch), **changes}), noise)

    padded = batch.tokens.clone()
    padded[0, 1:] = 3
    assert torch.equal(with_(tokens=padded), loss)
    embeds = batch.text_embeds.clone()
    embeds[:, 2:] = 9
    assert torch.equal(with_(text_embeds=embeds), loss)
    assert not torch.equal(with_(text_embeds=batch.text_embeds * 2), loss)
    assert not torch.equal(with_(text_mask=None), loss)
    assert not torch.equal(with_(frame_mask=None), loss)
    with pytest.raises(InputError, match="8 channels"):
        with_(text_embeds=torch.zeros(4, 5, 8))


def test_unconditional_needs_no_captions(make, batch, noise):
    task = make(text={"kind": "none"})
    batch.captions = None
    assert task.network.transformer.blocks[0].cross is None
    assert "captions" not in task.reads
    value(task, batch, noise).backward()
    with pytest.raises(InputError, match=r"text\.kind=none"):
        make()(batch, noise)


def test_cached_tokens_and_masks_give_the_same_loss(make, codec):
    task = make().eval()
    together, _ = mixed()
    noise = Noise(1, 2, together.slots)
    made = task.precompute(together)
    cached = Batch(together.slots, tokens=made["tokens"], frame_mask=made["frame_mask"], captions=together.captions)
    calls = len(codec.encoded)
    assert torch.equal(value(task, cached, noise), value(task, Batch(**vars(together)), noise))
    assert len(codec.encoded) == calls + 1  # for the pixels alone
    assert Phenaki.can_cache(task.config)
    whole = batch_of(3)
    assert task.precompute(whole)["frame_mask"].all()
    assert task.precompute(whole)["frame_mask"].shape == (3, 5)
    assert "frame_mask" not in make(frames=1).precompute(batch_of(3, times=1))
    given = make(text={"kind": "given", "width": 24, "length": 5})
    whole.text_embeds = torch.randn(3, 5, 24)
    assert torch.equal(given.precompute(whole)["text_embeds"], whole.text_embeds)
    assert given.precompute(whole)["text_mask"].all()


def test_tokens_of_another_size_are_refused(make, noise):
    task = make()
    for times, size in ((3, 12), (4, 8)):
        with pytest.raises(InputError, match=r"data\.size or data\.frames"):
            task(Batch(noise.slots, tokens=clips(4, times, size), captions=CAPTIONS[:4]), noise)
    value(task, Batch(noise.slots, tokens=clips(4, 2), captions=CAPTIONS[:4]), noise)  # shorter clips are welcome


# the network


def test_any_grid_is_as_if_built_for_it(make):
    small, large = (make(frames=frames, size=size).eval() for frames, size in ((1, 8), (5, 16)))
    load_weights(small, task_state_dict(large))
    tokens = clips(2, 3, 16).flatten(1)
    text, mask = large.text.encode(CAPTIONS[:2])
    a, b = (task.network(tokens, (3, 4, 4), text, mask) for task in (small, large))
    torch.testing.assert_close(a, b)
    assert not torch.allclose(a, small.network(tokens, (4, 3, 4), text, mask), atol=1e-3)  # the shape does matter
    torch.testing.assert_close(large.network(tokens, None, text, mask), b)  # as trained by default


@pytest.mark.parametrize("rotary", [True, False])
def test_every_axis_is_told_apart(make, rotary):
    network = make(text={"kind": "none"}, rotary=rotary).network
    with torch.no_grad():
        hidden = network(torch.full((1, 12), 3))[0]  # alike everywhere: places alone differ
    assert torch.pdist(hidden).min() > 1e-3


@pytest.mark.parametrize("rotary", [True, False])
def test_positions_make_nothing_of_the_size_of_all_pairs(make, rotary):
    """No bias for every pair of tokens: that is gigabytes at 17 frames, and shuts out fused attention."""
    task = make(rotary=rotary, frames=9, size=16, text={"kind": "none"})
    places = task.tokens_per_clip()
    assert places == 80
    batch = batch_of(2, 5, 16)
    with made_tensors() as made:
        value(task.train(), batch, Noise(0, 0, batch.slots)).backward()
    assert any(shape.count(places) == 1 for _, shape in made)
    assert not [shape for _, shape in made if shape.count(places) > 1]


def test_memory_of_the_text_is_the_text(make):
    task = make().eval()
    tokens = clips(2).flatten(1)
    words = task.encode_text(Batch(torch.arange(2), captions=CAPTIONS[:2]), None, drop=False)
    cached = task.network(tokens, None, None, words.mask, None, task.network.memory(words))
    torch.testing.assert_close(cached, task.network(tokens, None, *words))


def test_every_tensor_of_an_image_generator_fits_the_video_generator(make):
    for keys in ({}, {"critic": "network"}, {"critic": "self"}):
        image, video = (task_state_dict(make(frames=frames, **keys)) for frames in (1, 5))
        assert {name: value.shape for name, value in image.items()} == {
            name: value.shape for name, value in video.items()
        }
    larger = task_state_dict(make(frames=5, size=16))
    assert {name: value.shape for name, value in task_state_dict(make()).items()} == {
        n: v.shape for n, v in larger.items()
    }


def test_images_then_video(make):
    """Text to image first (T = 1), then the same weights on clips."""
    image = make(frames=1)
    pictures = batch_of(8, times=1)
    losses = train(image, pictures, 30)["generator"]
    assert losses[-1] < losses[0] - 0.5
    video, fresh = make(seed=5), make(seed=5)
    load_weights(video, task_state_dict(image))
    noise = Noise(0, 0, pictures.slots)
    for task in (video, fresh):
        task.eval()
    torch.testing.assert_close(value(video, pictures, noise), value(image, pictures, noise))
    with torch.no_grad():
        assert float(value(video, pictures, noise)) < float(value(fresh, pictures, noise)) - 0.3


def test_vqgan_is_a_codec_of_clips_frame_by_frame(make):
    torch.manual_seed(0)
    keys = {"task": "vqgan", "width": 16, "multipliers": [1, 1], "quantizer": {"kind": "fsq", "levels": [4, 4]}}
    codec = VQGAN.build(parse(VQGANConfig, keys | {"perceptual": {"weight": 0}}), BuildContext(Shape(1, 8, 8, 3, 8.0)))
    task = make(stages={"frames": freeze(codec)}, codec="frames", frames=4)
    assert task.grid == (4, 2, 2)
    batch = Batch(torch.arange(2), pixels=torch.randint(0, 256, (2, 4, 3, 8, 8), dtype=torch.uint8))
    batch.captions, batch.frame_mask = CAPTIONS[:2], torch.tensor([[True] * 4, [True, True, False, False]])
    assert task.get_clips(batch).keep.sum(1).tolist() == [16, 8]
    value(task, batch, Noise(0, 0, batch.slots)).backward()


# the stage


@pytest.mark.parametrize("keys", [{}, {"critic": "self"}, {"text": {"kind": "none"}}])
def test_every_parameter_gets_a_gradient(make, batch, noise, keys):
    task = make(**keys)
    value(task, batch, noise).backward()
    assert [name for name, p in task.named_parameters() if p.grad is None] == []
    assert player_parameters(task, "generator").keys() == dict(task.named_parameters()).keys()


def test_blocks_compile_targets_and_assets(make):
    task = make(critic="network")
    assert set(task.blocks()) == {*task.network.transformer.blocks, *task.critic.network.transformer.blocks}
    assert {task.network, task.critic.network, task.head.softmax, task.text.transformer} == set(task.compile_targets())
    assert task.tokens_per_clip() == 12
    assert task.assets().keys() == {"text/tokenizer.json"}
    assert task.can_continue()


def test_validation_is_deterministic_and_tells_the_critic_apart(make, batch, noise):
    task = make(critic="network", dropout=0.3).eval()
    with torch.no_grad():
        first, second = task.validate(batch, noise), task.validate(batch, noise)
    critic = {"critic/loss", "critic/accuracy", "critic/wrong"}
    ranges = {name for name in first if name.startswith("loss/masked")}
    named = {"loss", "cross_entropy", "accuracy", "tokens/distinct", "tokens/entropy", *critic}
    assert first.keys() - ranges == named and len(ranges) == 4
    assert all(torch.equal(first[name].sum, second[name].sum) for name in first)
    torch.testing.assert_close(first["loss"].value(), first["cross_entropy"].value())


def test_micro_batches_join_to_the_whole(make):
    task = make().eval()
    whole = batch_of(6)
    total = task.loss("generator", task(whole, Noise(3, 4, whole.slots))).total
    parts = [whole.rows(rows) for rows in ([0, 1], [2, 3, 4, 5])]
    means = [task.loss("generator", task(part, Noise(3, 4, part.slots))).total for part in parts]
    torch.testing.assert_close(sum(m.sum for m in means) / sum(m.count for m in means), total.value())


@pytest.mark.parametrize("change", [{"rotary": False}, {"label_smoothing": 0.2}, {"caption_dropout": 0.9}])
def test_options_do_something(make, batch, noise, change):
    assert float(value(make(), batch, noise).detach()) != float(value(make(**change), batch, noise).detach())


def test_what_does_not_fit_is_refused(make):
    with pytest.raises(ConfigError, match="frames=4"):
        make(frames=4)
    with pytest.raises(ConfigError, match="codec=latents gives no tokens"):
        make(stages={"latents": ClipCodec(vocabulary=None)}, codec="latents")
    with pytest.raises(ConfigError, match=r"sample.overlap=2 does not fit windows of 5 frames.*use 1, 3"):
        make(sample={"overlap": 2})
    for keys, message in (
        ({"only": "generator"}, "critic=none"),
        ({"only": "critic", "critic": "self"}, "needs a trained generator: name it with init"),
        ({"critic": "self", "critic_depth": 2}, "critic_depth has no effect with critic=self: .*critic=network"),
        ({"critic": "network", "critic_weight": 2.0}, "critic_weight has no effect with critic=network: .*critic=self"),
        ({"critic": "network", "critic_heads": 5}, "multiple of 2 × heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(**keys)


def test_a_rebuilt_stage_needs_no_captions(make, batch, noise, codec):
    task = make().eval()

    def never():
        raise AssertionError("asked for captions")

    context = BuildContext(task.shape, stage=lambda name: codec, captions=never, assets=task.assets())
    again = Phenaki.build(task.config, context).eval()
    load_weights(again, task_state_dict(task))
    torch.testing.assert_close(value(again, batch, noise), value(task, batch, noise))


def test_the_peers_size_is_expressible():
    """12 layers, width 512, 9 × 16 × 16 tokens, 8,192 codes, text 768: phenaki-pytorch has 63.3 million parameters."""
    text = {"kind": "given", "width": 768, "length": 64}
    config = parse(PhenakiConfig, {"task": "phenaki", "codec": "t", "depth": 12, "mlp_ratio": 4.5, "text": text})
    with torch.device("meta"):
        task = Phenaki.build(config, BuildContext(Shape(17, 64, 64, 3, 8.0), stage=lambda name: ClipCodec(8192)))
    assert task.tokens_per_clip() == 2304
    assert sum(p.numel() for p in task.parameters()) == pytest.approx(63.3e6, rel=0.05)


def test_dropout_is_real_in_training_alone(make, batch, noise):
    task = make(dropout=0.5)
    first, second = (float(value(task, batch, noise).detach()) for _ in range(2))
    assert first != second
    task.eval()
    first, second = (float(value(task, batch, noise).detach()) for _ in range(2))
    assert first == second
