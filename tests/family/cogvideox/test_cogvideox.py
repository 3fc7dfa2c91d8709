"""CogVideoX as a stage: latents, text and its null, first frames, padding, losses, validation by ranges, what trains."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kineograph.core.batch import Batch, Prompts
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.task import load_weights, player_parameters, task_state_dict
from kineograph.family.cogvideox import CogVideoX, CogVideoXConfig
from kineograph.family.cogvideox.diffusers_weights import diffusers_state
from kineograph.family.cogvideox.latent_space import LatentClips
from kineograph.family.cogvideox.transformer_config import RELEASED
from kineograph.train.config import EmaConfig, TrainConfig
from kineograph.train.stepper import Stepper

from .conftest import CAPTIONS, TINY, Make, ToyCodec, clips

NOISE = Noise.for_rows(1, 5, 4)


# Config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", RELEASED)
def test_a_released_shape_sets_what_is_not_given(shape: str) -> None:
    keys = {
        "task": "cogvideox",
        "codec": "vae",
        "shape": shape,
        "text": {"kind": "given", "width": 4096},
        "null_text": "zeros",
    }
    config = parse(CogVideoXConfig, keys)
    assert (config.width, config.depth) == ((1920, 30) if shape == "2b" else (3072, 42))
    assert config.diffusion.shift == (3.0 if shape == "2b" else 1.0)
    assert config.diffusion.zero_terminal and config.diffusion.objective == "v"
    assert config.text.length == (224 if shape.startswith("1.5") else 226)
    assert parse(CogVideoXConfig, {**keys, "depth": 2, "diffusion": {"shift": 2}}).depth == 2
    assert parse(CogVideoXConfig, config.model_dump(mode="json")) == config  # a saved config means the same


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"codec": None}, "codec or weights is required"),
        ({"null_text": "empty", "text": {"kind": "given", "width": 8}}, "null_text=empty needs a text encoder"),
        ({"lora": {"rank": 4}}, "does not use lora"),
        ({"tune": []}, "trains nothing"),
        ({"diffusion": {"steps": 20}, "sample": {"steps": 50}}, "sample.steps=50 is above diffusion.steps=20"),
        ({"image": {"dropout": 0.5}}, "without first_frame=true"),
        ({"grid": "slice", "positions": "sincos"}, "does not use grid"),
        ({"shape": "3b"}, "shape='3b'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(CogVideoXConfig, {"task": "cogvideox", **TINY, **keys})


def test_sizes_that_do_not_fit_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"use 4k\+1"):
        make(frames=12)
    with pytest.raises(ConfigError, match=r"10 × 10 pixels .* a multiple of 4 \(8 or 12\)"):
        make(size=10)
    with pytest.raises(ConfigError, match=r"8 × 9 pixels .* the width must be a multiple of 4 \(8 or 12\)"):
        make().shape_for(9, 8, 9)  # 9 or 10 would fit the codec, and not this
    with pytest.raises(ConfigError, match=r"the height must be a multiple of 4 \(4\)"):
        make().shape_for(9, 2, 8)


# Latents ---------------------------------------------------------------------------------------------------------


def test_a_cached_posterior_is_the_codecs_own(make: Make) -> None:
    """Training from a cache is training from pixels, and the posterior is sampled anew in every step."""
    task, batch = make(), clips()
    kept = task.precompute(batch)["latents"]
    assert kept.shape == (4, 3, 8, 4, 4)
    cached = Batch(slots=batch.slots, captions=batch.captions, latents=kept)
    from_pixels, from_cache = (task.space.encode_batch(b, NOISE, True).x0 for b in (batch, cached))
    assert torch.equal(from_pixels, from_cache)
    mean = ToyCodec().encode(batch.video)
    assert 0.01 < (from_cache - mean).std() < 0.06  # 0.7 · e^−3
    assert not torch.equal(from_cache, task.space.encode_batch(cached, Noise.for_rows(1, 6, 4), True).x0)
    assert torch.equal(task(batch, NOISE).error, task(cached, NOISE).error)


def test_latents_of_another_codec_are_refused(make: Make) -> None:
    task, batch = make(), clips()
    with pytest.raises(InputError, match="t × 8 × h × w"):
        task(Batch(slots=batch.slots, captions=batch.captions, latents=torch.zeros(4, 3, 6, 4, 4)), NOISE)


def test_any_resolution_trains_in_one_stage(make: Make) -> None:
    task = make()
    for frames, size in ((9, 8), (5, 16), (1, 4)):
        loss = task.loss("model", task(clips(frames=frames, size=size), NOISE)).total.value()
        assert loss.isfinite()


def test_padding_in_time_repeats_the_first_latents(make: Make) -> None:
    task = make(patch_time=2, grid="slice")
    found = task.space.encode_batch(clips(), NOISE, True)
    assert found.padding == 1 and found.x0.shape[1] == 4
    assert torch.equal(found.x0[:, 0], found.x0[:, 1])
    assert make(patch_time=2, grid="slice", frames=5).space.encode_batch(clips(frames=5), NOISE, True).padding == 0
    assert task.tokens_per_clip() == 2 * 2 * 2 + 6


def times(task: CogVideoX, noise: Noise) -> torch.Tensor:
    """The levels at which a training step scores."""
    seen = []
    scored = task.compute_errors
    task.compute_errors = lambda clips, text, t, eps: seen.append(t) or scored(clips, text, t, eps)  # type: ignore[method-assign]
    task.train()(clips(noise.batch), noise)
    task.compute_errors = scored  # type: ignore[method-assign]
    return seen[0]


def test_a_batch_covers_all_levels_and_every_sample_all_of_them_in_time(make: Make) -> None:
    task = make()
    drawn = [times(task, Noise.for_rows(3, step, 32)) for step in range(40)]
    for t in drawn:
        assert (t.sort().values.diff() < 80).all() and len(t.unique()) == 32  # gaps of 31 on average
    one = torch.stack(drawn)[:, 5]
    assert one.min() < 100 and one.max() > 900 and 300 < one.float().mean() < 700
    whole = Noise.for_rows(3, 7, 32)
    assert torch.equal(times(task, whole.rows(8, 16)), drawn[7][8:16])  # whatever the processes


# The loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_squared_error_of_v_in_float32(make: Make) -> None:
    """v-MSE is the error of x0 over 1 − ᾱ."""
    task, batch = make(caption_dropout=0.0, sample={"steps": 2, "guidance": 1.0}), clips()
    x0 = task.space.encode_batch(batch, NOISE, True).x0
    t, eps = times(task, NOISE), NOISE.normal("noise", *x0.shape[1:])
    kept = torch.tensor(task.diffusion.alpha_bar)[t].view(-1, 1, 1, 1, 1).float()
    x_t = kept.sqrt() * x0 + (1 - kept).sqrt() * eps
    v = task.predict(x_t, t, task.texts.encode_batch(batch))
    wanted = ((kept.sqrt() * x_t - (1 - kept).sqrt() * v - x0) ** 2).flatten(1).mean(1) / (1 - kept.flatten())
    found = task(batch, NOISE).error
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted, rtol=1e-3)


@pytest.mark.parametrize("patch_time", [1, 2])
def test_shorter_clips_stand_still_at_the_end_and_are_not_scored_there(make: Make, patch_time: int) -> None:
    """A clip of 5 of 9 frames: two of three latent frames are real, and what stands after it makes no difference."""
    task, whole = make(caption_dropout=0.0, patch_time=patch_time, grid="slice", sample={"guidance": 1.0}), clips()
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[1, 5:] = False
    short = replace(whole, frame_mask=mask)
    found = task.space.encode_batch(short, NOISE, True)
    assert found.times[:, found.padding :].tolist() == [[True] * 3, [True, True, False], [True] * 3, [True] * 3]
    shown = replace(short, pixels=torch.where(mask[:, :, None, None, None], short.pixels, 255))
    error = task(short, NOISE).error
    assert torch.equal(task(shown, NOISE).error, error)
    assert torch.equal(task.precompute(shown)["latents"], task.precompute(short)["latents"])
    plain = task(whole, NOISE).error
    torch.testing.assert_close(error[[0, 2, 3]], plain[[0, 2, 3]])
    assert not torch.allclose(error[1], plain[1])
    # by hand: the mean over the latent frames that are real
    seen = []
    predict = task.predict
    task.predict = lambda x, t, *rest: seen.append((x, t, predict(x, t, *rest))) or seen[-1][2]
    task(short, NOISE)
    x_t, t, v = seen[0]
    eps = NOISE.normal("noise", *x_t.shape[1:])
    wanted = (v - task.diffusion.target(found.x0, eps, t)).square()[1, :-1].mean()
    torch.testing.assert_close(error[1], wanted)
    cached = Batch(
        slots=whole.slots, captions=whole.captions, latents=task.precompute(short)["latents"], frame_mask=mask
    )
    torch.testing.assert_close(task(cached, NOISE).error, error)


@pytest.mark.parametrize("patch_time", [1, 2])
def test_a_padded_clip_is_predicted_as_it_would_be_alone(make: Make, patch_time: int) -> None:
    """Noisy copies of the last frame would tell what it shows, and sampling has none."""
    task = make(patch_time=patch_time, grid="slice").eval()
    with torch.no_grad():
        for parameter in task.network.parameters():  # gates start at zero
            parameter.normal_(std=0.2)
    x, t = torch.randn(2, 4, task.space.channels, 8, 8), torch.tensor([300, 800])
    text = torch.randn(2, task.texts.length, task.texts.width)
    times = torch.tensor([[True, True, False, False]]).expand(2, -1)
    alone = task.predict(x[:, :2], t, text)
    torch.testing.assert_close(task.predict(x, t, text, times=times)[:, :2], alone)
    assert not torch.allclose(task.predict(x, t, text)[:, :2], alone, atol=1e-3)
    eps = torch.randn_like(x)
    padded = task.compute_errors(LatentClips(x, None, 0, times), text, t, eps)
    cut = task.compute_errors(LatentClips(x[:, :2], None, 0), text, t, eps[:, :2])
    torch.testing.assert_close(padded, cut)


def test_the_loss_is_the_mean_over_the_latents_that_the_mask_shows(make: Make) -> None:
    task, whole = make(caption_dropout=0.0, sample={"guidance": 1.0}), clips()
    mask = torch.zeros(4, 8, 8, dtype=torch.uint8)
    mask[:, :, :4] = 255  # the left half
    seen = []
    predict = task.predict
    task.predict = lambda x, t, *rest: seen.append((x, t, predict(x, t, *rest))) or seen[-1][2]
    found = task(replace(whole, loss_mask=mask), NOISE).error
    x_t, t, v = seen[0]
    x0, eps = task.space.encode_batch(whole, NOISE, True).x0, NOISE.normal("noise", *x_t.shape[1:])
    half = x_t.shape[-1] // 2
    wanted = (v - task.diffusion.target(x0, eps, t)).square()[..., :half].flatten(1).mean(1)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        task(replace(whole, loss_mask=torch.full_like(mask, 255)), NOISE).error, task(whole, NOISE).error
    )


def test_the_python_examples_of_cogvideox_md_run(make: Make) -> None:
    page = (Path(__file__).parents[3] / "docs" / "cogvideox.md").read_text(encoding="utf-8")
    decode, weights = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    task = make()
    posterior = task.precompute(clips())["latents"]
    loaded = SimpleNamespace(load=lambda run: SimpleNamespace(task=task))
    exec(decode, {"kg": loaded, "RUN": "run", "samples": posterior[:, :, : task.space.channels], "inputs": posterior})
    names = {"task": task, "state": {name: value.clone() for name, value in diffusers_state(task).items()}}
    before = {name: value.clone() for name, value in task.network.state_dict().items()}
    for parameter in task.network.parameters():
        torch.nn.init.zeros_(parameter)
    exec(weights, names)
    assert all(torch.equal(value, before[name]) for name, value in task.network.state_dict().items())
    assert names["state"].keys() == diffusers_state(task).keys()


def test_a_new_stage_starts_with_every_block_silent(make: Make) -> None:
    """Zero output: the loss is the variance of the target, and every weight of the last layer has a gradient."""
    task = make(lively=False)
    loss = task.loss("model", task(clips(), NOISE)).total.value()
    assert 0.1 < loss < 2.0
    loss.backward()
    assert task.network.patch_out.weight.grad.abs().sum() > 0


def test_validation_gives_the_loss_of_every_range_of_noise(make: Make) -> None:
    task, batch = make(validation_bins=4).eval(), clips()
    one, two = (task.validate(batch, NOISE) for _ in range(2))
    names = ["loss/t0000-0249", "loss/t0250-0499", "loss/t0500-0749", "loss/t0750-0999"]
    assert list(one) == ["loss", *names]
    assert all(torch.equal(one[name].sum, two[name].sum) for name in one)
    values = torch.stack([one[name].value() for name in names])
    assert torch.allclose(one["loss"].value(), values.mean())
    assert values.std() > 0  # little noise is harder to tell from the data than much
    levels = [task._draw_timesteps(NOISE, low, low + 250) for low in (0, 250, 500, 750)]
    assert all(((low <= t) & (t < low + 250)).all() for low, t in zip((0, 250, 500, 750), levels, strict=True))


def test_learns_one_clip(make: Make) -> None:
    task, batch = make(lively=False, caption_dropout=0.0, sample={"steps": 2, "guidance": 1.0}), clips(rows=2)
    stepper = Stepper(task, TrainConfig(lr=3e-3, batch_size=2, warmup=0, steps=80, ema=EmaConfig(decay=0)))
    losses = [float(stepper.step(step, [batch])["loss"]) for step in range(80)]
    assert sum(losses[-10:]) < 0.4 * sum(losses[:10])


# Text ------------------------------------------------------------------------------------------------------------


def test_captions_matter_and_dropped_ones_do_not(make: Make) -> None:
    task, batch = make(), clips()
    other = replace(batch, captions=CAPTIONS[::-1])
    assert not torch.allclose(task.texts.encode_batch(batch), task.texts.encode_batch(other))
    dropped = torch.ones(4, dtype=torch.bool)
    assert torch.equal(task.texts.encode_batch(batch, dropped), task.texts.encode_batch(other, dropped))


def test_a_learning_encoder_is_asked_once_a_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call for the empty caption would be compiled by itself."""
    task = make(null_text="empty")
    asked: list[int] = []
    encode = task.texts.encoder.encode
    monkeypatch.setattr(task.texts.encoder, "encode", lambda captions: asked.append(len(captions)) or encode(captions))
    dropped = torch.tensor([True, False, True, False])
    found = task.texts.encode_batch(clips(), dropped)
    assert asked == [5]
    kept = task.texts.encode_batch(clips())
    assert torch.allclose(found[~dropped], kept[~dropped])
    assert torch.allclose(found[dropped], task.texts.null(found.device).expand_as(found[dropped]))


