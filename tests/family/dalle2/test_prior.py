from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.capabilities import SupportsSampling
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, freeze, player_parameters, task_state_dict
from kineograph.family.dalle2.config import DecoderConfig, PriorConfig, PriorSample
from kineograph.family.dalle2.prior import Prior, select_most_similar
from kineograph.text.clip_embedding import CaptionEmbeddings
from tests.family.dalle2.conftest import CAPTIONS, ToyClip, batch_of, prompts_of
from tests.text.waiting import NoWaiting

GIVEN = {"kind": "given", "width": 12, "text_width": 6, "length": 5}


def make(clip: object = "clip", seed: int = 0, **keys) -> Prior:
    torch.manual_seed(seed)
    context = BuildContext(
        shape=Shape(1, 16, 16, 3, 8.0), stage={"clip": freeze(ToyClip()), "other": ToyCodec()}.__getitem__
    )
    tree = {
        "task": "dalle2.prior", "clip": clip, "width": 32, "depth": 2, "heads": 2, "diffusion": {"steps": 50},
        "sample": {"steps": 8}, **keys,
    }  # fmt: skip
    return Prior.build(parse(PriorConfig, tree), context)


class ToyCodec:
    vocabulary = 4


def train(task: Prior, batch: Batch, steps: int, lr: float = 3e-3) -> float:
    optimizer = torch.optim.Adam(player_parameters(task, "model").values(), lr=lr)
    task.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss("model", task(batch, Noise(0, step, batch.slots))).total.value()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def repeated(rows: int = 32) -> Batch:
    """Four images repeated, with their captions."""
    return batch_of(4).rows([row % 4 for row in range(rows)])


def spread(batch: Batch) -> Batch:
    """Give every row its own slot, and so its own noise."""
    batch.slots = torch.arange(len(batch))
    return batch


@pytest.fixture(scope="module")
def trained() -> Prior:
    task = make(caption_dropout=0.2)
    train(task, spread(repeated(64)), 250)
    return task.eval()


def validate(task: Prior, batch: Batch) -> dict[str, float]:
    with torch.no_grad():
        means = task.eval().validate(batch, Noise(3, 0, batch.slots))
    return {name: float(mean.value()) for name, mean in means.items()}


def test_found_by_name_and_samples_no_pixels():
    assert find_task("dalle2.prior") is Prior
    assert not isinstance(make(), SupportsSampling)


# Training --------------------------------------------------------------------------------------------------------


def test_learns_the_embeddings_of_captions(trained):
    batch = batch_of(4)
    metrics = validate(trained, batch)
    assert metrics["cosine/image"] > 0.97
    assert metrics["cosine/shuffled"] < metrics["cosine/image"] - 0.01
    true = F.cosine_similarity(trained.clip.images(batch), trained.encode_batch(batch).embed).mean()
    assert metrics["cosine/true_to_text"] == pytest.approx(float(true), abs=1e-5)
    assert metrics == pytest.approx(validate(trained, batch), abs=0, nan_ok=True)  # fixed noise
    assert sum(name.startswith("loss/t") for name in metrics) == 4
    drawn = trained.embed(prompts_of(4, captions=CAPTIONS))
    torch.testing.assert_close(drawn.norm(dim=-1), torch.ones(4))
    assert (drawn @ trained.clip.images(batch).T).argmax(1).tolist() == [0, 1, 2, 3]


