"""Training of the decoder: loss, conditions, dropout, the low-resolution image, compilation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import player_parameters
from kineograph.family.dalle2 import Decoder, DecoderConfig
from kineograph.family.dalle2.image_space import blur, crop_squares, downsample
from kineograph.train.activation_checkpointing import checkpoint_activations
from kineograph.train.config import TrainConfig
from kineograph.train.stepper import Stepper
from tests.text.waiting import NoWaiting

from .conftest import PLAIN, ToyClip, batch_of, prompts_of

TEXT = {"kind": "learned", "width": 16, "heads": 2, "depth": 1, "length": 16}


def value(task, batch, noise):
    return task.loss("model", task(batch, noise)).total.value()


def test_found_by_name():
    assert find_task("dalle2") is Decoder


def test_loss_is_the_error_of_the_noise(make, batch, noise):
    task = make().eval()
    x0 = batch.video[:, 0] * 2 - 1
    t, eps = task.draw_timesteps(noise), noise.normal("noise", 3, 16, 16)
    x_t = task.diffusion.add_noise(x0, eps, t)
    expected = F.mse_loss(task.predict(x_t, t, task.encode_batch(batch, noise)), eps)
    torch.testing.assert_close(value(task, batch, noise), expected)


def test_learned_variance_adds_the_variational_bound(make, batch, noise):
    task = make(diffusion={"steps": 100, "learned_variance": True})
    loss = task.loss("model", task(batch, noise))
    assert loss.terms.keys() == {"error", "bound"}
    expected = loss.terms["error"].value() + 1e-3 * 100 * loss.terms["bound"].value()
    torch.testing.assert_close(loss.total.value(), expected)
    assert task.network.unet.out.out_channels == 6


def test_fp16_with_a_learned_variance_is_refused(make):
    learned = make(diffusion={"learned_variance": True})
    with pytest.raises(ConfigError, match=r"precision=fp16.*learned_variance=true.*NaN.*bf16"):
        learned.check_precision("fp16")
    learned.check_precision("bf16")
    make().check_precision("fp16")


def test_validation_is_deterministic_and_covers_all_timesteps(make):
    task = make(image_dropout=1.0).eval()
    noise = Noise.for_rows(seed=3, step=0, rows=64)
    t = task.draw_timesteps(noise)
    assert torch.equal(t, task.draw_timesteps(noise))
    assert torch.histc(t.float(), 8, 0, 100).min() >= 6  # 8 a bin if perfectly even
    assert task.draw_dropout(noise) == (None, None)
    assert not task.train().draw_timesteps(noise).equal(t)


def test_validation_has_the_loss_by_quarter_of_the_timesteps(make, batch):
    task = make().eval()
    with torch.no_grad():
        means = task.validate(batch, Noise(0, 0, batch.slots))
    ranges = [mean for name, mean in means.items() if name.startswith("loss/t")]
    assert len(ranges) == 4
    assert float(sum(mean.sum for mean in ranges)) == pytest.approx(float(means["loss"].sum), rel=1e-5)
    assert float(sum(mean.count for mean in ranges)) == len(batch)


# Conditions ------------------------------------------------------------------------------------------------------


def test_image_and_text_dropout_are_independent(make):
    task = make(image_dropout=0.3, text_dropout=0.6, clip_text=True).train()
    image, text = task.draw_dropout(Noise.for_rows(1, 1, 4000))
    assert abs(image.float().mean() - 0.3) < 0.03
    assert abs(text.float().mean() - 0.6) < 0.03
    assert abs((image & text).float().mean() - 0.18) < 0.03  # independent


@pytest.mark.parametrize("how", ["time", "tokens", "both"])
def test_dropped_rows_do_not_see_their_embedding(make, batch, how):
    task = make(image_embeds=how, image_dropout=1.0).train()
    noise = Noise.for_rows(1, 1, 4)
    changed = batch_of()
    changed.extra["image_embed"] = F.normalize(torch.randn(4, 12), dim=-1)
    assert torch.equal(value(task, batch, noise), value(task, changed, noise))
    task.eval()
    assert not torch.equal(value(task, batch, noise), value(task, changed, noise))


def test_embeddings_in_the_data_replace_the_clip(make, batch, noise):
    task = make().eval()
    other = batch_of()
    other.extra["image_embed"] = ToyClip().embed_images(batch.video) * 3  # of any length
    torch.testing.assert_close(value(task, batch, noise), value(task, other, noise))


def test_row_of_zeros_is_a_missing_embedding(make, noise):
    task = make().eval()
    other = batch_of()
    other.extra["image_embed"] = torch.zeros(4, 12)
    other.extra["image_embed"][1, 3] = 1
    assert task.encode_batch(other, noise).no_image.tolist() == [True, False, True, True]


def test_text_reaches_the_network_and_is_dropped(make, noise):
    task = make(**PLAIN, text=TEXT, text_dropout=0.0, sample={"steps": 4, "guidance": 1.0}).eval()
    a, b = batch_of(), batch_of()
    b.captions = ["something else"] * 4
    assert value(task, a, noise) != value(task, b, noise)
    dropped = make(**PLAIN, text=TEXT, text_dropout=1.0).train()
    assert value(dropped, a, noise) == value(dropped, b, noise)
    assert task.config.reads() == {"pixels", "captions"}
    assert any(name.startswith("conditioner.text") for name in player_parameters(task, "model"))
    assert "text/tokenizer.json" in task.assets()


def test_every_attention_reads_the_clip_encodings(make, batch, noise):
    task = make(clip_text=True, image_embeds="none", cross_attention=True).eval()
    changed = batch_of()
    changed.captions = ["something else"] * 4
    outputs: dict[int, list] = {}
    for number, attention in enumerate(task.network.unet.attentions()):
        attention.cross.register_forward_hook(
            lambda module, args, out, number=number: outputs.setdefault(number, []).append(out)
        )
    for other in (batch, changed):
        task(other, noise)
    assert len(outputs) == 5  # two levels, twice, and the middle
    assert all((a - b).abs().max() > 1e-4 for a, b in outputs.values())


def test_embedding_as_wide_as_the_network_is_still_projected(make):
    clip = ToyClip()
    clip.width = 32  # as the vector that conditions the blocks
    task = make(stages={"clip": clip}, image_tokens=1)
    assert task.network.unet.vector == 32
    assert task.network.to_tokens.weight.shape == task.network.to_vector.weight.shape == (32, 32)


def test_unconditional(make, noise):
    task = make(**PLAIN)
    assert task.reads == {"pixels"}
    assert not any(attention.cross for attention in task.network.unet.attentions())
    plain = batch_of()
    plain.captions = None
    value(task, plain, noise).backward()


def test_configs_that_contradict_themselves_are_refused():
    def refused(match, **keys):
        with pytest.raises(ConfigError, match=match):
            parse(DecoderConfig, {"task": "dalle2", **keys})

    refused("image_embeds=both needs clip")
    refused("clip_text=true needs clip", image_embeds="none", clip_text=True)
    refused("clip_text=true and text.kind=learned", clip="clip", clip_text=True, text={"kind": "learned"})
    refused("remove prior", image_embeds="none", prior="prior")
    refused("low_res needs super-resolution", clip="clip", low_res="base")
    refused("augment has no effect without super-resolution", clip="clip", augment={"noise": 0.3})
    refused("sample.low_res_noise has no effect without", clip="clip", sample={"low_res_noise": 0.1})
    refused("latent_scale=2 has no effect on pixels", clip="clip", latent_scale=2.0)
    refused("crop=20 does not fit this U-Net: use a multiple of 8", clip="clip", low_res_size=8, crop=20)
    latents = {"image_embeds": "none", "codec": "tokenizer"}
    refused("pixels of 256 levels", **latents, diffusion={"learned_variance": True})
    refused("sample.clip=dynamic .* latents", **latents, sample={"clip": "dynamic"})
    refused("raise augment.noise", clip="clip", low_res_size=8, sample={"low_res_noise": 0.2})


def test_sizes_that_do_not_fit_are_refused(make):
    with pytest.raises(ConfigError, match=r"data\.size=18×18.*multiples of 4"):
        make(size=18, multipliers=[1, 2, 2])
    with pytest.raises(ConfigError, match=r"data\.frames=4"):
        make(frames=4)
    with pytest.raises(ConfigError, match=r"low_res_size=16×16 is not smaller than data\.size=16×16"):
        make(low_res_size=16)
    with pytest.raises(ConfigError, match=r"crop=32 does not fit maps of 16×16"):
        make(low_res_size=8, crop=32)


# The low-resolution image ----------------------------------------------------------------------------------------


def test_downsampling_is_antialiased():
    stripes = torch.zeros(1, 3, 16, 16)
    stripes[..., ::2] = 1  # nearest pixels would make it black or white
    assert (downsample(stripes, (8, 8)) - 0.5).abs().max() < 0.2


def test_network_reads_the_low_resolution_image(make, batch, noise):
    task = make(low_res_size=8).eval()
    x_t, t, condition = torch.randn(4, 3, 16, 16), torch.full((4,), 50), task.encode_batch(batch, noise)
    low, level = task.make_low_res(batch.video[:, 0], noise)
    other, _ = task.make_low_res(torch.rand(4, 3, 16, 16), noise)
    assert low.shape == (4, 3, 16, 16)
    a, b = (task.predict(x_t, t, condition, small, level) for small in (low, other))
    assert (a - b).abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_network_reads_the_noise_level_of_the_low_resolution_image(make, batch, noise):
    task = make(low_res_size=8, augment={"noise": 0.5}).train()
    low, level = task.make_low_res(batch.video[:, 0], noise)
    assert level.min() >= 0 and 0.05 < level.max() < 0.5 and level.unique().numel() == 4
    task.eval()
    assert task.make_low_res(batch.video[:, 0], noise)[1].eq(0).all()
    x_t, t, condition = torch.randn(4, 3, 16, 16), torch.full((4,), 50), task.encode_batch(batch, noise)
    a, b = (task.predict(x_t, t, condition, low, level * share) for share in (0.0, 1.0))
    assert (a - b).abs().max() > 1e-4


def test_share_of_blurred_low_resolution_images(make):
    task = make(low_res_size=8, augment={"blur": 0.4}).train()
    rows = 400
    pixels = torch.rand(1, 3, 16, 16).expand(rows, -1, -1, -1)
    low, _ = task.make_low_res(pixels, Noise.for_rows(1, 1, rows))
    sharp = task.eval().make_low_res(pixels[:1], Noise.for_rows(1, 1, 1))[0]
    assert abs(((low - sharp).abs().amax(dim=(1, 2, 3)) > 1e-3).float().mean() - 0.4) < 0.08


def test_blur_keeps_constants_and_the_sum():
    assert torch.allclose(blur(torch.full((1, 3, 8, 8), 0.3), 0.6), torch.tensor(0.3))
    point = torch.zeros(1, 1, 9, 9)
    point[..., 4, 4] = 1
    spread = blur(point, 0.6)
    assert abs(spread.sum() - 1) < 1e-5 and 0.2 < spread[..., 4, 4] < 0.5 and torch.allclose(spread, spread.mT)


def test_image_and_low_resolution_image_are_cropped_alike(make):
    task = make(low_res_size=8, crop=8).train()
    picture = torch.arange(256.0).view(1, 1, 16, 16).expand(3, 3, -1, -1)
    noise = Noise.for_rows(1, 1, 3)
    a, b = task.crop([picture, picture * 2], noise)
    assert a.shape == (3, 3, 8, 8) and torch.equal(a * 2, b)
    assert len({int(row[0, 0, 0]) for row in a}) > 1
    assert torch.equal(
        crop_squares(picture, 8, torch.tensor([2, 0, 8]), torch.tensor([1, 0, 8]))[0], picture[0, :, 2:10, 1:9]
    )
    value(task, batch_of(3), noise).backward()


# Loss masks -----------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_error_of_what_the_mask_shows(make, batch, noise):
    task = make().eval()
    mask = torch.zeros(4, 16, 16, dtype=torch.uint8)
    mask[:, :4] = 255  # the upper quarter
    masked = replace(batch, loss_mask=mask)
    x0 = batch.video[:, 0] * 2 - 1
    t, eps = task.draw_timesteps(noise), noise.normal("noise", 3, 16, 16)
    predicted = task.predict(task.diffusion.add_noise(x0, eps, t), t, task.encode_batch(batch, noise))
    torch.testing.assert_close(value(task, masked, noise), F.mse_loss(predicted[:, :, :4], eps[:, :, :4]))
    everything = replace(batch, loss_mask=torch.full_like(mask, 255))
    torch.testing.assert_close(value(task, everything, noise), value(task, batch, noise))
    assert value(task, replace(batch, loss_mask=torch.zeros_like(mask)), noise) == 0


def test_masks_follow_the_crop_and_the_variance(make, batch, noise):
    """A mask that shows nothing outside the crop in validation, the central 8 × 8."""
    task = make(low_res_size=8, crop=8, diffusion={"steps": 100, "learned_variance": True}).eval()
    mask = torch.zeros(4, 16, 16, dtype=torch.uint8)
    mask[:, 4:12, 4:12] = 255
    torch.testing.assert_close(value(task, replace(batch, loss_mask=mask), noise), value(task, batch, noise))
    assert value(task, replace(batch, loss_mask=255 - mask), noise) == 0


# Forms of the network --------------------------------------------------------------------------------------------


def test_self_conditioning_reads_x0_in_training(make, batch):
    task = make(self_conditioning=True, image_dropout=0.0, sample={"steps": 4, "guidance": 1.0}).train()
    seen = []
    task.network.register_forward_pre_hook(lambda module, args: seen.append(args[8]))
    step = next(step for step in range(9) if task.uses_previous(Noise.for_rows(1, step, 4)))
    noise = Noise.for_rows(1, step, 4)
    task(batch, noise)
    first, second = seen
    assert not first.any()
    t, eps = task.draw_timesteps(noise), noise.normal("noise", 3, 16, 16)
    x_t = task.diffusion.add_noise(batch.video[:, 0] * 2 - 1, eps, t)
    output = task.predict(x_t, t, task.encode_batch(batch, noise))
    torch.testing.assert_close(second, task.diffusion.to_x0(x_t, t, output).clamp(-1, 1))
    share = sum(task.uses_previous(Noise.for_rows(1, step, 4)) for step in range(400)) / 400
    assert 0.4 < share < 0.6


def test_activation_checkpointing_gives_the_same_gradients(make, batch, noise):
    gradients = []
    for again in (False, True):
        task = make(efficient=True)
        if again:
            for block in task.blocks():
                checkpoint_activations(block)
        value(task, batch, noise).backward()
        gradients.append([p.grad for p in task.network.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_overfits_one_image(make):
    options = {"steps": 20, "guidance": 1.0}
    task = make(untrained=True, size=8, width=16, diffusion={"steps": 100, "objective": "v"}, sample=options)
    batch = batch_of(1, size=8, seed=5)
    many = batch.rows([0] * 16)
    many.slots = torch.arange(16)
    stepper = Stepper(task, TrainConfig(steps=120, batch_size=16, lr=4e-3, warmup=10, ema={"decay": 0.9}), device="cpu")
    losses = [float(stepper.step(step, [many])["loss"]) for step in range(120)]
    assert sum(losses[-20:]) < 0.25 * sum(losses[:20])
    with stepper.eval_mode() as evaluated:
        drawn = evaluated.sample(prompts_of(2, batch=batch.rows([0, 0])), task.config.sample)
    assert F.mse_loss(drawn, batch.video.expand_as(drawn)) < 0.01
    blank = F.mse_loss(torch.full_like(drawn, float(batch.video.mean())), batch.video.expand_as(drawn))
    assert blank > 0.03


# On the device ---------------------------------------------------------------------------------------------------

LEARNED = {"kind": "learned", "width": 16, "depth": 1, "heads": 2, "length": 16}


def test_compile_targets(make):
    task = make(text=LEARNED)
    assert task.text.transformer in task.compile_targets() and task.network in task.compile_targets()
    assert (
        len(make(text={**LEARNED, "depth": 0, "positions": "none"}).compile_targets())
        == len(make().compile_targets())
        == 2
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"text": LEARNED},
        {"clip_text": True, "diffusion": {"steps": 100, "learned_variance": True}},
        {"low_res_size": 8, "augment": {"noise": 0.2}, "crop": 8},
        {"self_conditioning": True},
    ],
    ids=["text", "clip", "low-res", "self-conditioning"],
)
def test_a_step_never_waits_for_the_device(make, batch, noise, keys):
    task = make(**keys).train()
    task(batch, noise)
    with NoWaiting():
        task.loss("model", task(batch, noise)).total.sum.backward()