@pytest.mark.parametrize("null", ["empty", "zeros", "learned"])
def test_no_caption_is_the_same_in_training_and_drawing(make: Make, null: str) -> None:
    task = make(null_text=null)
    trained = task.texts.encode_batch(clips(), torch.ones(4, dtype=torch.bool))
    _, away = task.texts.encode_prompts(Prompts(NOISE, captions=CAPTIONS))
    free, nothing = task.texts.encode_prompts(Prompts(NOISE))
    assert nothing is None
    assert torch.equal(trained, away) and torch.equal(trained, free)
    assert torch.equal(trained, task.texts.encode_batch(replace(clips(), captions=[""] * 4)))
    assert trained.any() == (null != "zeros")
    _, negative = task.texts.encode_prompts(Prompts(NOISE, captions=CAPTIONS, negative=["three"] * 4))
    assert not torch.equal(negative, away)


@pytest.mark.parametrize("null", ["empty", "zeros", "learned"])
def test_a_blank_caption_is_the_same_in_a_cache(make: Make, null: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(text={"kind": "given", "width": 8, "length": 5}, null_text="zeros" if null == "empty" else null)
    task.texts.null_text = null

    def encode(captions: list[str]) -> tuple[Tensor, Tensor]:
        rows = [torch.full((5, 8), len(caption) + 1.0) for caption in captions]
        return torch.stack(rows), torch.ones(len(captions), 5, dtype=torch.bool)

    monkeypatch.setattr(task.texts.encoder, "encode", encode)
    batch = replace(clips(), captions=["one", "", "three", " "])
    fields = task.texts.precompute(batch)
    assert torch.equal(task.texts.encode_batch(replace(batch, **fields)), task.texts.encode_batch(batch))


def test_given_embeddings_are_hidden_where_masked(make: Make) -> None:
    task = make(text={"kind": "given", "width": 8, "length": 5}, null_text="learned")
    embeds = torch.randn(4, 5, 8)
    mask = torch.arange(5)[None] < torch.tensor([1, 2, 3, 5])[:, None]
    batch = replace(clips(captions=False), text_embeds=embeds, text_mask=mask)
    changed = replace(batch, text_embeds=torch.where(mask[..., None], embeds, 9.0))
    assert torch.equal(task(batch, NOISE).error, task(changed, NOISE).error)
    assert task.precompute(batch).keys() == {"latents", "text_embeds", "text_mask"}
    with pytest.raises(InputError, match="8"):
        task(replace(batch, text_embeds=torch.zeros(4, 5, 3)), NOISE)
    # Data may have captions too: what cannot read them draws by what was given.
    wanted, _ = task.texts.encode_prompts(Prompts(NOISE, captions=CAPTIONS, batch=batch))
    assert torch.equal(wanted, embeds * mask[..., None])


def test_without_text_nothing_is_asked(make: Make) -> None:
    task = make(text={"kind": "none"}, null_text="zeros")
    assert task.reads == {"pixels"}
    assert task(clips(captions=False), NOISE).error.isfinite().all()


# Image to video --------------------------------------------------------------------------------------------------


def image_to_video(make: Make, **image) -> object:
    return make(first_frame=True, image={"dropout": 0.0, "noise": None, **image})


def from_cache(batch: Batch, kept: dict[str, Tensor]) -> Batch:
    extra = {"first_frame": kept["first_frame"]}
    return Batch(slots=batch.slots, captions=batch.captions, latents=kept["latents"], extra=extra)


def test_the_first_frame_is_shown_at_the_beginning(make: Make) -> None:
    task, batch = image_to_video(make), clips()
    found = task.space.encode_batch(batch, NOISE, True)
    shown = task.space.build_condition(found.first, found.padding, found.x0)
    assert shown.shape == found.x0.shape and not shown[:, 1:].any()
    assert (shown[:, 0] - ToyCodec().encode(batch.video[:, :1])[:, 0]).abs().max() < 0.2
    assert task.network.patch_in.in_features == 2 * 4 * 4
    other = replace(batch, pixels=torch.cat([255 - batch.pixels[:, :1], batch.pixels[:, 1:]], dim=1))
    assert not torch.equal(task.space.encode_batch(other, NOISE, True).first, found.first)
    assert task.can_animate() and not make().can_animate()  # what stands beside a prompt is where it begins


@pytest.mark.parametrize(("clip", "seen"), [(0.0, 1), (1e-9, 2)])
def test_padding_shows_the_first_frame_alone_or_too_where_clips_are_shown(make: Make, clip: float, seen: int) -> None:
    task = make(first_frame=True, patch_time=2, grid="slice", image={"dropout": 0.0, "clip": clip})
    found = task.space.encode_batch(clips(), NOISE, False)
    shown = task.space.build_condition(found.first, found.padding, found.x0)
    assert found.padding == 1 and shown[:, :seen].flatten(2).any(-1).all() and not shown[:, seen:].any()
    assert torch.equal(shown[:, 0], shown[:, seen - 1])


def test_the_first_frame_is_noised_and_dropped_in_training_only(make: Make) -> None:
    batch = clips()
    clean = image_to_video(make).space.encode_batch(batch, NOISE, True).first
    noisy = image_to_video(make, noise=(-1.0, 0.1)).space
    assert 0.1 < (noisy.encode_batch(batch, NOISE, True).first - clean).std() < 0.6  # 0.7 · e^−1
    assert torch.equal(noisy.encode_batch(batch, NOISE, False).first, clean)
    gone = image_to_video(make, dropout=1.0).space
    assert not gone.encode_batch(batch, NOISE, True).first.any()
    assert torch.equal(gone.encode_batch(batch, NOISE, False).first, clean)


@pytest.mark.parametrize("keys", [{}, {"noise": (-1.0, 0.5), "dropout": 0.5, "clip": 0.5}])
def test_a_cache_holds_the_first_frame_and_trains_as_pixels_do(make: Make, keys: dict[str, Any]) -> None:
    """Its noise comes before the codec, and is the same draw."""
    task, batch = image_to_video(make, **keys), clips()
    kept = task.precompute(batch)
    assert kept["latents"].shape[1] == 3 and torch.equal(kept["first_frame"], batch.pixels[:, 0])
    cached = from_cache(batch, kept)
    for training in (True, False):
        one, two = (task.space.encode_batch(b, NOISE, training) for b in (batch, cached))
        assert torch.equal(one.x0, two.x0) and torch.equal(one.first, two.first)
    with pytest.raises(InputError, match="first frame of each clip, and the cached latents have none"):
        task.space.encode_batch(replace(cached, extra={}), NOISE, True)


def test_the_released_image_model_divides_its_first_frame_by_the_scale(make: Make) -> None:
    plain, inverse = (
        make(first_frame=True, image={"dropout": 0.0, "noise": None}, first_frame_inverse_scale=inverse).space
        for inverse in (False, True)
    )
    one, two = (space.encode_batch(clips(), NOISE, True) for space in (plain, inverse))
    assert torch.equal(one.x0, two.x0)
    assert torch.allclose(two.first, one.first / 0.49)


def test_some_clips_are_shown_more_than_their_first_frame(make: Make) -> None:
    batch = clips(rows=64, frames=13)
    task = image_to_video(partial(make, frames=13), clip=0.5)
    noise = Noise.for_rows(1, 5, 64)
    found = task.space.encode_batch(batch, noise, True)
    shown = task.space.build_condition(found.first, found.padding, found.x0)
    counts = shown.flatten(2).any(-1).sum(1)
    assert {1, 2, 3} == set(counts.tolist())  # all but one of four
    assert 20 <= (counts > 1).sum() <= 44
    for row, count in enumerate(counts.tolist()):
        assert shown[row, :count].flatten(1).any(-1).all()
        if count > 1:
            assert torch.equal(shown[row, :count], found.x0[row, :count])
    assert task.space.encode_batch(batch, noise, False).first.shape[1] == 1
    cached = task.space.encode_batch(from_cache(batch, task.precompute(batch)), noise, True)
    assert torch.equal(cached.first, found.first)


def test_what_is_shown_of_a_clip_is_noised_dropped_and_padded_as_a_frame_is(make: Make) -> None:
    batch, noise = clips(rows=8, frames=13), Noise.for_rows(1, 5, 8)
    noisy = image_to_video(partial(make, frames=13), clip=1.0, noise=(-1.0, 0.1)).space.encode_batch(batch, noise, True)
    behind = noisy.first[:, :2] - noisy.x0[:, :2]
    assert 0.25 < behind.std() < 0.5  # e^−1
    gone = image_to_video(partial(make, frames=13), clip=1.0, dropout=1.0).space.encode_batch(batch, noise, True)
    assert not gone.first.any()
    padded = make(
        frames=9, patch_time=2, grid="slice", first_frame=True, image={"dropout": 0.0, "noise": None, "clip": 1.0}
    )
    found = padded.space.encode_batch(clips(), NOISE, True)
    shown = padded.space.build_condition(found.first, found.padding, found.x0)
    assert shown.shape == found.x0.shape and torch.equal(shown[:, :3], found.x0[:, :3]) and not shown[:, 3:].any()


def test_a_vae_that_is_a_stage_shows_its_reconstructions_itself(make: Make) -> None:
    task = make()
    assert not task.can_reconstruct()


# Storage ---------------------------------------------------------------------------------------------------------


def test_weights_may_be_kept_in_bf16(make: Make) -> None:
    full, half = make(), make(weights_in="bf16")
    assert all(p.dtype == torch.bfloat16 for p in half.network.parameters())
    for source, target in zip(full.network.parameters(), half.network.parameters(), strict=True):
        target.data.copy_(source)
    one, two = (task(clips(), NOISE).error for task in (full, half))
    assert two.dtype == torch.float32
    assert torch.allclose(one, two, rtol=0.05) and not torch.equal(one, two)


def test_everything_trains_and_is_saved(make: Make) -> None:
    task = make()
    names = set(player_parameters(task, "model"))
    assert names == {name for name, _ in task.named_parameters()}
    saved = {name: value.clone() for name, value in task_state_dict(task).items()}
    again = make(lively=False, assets=task.assets())
    load_weights(again, saved)
    assert torch.equal(task(clips(), NOISE).error, again(clips(), NOISE).error)