def test_only_the_network_trains_and_is_saved():
    task = make(caption_dropout=0.5)
    assert all(name.startswith("network.") for name in player_parameters(task, "model"))
    assert all(name.startswith("network.") for name in task_state_dict(task))
    batch = spread(repeated(16))
    task.train()
    task.loss("model", task(batch, Noise(0, 0, batch.slots))).total.sum.backward()
    without_gradient = [
        name for name, p in player_parameters(task, "model").items() if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert without_gradient == []


def test_loss_is_of_embeddings_with_unit_variance():
    """A prediction of 0 has a squared error of 1 on average for x0 = √D · unit vector, whatever D is."""
    task = make().eval()
    torch.nn.init.zeros_(task.network.answer.weight)
    batch = batch_of(4)
    torch.testing.assert_close(task(batch, Noise(0, 0, batch.slots)).error, torch.ones(4))


def test_default_objective_is_x0():
    assert make(diffusion={"steps": 30}).diffusion.config.objective == "x0"
    assert make(diffusion={"objective": "v"}).diffusion.config.objective == "v"
    with pytest.raises(ConfigError, match="learned_variance"):
        make(diffusion={"learned_variance": True})


# Network ---------------------------------------------------------------------------------------------------------


def find_readers(task: Prior, change: int) -> list[int]:
    """Positions whose hidden states change when the vector at position `change` does."""
    hidden: list[torch.Tensor] = []
    blocks = task.network.transformer
    tokens = torch.randn(1, task.network.length, task.network.width, generator=torch.Generator().manual_seed(0))
    for x in (tokens, tokens.clone()):
        if hidden:
            x[:, change] += 1
        hidden.append(blocks(x))
    return ((hidden[0] - hidden[1]).abs().amax(-1) > 1e-5)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("position", [0, 3, 8])
def test_attention_is_causal(position):
    task = make().eval()
    assert task.network.length == task.tokens_per_clip() == 5 + 4
    assert find_readers(task, position) == list(range(position, 9))


@pytest.mark.parametrize("part", ["x", "t", "embed", "encodings"])
def test_prediction_reads_every_input(part):
    task = make().eval()
    texts = task.clip.captions(CAPTIONS)
    x, t = torch.randn(4, 12), torch.tensor([3, 3, 3, 3])
    first = task.predict(x, t, texts)
    if part == "x":
        x = x + 1
    elif part == "t":
        t = t + 20
    else:
        texts = texts._replace(**{part: getattr(texts, part).roll(1, 0)})
    assert not torch.allclose(task.predict(x, t, texts), first, atol=1e-3)


def test_padding_is_not_read():
    task = make().eval()
    texts = task.clip.captions(["abc"])
    assert texts.mask.tolist() == [[True] * 3 + [False] * 2]
    x, t = torch.randn(1, 12), torch.tensor([3])
    noisy = texts.encodings.clone()
    noisy[:, 3:] = 99
    torch.testing.assert_close(task.predict(x, t, texts._replace(encodings=noisy)), task.predict(x, t, texts))


def test_without_token_encodings():
    task = make(text_encodings=False)
    assert task.network.length == 4
    assert task.encode_batch(batch_of(2)).encodings is None
    assert task.embed(prompts_of(2, captions=CAPTIONS[:2])).shape == (2, 12)


# Null text -------------------------------------------------------------------------------------------------------


def test_caption_dropout_rate():
    task = make(caption_dropout=0.3)
    dropped: list[torch.Tensor] = []
    task.predict = lambda x, t, texts: dropped.append(texts.empty) or x
    batch = spread(repeated(2000))
    task.train()(batch, Noise(0, 5, batch.slots))
    assert float(dropped[0].float().mean()) == pytest.approx(0.3, abs=0.04)
    task.eval()(batch, Noise(0, 5, batch.slots))
    assert not dropped[1].any()


def test_null_text_is_the_same_in_training_and_sampling():
    """A dropped caption, a blank one, a row of zeros and no caption at all give the network one and the same sequence."""
    task = make().eval()
    x, t, noise = torch.randn(1, 12), torch.tensor([3]), Noise.for_rows(0, 0, 1)
    texts = task.clip.captions(["a red one"])
    dropped = task.predict(x, t, texts._replace(empty=torch.tensor([True])))
    zeros = Batch(
        torch.arange(1), text_embeds=torch.randn(1, 5, 6), extra={"text_embed": torch.zeros(1, 12)}, captions=None
    )
    for other in (task.clip.captions(["  "]), task.encode_null(noise), task.encode_batch(zeros)):
        torch.testing.assert_close(task.predict(x, t, other), dropped)
    assert not torch.allclose(task.predict(x, t, texts), dropped, atol=1e-3)
    nothing, blank = task.embed(Prompts(noise)), task.embed(Prompts(noise, [""]))
    torch.testing.assert_close(nothing, blank)
    task.network.no_text.grad = None
    task.predict(x, t, task.encode_null(noise)).sum().backward()
    assert task.network.no_text.grad.abs().sum() > 0


# Sampling --------------------------------------------------------------------------------------------------------


def test_guidance_moves_towards_the_caption_and_away_from_the_negative(trained):
    prompts = prompts_of(4, captions=CAPTIONS)
    free, plain, guided = (
        trained.embed(prompts, PriorSample(steps=8, candidates=1, guidance=scale)) for scale in (0, 1, 2)
    )
    images = trained.clip.images(batch_of(4))
    to_own = [F.cosine_similarity(drawn, images).mean() for drawn in (free, plain)]
    assert to_own[1] > to_own[0] + 0.01
    torch.testing.assert_close(free, trained.embed(prompts_of(4), PriorSample(steps=8, candidates=1)))
    unconditional = trained.encode_null(prompts.noise)
    x, t = torch.randn(4, 12), torch.full((4,), 40)
    away = trained.predict(x, t, trained.clip.captions(CAPTIONS)) - trained.predict(x, t, unconditional)
    assert (((guided - plain) * away).sum(-1) > 0).float().mean() >= 0.75
    negative = Prompts(prompts.noise, CAPTIONS, negative=CAPTIONS[1:] + CAPTIONS[:1])
    pushed = trained.embed(negative, PriorSample(steps=8, candidates=1, guidance=2))
    others = images.roll(-1, 0)
    assert F.cosine_similarity(pushed, others).mean() < F.cosine_similarity(plain, others).mean()


def test_candidate_most_similar_to_its_caption_is_selected():
    texts = CaptionEmbeddings(F.normalize(torch.eye(4)[:3], dim=-1), None, None, torch.tensor([False, False, True]))
    candidates = torch.zeros(2, 3, 4)
    candidates[0] = torch.tensor([[1.0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]])
    candidates[1] = torch.tensor([[9.0, 9, 0, 0], [0, 5, 1, 0], [0, 0, 1, 0]])
    best = select_most_similar(candidates, texts)
    assert torch.equal(best, torch.stack([candidates[0, 0], candidates[1, 1], candidates[0, 2]]))


def test_more_candidates_are_never_less_similar():
    task = make().eval()
    prompts, texts = prompts_of(4, captions=CAPTIONS), task.clip.captions(CAPTIONS)
    likeness = [
        F.cosine_similarity(task.embed(prompts, PriorSample(steps=4, candidates=n)), texts.embed) for n in (1, 2, 6)
    ]
    assert (likeness[1] >= likeness[0] - 1e-6).all()
    assert (likeness[2] >= likeness[1] - 1e-6).all()
    assert (likeness[2] > likeness[0] + 1e-3).any()


@pytest.mark.parametrize("solver", ["ddpm", "ddim", "dpm_solver", "dpm_solver_sde"])
def test_rows_do_not_depend_on_their_batch(solver):
    task = make().eval()
    options = PriorSample(steps=5, solver=solver, guidance=2)
    noise = Noise.for_rows(7, 0, 3)
    together = task.embed(Prompts(noise, CAPTIONS[:3]), options)
    alone = task.embed(Prompts(noise.rows(2, 3), CAPTIONS[2:3]), options)
    torch.testing.assert_close(together[2:], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together, task.embed(Prompts(Noise.for_rows(8, 0, 3), CAPTIONS[:3]), options), atol=1e-3)


def test_norms_of_samples():
    task = make().eval()
    prompts = prompts_of(2, captions=CAPTIONS[:2])
    keys = {"steps": 3, "candidates": 1, "guidance": 3}
    free = task.embed(prompts, PriorSample(**keys, sphere=False, normalize=False)).norm(dim=-1)
    assert (free - 1).abs().min() > 1e-3
    held = task.embed(prompts, PriorSample(**keys, normalize=False))  # the last step gives x̂0 itself
    torch.testing.assert_close(held.norm(dim=-1), torch.ones(2))
    torch.testing.assert_close(task.embed(prompts, PriorSample(**keys, sphere=False)).norm(dim=-1), torch.ones(2))
    with pytest.raises(ConfigError, match="eta"):
        parse(PriorSample, {"solver": "ddpm", "eta": 0.5})


def test_eta_changes_samples():
    task = make().eval()
    prompts = prompts_of(2, captions=CAPTIONS[:2])
    deterministic, noisy_samples = (task.embed(prompts, PriorSample(steps=4, eta=eta)) for eta in (0, 1))
    assert not torch.allclose(deterministic, noisy_samples, atol=1e-3)


# Embeddings in the data ------------------------------------------------------------------------------------------


def precompute(batch: Batch) -> Batch:
    clip = ToyClip()
    embed, encodings, mask = clip.embed_texts(batch.captions)
    return Batch(
        batch.slots, text_embeds=encodings, text_mask=mask,
        extra={"image_embed": 3 * clip.embed_images(batch.video), "text_embed": 5 * embed},
    )  # fmt: skip


def test_embeddings_in_the_data_replace_the_clip_at_any_norm():
    batch = batch_of(4)
    noise = Noise(0, 0, batch.slots)
    task = make().eval()
    expected = task(batch, noise)
    clip = task.stages["clip"]
    clip.embed_images = clip.embed_texts = lambda *_: pytest.fail("the CLIP was run")
    torch.testing.assert_close(task(precompute(batch), noise), expected)
    without = make(clip=GIVEN).eval()  # the same weights, and no CLIP at all
    torch.testing.assert_close(without(precompute(batch), noise), expected)
    assert not without.stages
    drawn = without.embed(Prompts(noise, batch=precompute(batch)))
    assert drawn.shape == (4, 12)
    for mean in task.validate(precompute(batch), noise).values():
        assert mean.value().isfinite() or mean.count == 0  # no sample is in that range of timesteps


def test_row_without_image_embedding_has_no_loss():
    task, batch = make(clip=GIVEN).eval(), precompute(batch_of())
    noise = Noise.for_rows(1, 2, 4)
    whole = task(batch, noise)
    batch.extra["image_embed"][1] = 0  # as data.missing_embeddings=keep gives it
    loss = task.loss("model", task(batch, noise)).total
    torch.testing.assert_close(loss.value(), whole.error[[0, 2, 3]].mean())


def test_missing_fields_are_named():
    task = make(clip=GIVEN)
    batch = batch_of(2)
    noise = Noise(0, 0, batch.slots)
    with pytest.raises(InputError, match=r"the data have no image_embed.*kind=given"):
        task(batch, noise)
    with pytest.raises(InputError, match="the data have no text_embed"):
        task.embed(prompts_of(2, captions=CAPTIONS[:2]))
    wide = precompute(batch)
    wide.extra["image_embed"] = torch.zeros(2, 13)
    with pytest.raises(InputError, match="clip has 12 channels"):
        task(wide, noise)
    short = precompute(batch)
    short.text_embeds = short.text_embeds[:, :4]
    with pytest.raises(InputError, match="4 tokens × 6 channels"):
        task(short, noise)
    with pytest.raises(ConfigError, match="text_encodings"):
        make(clip={"kind": "given", "width": 12})
    with pytest.raises(ConfigError, match="task is clip"):
        make(clip="other")


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ({"kind": "given"}, "needs width"),
        ({"kind": "given", "width": 4, "length": 3}, "set both, or neither"),
        ({"kind": "given", "width": 4, "name": "x"}, "transformers only"),
        ({"kind": "transformers"}, "needs name"),
        ({"kind": "transformers", "name": "x", "width": 3}, "given only"),
    ],
)
def test_invalid_clip_sources_are_refused(clip, message):
    with pytest.raises(ConfigError, match=message):
        make(clip=clip)


