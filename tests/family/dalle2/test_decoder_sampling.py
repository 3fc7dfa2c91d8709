"""Sampling with the decoder: conditions, guidance, the cascade, upscaling, inpainting, latents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kineograph.codec.vqgan import VQGAN, VQGANConfig
from kineograph.core.batch import Batch, Shape
from kineograph.core.config import StageConfig, parse
from kineograph.core.errors import ConfigError, InputError, NotTrained
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import Codec, freeze
from kineograph.family.dalle2.task import Decoder

from .conftest import PLAIN, ToyClip, ToyPrior, batch_of, prompts_of


def draw(task, prompts, **options):
    return task.eval().sample(prompts, task.config.sample.model_copy(update=options))


# Conditions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["ddpm", "ddim", "dpm_solver", "dpm_solver_sde"])
def test_shapes_and_range(make, solver):
    task = make(diffusion={"steps": 100, "learned_variance": True})
    pixels = draw(task, prompts_of(3, captions=["a", "b", "c"]), solver=solver)
    assert pixels.shape == (3, 1, 3, 16, 16) and pixels.min() >= 0 and pixels.max() <= 1


def test_captions_go_through_the_prior_or_else_the_clip(make):
    prior = ToyPrior()
    with_prior = make(stages={"prior": prior}, prior="prior")
    assert with_prior.loaded == ["clip"]  # only what training needs
    a = draw(with_prior, prompts_of(2, captions=["a red one", "two green"]))
    assert prior.calls == [["a red one", "two green"]]
    b = draw(make(), prompts_of(2, captions=["a red one", "two green"]))
    assert (a - b).abs().max() > 1e-3
    assert "captions" in with_prior.reads and with_prior.config.reads() == {"pixels"}


def test_encodings_in_the_data_without_a_clip(make):
    precomputed = {"kind": "given", "width": 12, "text_width": 6, "length": 5}
    task = make(clip=precomputed, clip_text=True, sample={"steps": 2, "guidance": 2.0})
    assert "captions" not in task.reads and not task.takes_captions()
    batch = batch_of(2)
    embed, encodings, mask = ToyClip().embed_texts(batch.captions)
    batch.extra["image_embed"], batch.text_embeds, batch.text_mask = embed, encodings, mask
    beside = task.sample(prompts_of(batch=batch), task.config.sample)
    with_captions = task.sample(prompts_of(captions=batch.captions, batch=batch), task.config.sample)
    torch.testing.assert_close(beside, with_captions)


def embedded(rows: int = 2) -> Batch:
    embed = F.normalize(torch.randn(rows, 12, generator=torch.Generator().manual_seed(1)), dim=-1)
    return Batch(slots=torch.arange(rows), extra={"image_embed": embed})


def test_embedding_in_the_data_needs_no_prior(make):
    task = make(prior="prior")  # does not exist
    drawn = draw(task, prompts_of(2, batch=embedded()))
    assert task.loaded == ["clip"] and (drawn[0] - drawn[1]).abs().max() > 1e-4


def test_caption_goes_through_the_prior_despite_embeddings_in_the_data(make):
    """Otherwise text-to-image metrics would use the embeddings of the real images."""
    prior = ToyPrior()
    task = make(stages={"prior": prior}, prior="prior")
    alone = draw(task, prompts_of(2, captions=["a red one", "three"]))
    beside = prompts_of(2, captions=["a red one", "three"], batch=embedded())
    assert torch.equal(draw(task, beside), alone) and len(prior.calls) == 2
    assert task.describe_start(beside) == "captions, through prior=prior"
    without = make()
    from_data = draw(without, beside)
    assert torch.equal(from_data, draw(without, prompts_of(2, batch=embedded())))
    assert without.describe_start(beside) == "image_embed of the data"
    assert "CLIP embeddings taken for" in without.describe_start(prompts_of(2, captions=["a", "b"]))
    pictured = prompts_of(2, captions=["a red one", "three"], batch=batch_of(2))  # as if embedded beforehand
    assert without.describe_start(pictured) == "the real pictures' CLIP embeddings"
    known = Batch(slots=torch.arange(2), extra={"image_embed": ToyClip().embed_images(batch_of(2).video)})
    assert torch.equal(draw(without, pictured), draw(without, prompts_of(2, batch=known)))


def untrained(name):
    raise NotTrained("that stage has no checkpoint")


def test_untrained_prior_is_replaced_by_real_images_and_labelled(make):
    task = make(prior="prior")
    task._load_stage = untrained
    real = batch_of(2)
    a, b = (draw(task, prompts_of(2, captions=["a", "b"], batch=batch_of(2, seed=seed))) for seed in (0, 1))
    assert (a - b).abs().max() > 1e-3  # sampled from the real images
    beside = prompts_of(2, captions=["a", "b"], batch=real)
    assert task.describe_start(beside) == "the real pictures' CLIP embeddings (prior=prior is not trained)"
    with pytest.raises(NotTrained):
        draw(task, prompts_of(2, captions=["a", "b"]))


def test_own_prompts_without_a_clip(make):
    """Nothing can embed the caption, but the text encoder still reads it."""
    text = {"kind": "learned", "width": 16, "depth": 0, "positions": "none", "heads": 2, "length": 16}
    task = make(clip={"kind": "given", "width": 12}, text=text)
    a, b = (draw(task, prompts_of(2, captions=captions)) for captions in (["a red one"] * 2, ["three"] * 2))
    assert (a - b).abs().max() > 1e-4
    with pytest.raises(InputError, match=r"clip\.kind=given cannot compute it"):
        draw(make(clip={"kind": "given", "width": 12}), prompts_of(2, captions=["a", "b"]))


def test_guidance_runs_both_rows_in_one_pass_and_matters(make):
    task = make()
    sizes = []
    task.network.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    a = draw(task, prompts_of(2, captions=["a red one", "three"]), guidance=3.0)
    assert sizes == [4] * 4
    sizes.clear()
    b = draw(task, prompts_of(2, captions=["a red one", "three"]), guidance=1.0)
    assert sizes == [2] * 4
    assert (a - b).abs().max() > 1e-3


def test_conditions_are_computed_once_per_call(make):
    task = make(clip_text=True)
    calls = []
    task.network.to_tokens.register_forward_hook(lambda *args: calls.append("image"))
    task.network.text.register_forward_hook(lambda *args: calls.append("text"))
    readers = [attention.cross for attention in task.network.unet.attentions() if attention.cross is not None]
    for cross in readers:
        cross.kv.register_forward_hook(lambda *args: calls.append("kv"))
    draw(task, prompts_of(2, captions=["a", "b"]))
    assert calls.count("image") == calls.count("text") == 1
    assert calls.count("kv") == len(readers) == 3


def test_prepared_condition_equals_that_of_training(make, batch, noise):
    task = make(clip_text=True, low_res_size=8, augment={"noise": 0.5}).eval()
    condition = task.encode_batch(batch, noise)
    x, t, low, level = torch.randn(4, 3, 16, 16), torch.full((4,), 30), torch.randn(4, 3, 16, 16), torch.full((4,), 0.2)
    prepared = task.network.prepare(condition, level)
    output = task.network(x, t, low_res=low, **prepared._asdict())
    torch.testing.assert_close(output, task.predict(x, t, condition, low, level))


def test_guidance_leaves_the_variance_alone(make):
    """A conditional and an unconditional variance that differ: the reverse step uses the conditional one at any scale."""
    task = make(diffusion={"steps": 100, "learned_variance": True}).eval()

    def answer(x, *args, **kwargs):
        output = torch.zeros(len(x), 6, 16, 16)
        output[: len(x) // 2, 3:], output[len(x) // 2 :, 3:] = 1.0, -1.0  # β, and β̃; the means are equal
        return output

    task.network.forward = answer
    images = [draw(task, prompts_of(2, captions=["a", "b"]), solver="ddpm", guidance=scale) for scale in (2.0, 7.0)]
    assert torch.equal(*images)


@pytest.mark.parametrize("keys", [{"clip_text": True, "image_embeds": "none"}, {}])
def test_negative_prompts_lead_away(make, keys):
    task = make(**keys)
    a = draw(task, prompts_of(2, captions=["a red one", "three"]))
    b = draw(task, prompts_of(2, captions=["a red one", "three"], negative=["two green"] * 2))
    assert (a - b).abs().max() > 1e-4


def test_negative_prompts_that_nothing_encodes_are_refused(make):
    """With embeddings in the data and no text encoder, guidance would be off without a word."""
    task, real = make(clip={"kind": "given", "width": 12}), batch_of(2)
    real.extra["image_embed"] = torch.randn(2, 12)
    sizes = []
    task.network.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    draw(task, prompts_of(2, captions=["a", "b"], batch=real))
    assert sizes == [4] * 4
    with pytest.raises(InputError, match="neither a text encoder nor a CLIP"):
        draw(task, prompts_of(2, captions=["a", "b"], negative=["c"] * 2, batch=real))


def test_self_conditioning_reads_the_last_prediction(make):
    task = make(self_conditioning=True).eval()
    seen, predicted = [], []
    task.network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["previous"]), with_kwargs=True
    )
    inner = task.diffusion.prediction

    def remember(output):
        predicted.append(output)
        return inner(output)

    task.diffusion.prediction = remember
    prompts = prompts_of(2, captions=["a", "b"])
    draw(task, prompts, guidance=2.0)
    assert [len(part) for part in seen] == [4] * 4
    assert not seen[0].any()
    assert all(part.abs().max() <= 1 and torch.equal(*part.chunk(2)) for part in seen)
    x = Noise(key_of(7, "decoder"), 0, prompts.noise.slots).normal("start", 3, 16, 16)
    x0 = task.diffusion.to_x0(x, torch.full((2,), 99), predicted[0]).clamp(-1, 1)
    torch.testing.assert_close(seen[1][:2], x0, rtol=1e-3, atol=1e-3)


def test_unconditional(make):
    a = draw(make(**PLAIN), prompts_of(3))
    assert a.shape == (3, 1, 3, 16, 16) and (a[0] - a[1]).abs().max() > 1e-3


def test_clipping_changes_samples(make):
    task = make(**PLAIN)
    images = [draw(task, prompts_of(2), clip=clip) for clip in ("none", "static", "dynamic")]
    assert all((a - b).abs().max() > 1e-4 for a, b in ((images[0], images[1]), (images[1], images[2])))


def test_other_sizes_are_refused(make):
    with pytest.raises(InputError, match=r"trained for \(1, 16, 16\)"):
        draw(make(**PLAIN), prompts_of(2, height=32, width=32))


# The cascade -----------------------------------------------------------------------------------------------------


def cascade(make):
    """8 → 16 → 32."""
    small = make(size=8, **PLAIN)
    middle = make(size=16, stages={"small": small}, low_res="small", low_res_size=8, **PLAIN)
    large = make(size=32, stages={"middle": middle}, low_res="middle", low_res_size=16, **PLAIN)
    return small, middle, large


def watched(task):
    calls = []
    task.network.register_forward_pre_hook(lambda *args: calls.append(1))
    return calls


def test_lower_stages_are_loaded_and_sampled_first(make):
    small, middle, large = cascade(make)
    assert large.loaded == [] and middle.loaded == []
    calls = [watched(task) for task in (small, middle, large)]
    assert draw(large, prompts_of(2)).shape == (2, 1, 3, 32, 32)
    assert [len(stage_calls) for stage_calls in calls] == [4, 4, 4]
    draw(middle, prompts_of(2))  # stops at the second
    assert [len(stage_calls) for stage_calls in calls] == [8, 8, 4]


def test_guidance_reaches_the_stage_that_reads_the_caption(make):
    """Upsamplers without conditions pass guidance on to the stage below."""
    small = make(size=8, sample={"steps": 4, "guidance": 1.0})
    middle = make(size=16, stages={"small": small}, low_res="small", low_res_size=8, **PLAIN)
    large = make(size=32, stages={"middle": middle}, low_res="middle", low_res_size=16, **PLAIN)
    rows = []
    small.network.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    plain = draw(large, prompts_of(2, captions=["a red one", "three"]))  # each as its config says
    assert set(rows) == {2}
    rows.clear()
    guided = draw(large, prompts_of(2, captions=["a red one", "three"]), guidance=5.0)
    assert set(rows) == {4} and (plain - guided).abs().max() > 1e-3


def test_training_loads_no_other_stages(make, noise):
    task = make(size=16, low_res="small", low_res_size=8, prior="prior")
    task(batch_of(), noise)
    assert task.loaded == ["clip"]


def test_given_image_is_upscaled_without_the_lower_stage(make):
    task = make(size=16, low_res="small", low_res_size=8, **PLAIN)
    pictures = [torch.rand(2, 1, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    a, b = (draw(task, prompts_of(2, prime=picture)) for picture in pictures)
    assert task.loaded == [] and (a - b).abs().max() > 1e-3


def test_sample_start_selects_the_first_stage(make):
    small, middle, large = cascade(make)
    calls = [watched(task) for task in (small, middle, large)]
    prime = torch.rand(2, 1, 3, 32, 32)
    draw(large, prompts_of(2, prime=prime), start="middle")
    assert [len(stage_calls) for stage_calls in calls] == [0, 4, 4]
    with pytest.raises(InputError, match=r"sample\.start=small is no super-resolution stage"):
        draw(large, prompts_of(2, prime=prime), start="small")
    with pytest.raises(InputError, match="give one with --prime"):
        draw(large, prompts_of(2), start="middle")


def test_untrained_lower_stage_is_replaced_by_real_images(make):
    def damaged(name):
        raise InputError("every checkpoint is damaged")

    task = make(size=16, low_res="small", low_res_size=8, **PLAIN)
    task._load_stage = damaged
    with pytest.raises(InputError, match="damaged"):
        draw(task, prompts_of(4, batch=batch_of()))
    task._load_stage = untrained
    with pytest.raises(InputError, match="no checkpoint"):
        draw(task, prompts_of(4))
    a, b = (draw(task, prompts_of(4, batch=batch_of(seed=seed))) for seed in (0, 1))
    assert (a - b).abs().max() > 1e-3
    assert task.describe_start(prompts_of(4, batch=batch_of())) == "real pictures made smaller, 8 × 8"


def test_stages_have_independent_noise(make):
    """Otherwise two U-Nets of the same shape would start from the same noise."""
    first, second, again = (make(name=name, **PLAIN) for name in ("first", "second", "first"))
    a, b, c = (draw(task, prompts_of(2)) for task in (first, second, again))  # the same weights
    assert torch.equal(a, c) and (a - b).abs().max() > 1e-2
    levels = []
    for name in ("first", "second"):
        task = make(name=name, low_res_size=8, augment={"noise": 0.5}, **PLAIN)
        task.network.register_forward_pre_hook(lambda m, a, k: levels.append(k["low_res"]), with_kwargs=True)
        draw(task, prompts_of(2, prime=torch.zeros(2, 1, 3, 8, 8)), low_res_noise=0.3)
    assert (levels[0] - levels[-1]).abs().max() > 1e-2


def test_lower_stage_samples_the_same_alone_and_in_the_cascade(make):
    small, middle, _ = cascade(make)
    alone = draw(small, prompts_of(2))[:, 0]
    seen = []
    middle.network.register_forward_pre_hook(lambda m, a, k: seen.append(k["low_res"]), with_kwargs=True)
    draw(middle, prompts_of(2))
    torch.testing.assert_close(seen[0], F.interpolate(alone * 2 - 1, (16, 16), mode="bicubic", antialias=True))


def test_super_resolution_without_an_image_is_refused(make):
    with pytest.raises(InputError, match="give a picture to upscale with --prime"):
        draw(make(low_res_size=8, **PLAIN), prompts_of(2))


def test_low_res_noise_changes_samples(make):
    task = make(low_res_size=8, augment={"noise": 0.5}, **PLAIN)
    prime = torch.rand(2, 1, 3, 16, 16)
    a, b = (draw(task, prompts_of(2, prime=prime), low_res_noise=level) for level in (0.0, 0.3))
    assert (a - b).abs().max() > 1e-3
    with pytest.raises(InputError, match=r"is above augment\.noise=0\.5"):
        draw(task, prompts_of(2, prime=prime), low_res_noise=0.7)


# Inpainting ------------------------------------------------------------------------------------------------------


def left_half(rows: int, size: int) -> torch.Tensor:
    mask = torch.zeros(rows, size, size, dtype=torch.bool)
    mask[..., : size // 2] = True
    return mask


@pytest.mark.parametrize("resample", [1, 2])
def test_inpainting_keeps_the_known_part(make, resample):
    task = make(**PLAIN)
    picture, mask = torch.rand(2, 1, 3, 16, 16), left_half(2, 16)
    drawn = draw(task, prompts_of(2, prime=picture, mask=mask), resample=resample)
    assert torch.equal(drawn[..., 8:], picture[..., 8:])
    assert (drawn[..., :8] - picture[..., :8]).abs().mean() > 0.01


def test_known_part_changes_the_rest(make):
    task = make(**PLAIN)
    mask = left_half(2, 16)
    a, b = (draw(task, prompts_of(2, prime=torch.full((2, 1, 3, 16, 16), grey), mask=mask)) for grey in (0.1, 0.9))
    assert (a[..., :8] - b[..., :8]).abs().max() > 1e-3


def test_masked_part_is_not_read(make):
    task = make(**PLAIN)
    mask = left_half(2, 16)
    pictures = [torch.rand(2, 1, 3, 16, 16) for _ in range(2)]
    pictures[1][..., 8:] = pictures[0][..., 8:]
    a, b = (draw(task, prompts_of(2, prime=picture, mask=mask)) for picture in pictures)
    assert torch.equal(a, b)


def test_inpainting_starts_at_the_lowest_stage(make):
    small, middle, large = cascade(make)
    calls = [watched(task) for task in (small, middle, large)]
    picture, mask = torch.rand(2, 1, 3, 32, 32), left_half(2, 32)
    drawn = draw(large, prompts_of(2, prime=picture, mask=mask))
    assert torch.equal(drawn[..., 16:], picture[..., 16:])
    assert [len(stage_calls) for stage_calls in calls] == [4, 4, 4]


# Latents ---------------------------------------------------------------------------------------------------------


class Halves(Codec):
    """A codec with continuous latents: 2 × 2 pixels folded into channels."""

    Config = StageConfig
    latent_channels = 12

    def encode(self, pixels, frame_mask=None):
        return F.pixel_unshuffle(pixels, 2) * 4

    def decode(self, latents):
        return F.pixel_shuffle(latents / 4, 2).clamp(0, 1)

    def shape_for(self, frames, height, width):
        return frames, height // 2, width // 2


def test_latents_of_a_continuous_codec(make, noise):
    task = make(stages={"halves": Halves()}, codec="halves", latent_scale=0.25, **PLAIN).eval()
    x0 = task.space.encode_batch(batch_of())
    assert x0.shape == (4, 12, 8, 8) and task.network.unet.out.out_channels == 12
    torch.testing.assert_close(task.space.decode(x0), batch_of().video[:, 0])
    assert draw(task, prompts_of(2)).shape == (2, 1, 3, 16, 16)
    cached = Batch(slots=torch.arange(4), **task.precompute(batch_of()))
    torch.testing.assert_close(task(cached, noise).error, task(batch_of(), noise).error)


def test_cached_embeddings_train_as_the_clip_does(make, noise, monkeypatch):
    task = make(clip="clip", clip_text=True, size=32, draws=16).eval()
    batch = batch_of(size=32)
    rows = task.precompute(batch)
    assert task.can_cache(task.config) and rows["pixels"].dtype == torch.uint8
    fields = {name: rows[name] for name in ("pixels", "text_embeds", "text_mask")}
    cached = Batch(slots=batch.slots, captions=batch.captions, extra={"image_embed": rows["image_embed"]}, **fields)
    expected = task(batch, noise).error
    monkeypatch.setattr(ToyClip, "embed_images", None)  # nothing asks the CLIP again
    monkeypatch.setattr(ToyClip, "embed_texts", None)
    torch.testing.assert_close(task(cached, noise).error, expected, rtol=1e-3, atol=1e-4)
    cached.extra["image_embed"] = -cached.extra["image_embed"]
    assert not torch.allclose(task(cached, noise).error, expected, rtol=1e-3, atol=1e-4)


def test_only_a_decoder_that_would_run_a_clip_is_cached_as_pixels(make):
    given = {"kind": "given", "width": 12}
    assert not Decoder.can_cache(make(clip=given).config)
    assert not Decoder.can_cache(make(**PLAIN).config)
    assert not Decoder.can_cache(make(clip="clip", low_res_size=8).config)


KINDS = [{"kind": "fsq", "levels": [8, 5]}, {"kind": "lfq", "codes": 16}, {"kind": "vq", "codes": 32, "dim": 4}]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["kind"])
def test_latents_of_a_codebook(make, noise, kind):
    torch.manual_seed(0)
    config = parse(VQGANConfig, {"width": 8, "multipliers": [1, 2], "quantizer": kind, "perceptual": {"weight": 0}})
    codec = freeze(VQGAN(config, Shape(1, 16, 16, 3, 8.0)))
    pixels = batch_of().video
    latents = codec.encode_latents(pixels)
    assert latents.shape == (4, 1, codec.latent_channels, 4, 4)
    torch.testing.assert_close(codec.decode_latents(latents), codec.decode(codec.encode(pixels)))
    task = make(stages={"tokenizer": codec}, codec="tokenizer", **PLAIN)
    task(batch_of(), noise)
    picture, mask = torch.rand(2, 1, 3, 16, 16), left_half(2, 16)
    drawn = draw(task, prompts_of(2, prime=picture, mask=mask))
    assert torch.equal(drawn[..., 8:], picture[..., 8:])


def test_a_codec_without_latents_is_refused(make):
    with pytest.raises(ConfigError, match="codec=clip is not a codec"):
        make(codec="clip", **PLAIN)


@pytest.mark.parametrize("objective", [None, "eps", "x0", "v"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "scaled_linear"])
@pytest.mark.parametrize("space", ["pixels", "latents"])
def test_drawn_pictures_spread_as_the_data_do(make, monkeypatch, space, schedule, objective):
    """The network is the best for Gaussian data of deviation 0.25, with an error of 0.03."""
    keys = {"stages": {"halves": Halves()}, "codec": "halves"} if space == "latents" else {}
    diffusion = {"schedule": schedule} | ({} if objective is None else {"objective": objective})
    task = make(**keys, **PLAIN, size=32, diffusion=diffusion).eval()
    if objective is None:
        assert task.config.diffusion.objective == ("v" if space == "latents" else "eps")
    drawn = []
    monkeypatch.setattr(task.space, "decode", lambda x0: drawn.append(x0) or x0.clamp(0, 1)[:, :3])

    def best(x, t, **condition):
        kept = task.diffusion.alpha_bar[int(t[0])]
        x0 = 0.25**2 * kept**0.5 / (0.25**2 * kept + 1 - kept) * x
        target = task.diffusion.target(x0, (x - kept**0.5 * x0) / (1 - kept) ** 0.5, t)
        return target + 0.03 * torch.randn(x.shape, generator=torch.Generator().manual_seed(int(t[0])))

    monkeypatch.setattr(task.network, "forward", best)
    draw(task, prompts_of(2), steps=100, solver="dpm_solver")
    assert float(drawn[0].std()) == pytest.approx(0.25, rel=0.1)


def test_an_unbounded_prediction_is_no_condition(make):
    with pytest.raises(ConfigError, match="the x̂0 that it reads has no bound; set objective=v"):
        make(codec="halves", self_conditioning=True, diffusion={"objective": "eps"}, **PLAIN)
