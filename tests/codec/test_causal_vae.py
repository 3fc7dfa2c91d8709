from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kineograph.codec.causal_vae import TASK, CausalVAE, CausalVAEConfig
from kineograph.core.batch import Batch, Sample, Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, load_weights, player_parameters, task_state_dict
from tests.codec.playing import gradients, noise_for, run_player, train, validate_in_shares

SMALL = {
    "widths": [8, 8, 16], "layers": 1, "latent_channels": 4, "groups": 4, "temporal": 4, "perceptual": {"weight": 0},
}  # fmt: skip
GAME = {"adversarial": {"width": 8, "levels": 2}}
each_norm = pytest.mark.parametrize("norm", ["chunk", "frame"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(size=(16, 16), channels: int = 3, frames: int = 9, stirred: bool = True, **keys) -> CausalVAE:
    """`stirred`: random weights everywhere, also where training starts at zero."""
    config = parse(CausalVAEConfig, {**SMALL, **keys})
    task = CausalVAE.build(config, BuildContext(Shape(frames, *size, channels, 8.0), note=lambda line: None))
    if stirred:
        for part in (task.encoder, task.decoder):
            for p in part.parameters():
                torch.nn.init.normal_(p, std=0.2)
    return task


def batch_for(task: CausalVAE, lengths: tuple[int, ...] | None = None) -> Batch:
    shape = task.shape
    samples = [
        Sample(pixels=torch.randint(0, 256, (length, shape.channels, shape.height, shape.width), dtype=torch.uint8))
        for length in lengths or (shape.frames, shape.frames)
    ]
    return Batch.collate(samples, range(len(samples)))


# Codec -------------------------------------------------------------------------------------------------------------


def test_it_is_found_by_name_and_has_no_vocabulary():
    assert find_task("causal_vae") is TASK is CausalVAE
    assert build().vocabulary is None


@each_norm
@pytest.mark.parametrize(
    ("widths", "temporal", "frames", "shape"),
    [([8, 8], 1, 5, (5, 8, 12)), ([8, 8], 2, 7, (4, 8, 12)), ([8, 8, 8], 4, 13, (4, 4, 6)), ([8, 8, 8, 8], 4, 1, (1, 2, 3))],
)  # fmt: skip
def test_latents_of_every_compression_decode_to_what_forward_reconstructs(norm, widths, temporal, frames, shape):
    task = build((16, 24), 2, frames, norm=norm, widths=widths, temporal=temporal, scale=0.7).eval()
    batch = batch_for(task)
    latents = task.encode(batch.video)
    assert latents.shape == (2, shape[0], 4, *shape[1:])
    assert task.shape_for(frames, 16, 24) == shape
    assert task.posterior(batch.video).shape == (2, shape[0], 8, *shape[1:])
    assert torch.allclose(latents, task.posterior(batch.video)[:, :, :4] * 0.7)
    pixels = task.decode(latents)
    assert pixels.shape == batch.pixels.shape
    assert 0 <= pixels.min() < pixels.max() <= 1
    fake = task(batch, noise_for(batch)).fake.unflatten(0, (2, frames))
    assert torch.allclose(pixels, ((fake + 1) / 2).clamp(0, 1), atol=1e-5)
    assert torch.equal(task.reconstruct(batch), pixels)


def test_a_preset_of_64_pixels_and_17_frames_has_5_8_8_8():
    task = build((64, 64), 3, 17, widths=[8, 8, 8, 16], latent_channels=8)
    assert task.shape_for(17, 64, 64) == (5, 8, 8)
    assert task.latent_channels == 8


def test_encode_gives_the_mean_or_a_sample_of_the_noise_it_is_given():
    task = build(scale=2.0).eval()
    batch = batch_for(task)
    posterior = task.posterior(batch.video)
    mean, deviation = posterior[:, :, :4], (posterior[:, :, 4:] / 2).exp()
    noise = noise_for(batch, 3)
    assert torch.equal(task.encode(batch.video), mean * 2)
    sampled = task.encode(batch.video, noise=noise)
    assert torch.allclose(sampled, 2 * (mean + deviation * noise.normal("posterior", *mean.shape[1:])))
    assert torch.equal(sampled, task.latents_of(posterior, noise))  # from a cache
    half = task.latents_of(posterior[1:], noise.rows(1, 2))
    assert torch.equal(sampled[1:], half)
    assert not torch.equal(sampled, task.encode(batch.video, noise=noise_for(batch, 4)))
    low = task.latents_of(posterior.half(), noise)
    assert low.dtype == torch.float32
    assert torch.allclose(low, sampled, atol=1e-2)


@pytest.mark.parametrize("changed", range(17))
def test_latents_do_not_know_the_future(changed):
    """Norms over a chunk tell its frames of one another, and no chunk of a later one; norms of a frame tell nothing."""
    clip = torch.rand(1, 17, 3, 8, 8)
    other = clip.clone()
    other[:, changed] = torch.rand_like(other[:, changed])
    for norm, first in (("frame", (changed + 3) // 4), ("chunk", 0 if changed < 9 else 3)):
        task = build((8, 8), frames=17, norm=norm).eval()
        apart = (task.posterior(clip) - task.posterior(other)).abs().amax((0, 2, 3, 4))  # of each latent
        assert (apart[:first] == 0).all()
        assert (apart[first:] > 0).all()


@pytest.mark.parametrize("changed", range(5))
def test_pixels_do_not_know_the_latents_of_the_future(changed):
    latents = torch.randn(1, 5, 4, 2, 2)
    other = latents.clone()
    other[:, changed] += torch.randn_like(other[:, changed])
    for norm, first in (("frame", max(0, 4 * changed - 3)), ("chunk", 0 if changed < 3 else 9)):
        task = build((8, 8), frames=17, norm=norm, scale=1.0).eval()
        apart = (task.decode(latents) - task.decode(other)).abs().amax((0, 2, 3, 4))  # of each frame
        assert (apart[:first] == 0).all()
        assert (apart[first:] > 0).all()


def test_an_image_has_the_latent_of_a_clip_that_begins_with_it():
    """With norms of a frame always; with norms over a chunk where the first chunk stands still, and only there."""
    clip = torch.rand(2, 17, 3, 16, 16)
    alone = build(frames=17, norm="frame").eval()
    assert torch.allclose(alone.encode(clip[:, :1])[:, 0], alone.encode(clip)[:, 0], atol=1e-5)
    latents = alone.encode(clip)
    assert torch.allclose(alone.decode(latents[:, :1])[:, 0], alone.decode(latents)[:, 0], atol=1e-5)
    assert torch.allclose(alone.encode(clip[:, :13]), latents[:, :4], atol=1e-5)
    together = build(frames=17, norm="chunk").eval()
    assert not torch.allclose(together.encode(clip[:, :1])[:, 0], together.encode(clip)[:, 0], atol=1e-2)
    still = clip.clone()
    still[:, :9] = clip[:, :1]
    assert torch.allclose(
        together.encode(still[:, :1]).expand(-1, 3, -1, -1, -1), together.encode(still)[:, :3], atol=1e-5
    )


def test_chunks_make_no_difference_to_norms_of_a_frame_and_do_to_norms_over_them():
    clip = torch.rand(1, 17, 3, 16, 16)
    for norm, same in (("frame", True), ("chunk", False)):
        found = []
        for chunk in (1, 2, 8):
            torch.manual_seed(0)
            task = build(frames=17, norm=norm, chunk=chunk, scale=1.0).eval()
            latents = task.encode(clip)
            found.append((latents, task.decode(latents.clamp(-2, 2))))
        for latents, pixels in found[1:]:
            assert torch.allclose(latents, found[0][0], atol=1e-4) == same
            assert torch.allclose(pixels, found[0][1], atol=1e-4) == same


def test_what_does_not_fit_is_refused_with_its_neighbours():
    task = build()
    for frames, near in ((12, "9, 13 …"), (2, "1, 5 …"), (0, "1 …")):
        with pytest.raises(ConfigError) as error:
            task.encode(torch.rand(1, frames, 3, 16, 16))
        assert str(error.value) == f"frames={frames} does not fit this causal_vae: use 1 + 4k ({near})"
    with pytest.raises(ConfigError, match=r"data.size=\[18, 16\].*height must be a multiple of 4 \(16 or 20\)"):
        build((18, 16))
    with pytest.raises(ConfigError, match="12 is not a multiple of groups=8"):
        build(widths=[8, 12], groups=8, temporal=2)
    with pytest.raises(ConfigError, match=r"temporal=4 downsamples time at 2 levels.*give more widths"):
        build(widths=[8, 8])
    with pytest.raises(ConfigError, match="multiples of 4, the pixels"):
        build(tile=6)
    with pytest.raises(ConfigError, match="tile_overlap"):
        build(tile=8, tile_overlap=[0.9, 0.1])
    with pytest.raises(ConfigError, match=r"1.15258426 \(CogVideoX 2B\)"):
        build(scale=0.0)
    with pytest.raises(ConfigError, match=r"adversarial.levels=5 .* use 4 or fewer"):
        build(adversarial={"levels": 5})


# Bounded memory ----------------------------------------------------------------------------------------------------


def peak(code, given: torch.Tensor) -> tuple[int, int]:
    """Bytes that `code` holds at most, and those of what it gives."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = code(given)
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most, result.nbytes


def test_memory_grows_with_the_number_of_frames_by_the_result_alone():
    task = build((32, 32), frames=17).eval()
    for code, short, long in (
        (task.posterior, torch.rand(1, 17, 3, 32, 32), torch.rand(1, 49, 3, 32, 32)),
        (task.decode, torch.rand(1, 5, 4, 8, 8), torch.rand(1, 13, 4, 8, 8)),
    ):
        code(short)
        (few, small), (many, large) = peak(code, short), peak(code, long)
        assert few > 3 * small  # the maps outweigh what comes of them
        assert many - few < 2.2 * (large - small)


def test_clips_wait_for_their_turn_when_all_at_once_would_be_too_many(monkeypatch):
    task = build((16, 16), scale=1.0).eval()
    clips = torch.rand(16, 9, 3, 16, 16)
    latents = task.encode(clips)
    pixels = task.decode(latents)
    four = 4 * 4 * (2 * 2 + 1) * 16 * 16 * 8
    monkeypatch.setattr("kineograph.codec.causal_vae.MAX_MAP", four)
    assert torch.allclose(task.encode(clips), latents, atol=1e-5)
    assert torch.allclose(task.decode(latents), pixels, atol=1e-5)
    assert peak(task.posterior, clips)[0] < 1.2 * peak(task.posterior, clips[:4])[0]


def test_tiles_are_about_what_the_whole_is_in_less_memory():
    whole = build((64, 96), scale=1.0, stirred=False).eval()
    tiled = build((64, 96), scale=1.0, tile=[48, 64], tile_overlap=[0.5, 0.5], stirred=False).eval()
    load_weights(tiled, task_state_dict(whole))
    texture = torch.rand(1, 5, 3, 64, 96)  # whose statistics are about the same everywhere
    latents = whole.encode(texture)
    found = tiled.encode(texture)
    assert found.shape == latents.shape
    assert 0 < (found - latents).square().mean() < 0.02 * latents.var()
    pixels, found = whole.decode(latents), tiled.decode(latents)
    assert found.shape == pixels.shape
    assert 0 < (found - pixels).square().mean() < 0.02 * pixels.var()
    assert peak(tiled.posterior, texture)[0] < 0.7 * peak(whole.posterior, texture)[0]
    small = texture[..., :48, :64]
    assert torch.equal(whole.encode(small), tiled.encode(small))  # nothing to cut


# Training ----------------------------------------------------------------------------------------------------------


def test_the_generators_loss_is_reconstruction_and_kl():
    task = build(kl=0.01, loss="l2")
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    loss = task.loss("generator", shared)
    assert task.players == ("generator",)
    error = (shared.fake - shared.real).square().mean()
    posterior = task.posterior(batch.video)
    normal = torch.distributions.Normal(posterior[:, :, :4], (posterior[:, :, 4:] / 2).exp())
    nats = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum() / batch.video.numel()
    assert torch.allclose(loss.terms["kl"].value(), nats, rtol=1e-4)
    assert torch.allclose(loss.terms["reconstruction"].value(), error)
    assert torch.allclose(loss.total.value(), error + 0.01 * nats, rtol=1e-5)
    assert "quantizer" not in loss.terms
    assert not any(name.startswith("codes/") for name in loss.terms)


def test_the_kl_of_a_clip_is_its_own_whatever_is_padded_beside_it():
    """In nats for each value of its pixels: a picture's latents stand for one frame, a clip's for all of its frames."""
    task = build(kl=1)
    batch = batch_for(task, (9, 1))
    both = task(batch, noise_for(batch)).divergence.nats.view(2, 9)
    picture = batch_for(task, (1,))
    picture.pixels[:] = batch.pixels[1:, :1]
    alone = task(picture, noise_for(picture)).divergence.nats
    assert torch.allclose(both[1], alone, rtol=1e-4)
    assert not torch.allclose(both[0], both[1], rtol=1e-2)


def test_training_draws_from_the_posterior_by_sample_and_judging_takes_its_mean():
    task = build()
    batch = batch_for(task)
    first, again, later = (task(batch, noise_for(batch, step)).fake for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, later)
    alone = task(batch.rows([1]), noise_for(batch).rows(1, 2)).fake
    assert torch.allclose(first.unflatten(0, (2, 9))[1], alone, atol=1e-5)
    task.eval()
    assert torch.equal(task(batch, noise_for(batch, 0)).fake, task(batch, noise_for(batch, 1)).fake)


def test_gradients_go_through_the_chunks():
    """What a later chunk shows teaches the layers that saw the earlier one."""
    task = build(frames=17, norm="chunk")
    video = torch.rand(1, 17, 3, 16, 16, requires_grad=True)
    task._moments(video)[:, :, 3:].sum().backward()
    assert video.grad[:, :9].abs().amax() > 0


@each_norm
def test_an_image_beside_clips_is_coded_as_alone(norm):
    task = build(norm=norm, frames=17)
    batch = batch_for(task, (17, 1, 9))
    noise = noise_for(batch)
    fake = task(batch, noise).fake.unflatten(0, (3, 17))
    for row, length in ((1, 1), (2, 9)):
        pixels = batch.pixels[row : row + 1, :length]
        alone = task(Batch(slots=batch.slots[row : row + 1], pixels=pixels), noise.rows(row, row + 1)).fake
        assert torch.allclose(fake[row, :length], alone, atol=1e-4)
    task.eval()
    latents = task.encode(batch.video, batch.frame_mask)
    assert torch.allclose(latents[1, :1], task.encode(batch.video[1:2, :1])[0], atol=1e-5)
    assert task.mask_for(batch.frame_mask).tolist() == [[True] * 5, [True] + [False] * 4, [True] * 3 + [False] * 2]


@pytest.mark.parametrize("keys", [{}, GAME], ids=["plain", "game"])
def test_padding_changes_no_loss(keys):
    task = build(frames=17, **keys)
    batch = batch_for(task, (17, 1, 9))
    other = Batch(slots=batch.slots, pixels=batch.pixels.clone(), frame_mask=batch.frame_mask)
    other.pixels[~batch.frame_mask] = 77
    for player in task.players:
        first, second = (task.loss(player, task(b, noise_for(b))) for b in (batch, other))
        assert float(first.total.count) == 27
        for name, mean in first.terms.items():
            assert torch.allclose(mean.sum, second.terms[name].sum, rtol=1e-4, atol=1e-5), name


def test_losses_add_up_over_micro_batches():
    task = build()
    batch = batch_for(task, (9, 5, 1))
    whole = task.loss("generator", task(batch, noise_for(batch))).total
    parts = [task.loss("generator", task(b, noise_for(b))).total for b in (batch.rows([0, 1]), batch.rows([2]))]
    assert torch.allclose(whole.sum, sum(part.sum for part in parts), rtol=1e-4)
    assert float(whole.count) == sum(float(part.count) for part in parts) == 15


@pytest.mark.usefixtures("trusted")
def test_players_own_their_parts_and_teach_nobody_else():
    task = build(**GAME)
    batch = batch_for(task)
    assert task.players == ("generator", "discriminator")
    owned = [set(player_parameters(task, player)) for player in task.players]
    assert not owned[0] & owned[1]
    assert owned[0] | owned[1] == {name for name, _ in task.named_parameters()}
    shared = task(batch, noise_for(batch))
    loss = run_player(task, "discriminator", shared)
    assert gradients(task, "generator") == 0 < gradients(task, "discriminator")
    assert {"hinge", "penalty"} <= set(loss.terms)
    task.zero_grad()
    loss = run_player(task, "generator", shared)
    assert gradients(task, "discriminator") == 0 < gradients(task, "generator")
    assert {"kl", "adversarial", "adversarial_weight"} <= set(loss.terms)
    assert 0 < loss.terms["adversarial_weight"].value() < 1e4
    late = build(adversarial={"width": 8, "levels": 2, "start": 5})
    assert [late.is_active("discriminator", step) for step in (4, 5)] == [False, True]
    assert "adversarial" not in late.loss("generator", late(batch, noise_for(batch, 4))).terms


def test_the_perceptual_loss_looks(vgg):
    task = build(perceptual={"weight": 0.5, "weights": str(vgg)})
    batch = batch_for(task)
    loss = task.loss("generator", task(batch, noise_for(batch)))
    terms = loss.terms
    assert torch.allclose(
        loss.total.sum,
        terms["reconstruction"].sum + 0.5 * terms["perceptual"].sum + 1e-6 * terms["kl"].sum,
        rtol=1e-5,
    )
    task.eval()
    assert "lpips" in task.validate(batch, noise_for(batch))


def test_a_new_one_paints_the_same_whatever_its_blocks_would_add():
    """Blocks start silent, and the latents' command over norms at y = 1, b = 0."""
    task = build(stirred=False)
    block = task.decoder.mid_block.resnets[0]
    x, z = torch.randn(1, 16, 3, 4, 4), torch.randn(1, 4, 3, 4, 4)
    assert torch.equal(block(x, None, z)[0], x)
    norm = block.norm1
    assert torch.allclose(norm(x, z, True), norm.norm_layer(x))
    assert task.posterior(torch.rand(1, 9, 3, 16, 16))[:, :, 4:].mean() < -3


def test_it_overfits_one_clip():
    """60 steps from torch's own start leave an error four times as large."""
    task = build((16, 16), 1, 5, stirred=False, widths=[8, 16], temporal=2, latent_channels=8, loss="l2")
    ball = torch.zeros(5, 1, 16, 16, dtype=torch.uint8)
    for time in range(5):
        ball[time, :, 4:9, 2 * time : 2 * time + 5] = 255
    batch = Batch.collate([Sample(pixels=ball)], [0])
    train(task, batch, 60, lr=1e-3)
    task.eval()
    assert task.validate(batch, noise_for(batch))["psnr"].value() > 16.5  # 10.5: a clip of its mean brightness


def test_validation_does_not_depend_on_the_number_of_processes(monkeypatch):
    task = build().eval()
    whole = batch_for(task, (9, 5, 9))
    shares = [whole.rows([0]), whole.rows([1, 2]), replace(whole.rows([0]), spare=True)]
    expected = validate_in_shares(task, [whole], monkeypatch)
    found = validate_in_shares(task, shares, monkeypatch)
    assert found == pytest.approx(expected, rel=1e-4)


def test_validation_gives_what_is_seen_and_how_latents_spread():
    task = build(scale="auto")
    batch = batch_for(task, (9, 5))
    task(batch, noise_for(batch))
    task.eval()
    with torch.no_grad():
        found = {name: float(mean.value()) for name, mean in task.validate(batch, noise_for(batch)).items()}
        again = {name: float(mean.value()) for name, mean in task.validate(batch, noise_for(batch, 7)).items()}
    assert found == again
    spread = {"latents/std", "latents/noise", *(f"latents/std_{i:02d}" for i in range(4))}
    assert {"loss", "psnr", "reconstruction", "explained_variance", "kl", *spread} == set(found)
    latents = task.encode(batch.video, batch.frame_mask)
    real = torch.cat([latents[0], latents[1, :2]])  # t c h w
    together = real.var((0, 2, 3), correction=0).mean().sqrt()
    assert found["latents/std"] == pytest.approx(float(together), rel=1e-3)
    assert found["latents/std_02"] == pytest.approx(float(real[:, 2].std(correction=0)), rel=1e-3)
    log_variance = task.posterior(batch.video, batch.frame_mask)[:, :, 4:][task.mask_for(batch.frame_mask)]
    noise = log_variance.exp().mean().sqrt() * task.scale
    assert found["latents/noise"] == pytest.approx(float(noise), rel=1e-3)


# Scale -------------------------------------------------------------------------------------------------------------


def test_the_scale_is_measured_in_training_and_saved():
    task = build(scale="auto")
    batch = batch_for(task, (9, 1, 9, 5))
    assert task.scale == 1
    for step in range(3):
        task(batch, noise_for(batch, step))
    means = task.posterior(batch.video, batch.frame_mask)[:, :, :4]
    real = means[task.mask_for(batch.frame_mask)]
    assert torch.allclose(task.scale, real.var((0, 2, 3), correction=0).mean().rsqrt(), rtol=1e-3)
    other = build(scale="auto")
    load_weights(other, task_state_dict(task))
    assert torch.equal(other.scale, task.scale)
    before = task.scale
    task.eval()
    task(batch, noise_for(batch))
    task.validate(batch, noise_for(batch))
    assert torch.equal(task.scale, before)  # judging changes nothing


def test_a_scale_that_is_given_stays():
    task = build(scale=0.7)
    batch = batch_for(task)
    task(batch, noise_for(batch))
    assert float(task.scale) == pytest.approx(0.7)
    assert "spread" not in task.state_dict()


# How the outside treats it -----------------------------------------------------------------------------------------


def test_blocks_and_compiled_parts():
    task = build(**GAME)
    assert len(task.blocks()) == 3 + 2 + 2 + 6
    assert task.compile_targets() == [task.encoder, task.decoder, task.discriminator]


def test_recomputed_blocks_give_the_same_gradients():
    from kineograph.train.activation_checkpointing import checkpoint_activations

    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        task = build(frames=17)
        batch = batch_for(task)
        if checkpointed:
            for block in task.blocks():
                checkpoint_activations(block)
        task.loss("generator", task(batch, noise_for(batch))).total.sum.backward()
        found.append(torch.cat([p.grad.flatten() for p in task.parameters()]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


def test_maps_stay_in_the_memory_order_that_convolutions_like():
    task = build().eval()
    seen = []
    for part in task.blocks():
        part.register_forward_hook(lambda _, given, result: seen.append(result[0]))
    task.decode(task.encode(torch.rand(2, 17, 3, 16, 16)))
    assert len(seen) > 10
    assert all(x.is_contiguous(memory_format=torch.channels_last_3d) for x in seen)


def test_it_trains_in_half_precision():
    task = build(**GAME)
    batch = batch_for(task)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shared = task(batch, noise_for(batch))
        loss = task.loss("generator", shared)
    loss.total.sum.backward()
    assert loss.total.sum.dtype == shared.fake.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.encoder.parameters())