def test_cached_fields_equal_computed_ones():
    task = make().eval()
    batch = batch_of(4)
    batch.captions[1] = " "
    kept = task.precompute(batch)
    assert {name: tuple(value.shape) for name, value in kept.items()} == {
        "image_embed": (4, 12), "text_embed": (4, 12), "text_embeds": (4, 5, 6), "text_mask": (4, 5),
    }  # fmt: skip
    cached = Batch(
        batch.slots, text_embeds=kept["text_embeds"], text_mask=kept["text_mask"],
        extra={name: kept[name] for name in ("image_embed", "text_embed")},
    )  # fmt: skip
    noise = Noise(0, 0, batch.slots)
    torch.testing.assert_close(task(cached, noise), task(batch, noise))
    assert Prior.can_cache(task.config)
    assert not Prior.can_cache(make(clip=GIVEN).config)
    assert task.config.reads() == {"pixels", "captions"}
    assert make(clip=GIVEN).config.reads() == frozenset()


def test_config_round_trip():
    for clip in ("clip", GIVEN):
        config = make(clip=clip).config
        assert parse(PriorConfig, json.loads(config.model_dump_json())) == config


def test_more_sampling_steps_than_timesteps_are_refused():
    with pytest.raises(ConfigError, match=r"sample.steps=64 .* diffusion.steps=32"):
        parse(PriorConfig, {"task": "dalle2.prior", "clip": "clip", "diffusion": {"steps": 32}})
    with pytest.raises(ConfigError, match=r"sample.steps=50 .* diffusion.steps=32"):
        parse(DecoderConfig, {"task": "dalle2", "image_embeds": "none", "diffusion": {"steps": 32}})


def test_text_embeddings_in_the_data_without_a_clip():
    """As in evaluation: with captions and the samples that they belong to."""
    task = make({"kind": "given", "width": 12}, text_encodings=False).eval()
    batch = batch_of(2)
    batch.extra["text_embed"] = ToyClip().embed_texts(batch.captions)[0]
    embeddings = task.embed(prompts_of(2, captions=batch.captions, batch=batch))
    assert torch.equal(embeddings, task.embed(prompts_of(2, batch=batch)))
    with pytest.raises(InputError, match="cannot compute it"):
        task.embed(prompts_of(2, captions=batch.captions))


def test_a_step_never_waits_for_the_device():
    task, batch = make().train(), batch_of(4)
    with NoWaiting():
        task.loss("model", task(batch, Noise(0, 0, batch.slots))).total.sum.backward()
