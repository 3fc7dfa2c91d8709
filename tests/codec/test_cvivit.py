from __future__ import annotations

import pytest
import torch

from kineograph.codec.cvivit import TASK, CViViT
from kineograph.core.batch import Batch, Sample
from kineograph.core.errors import ConfigError
from kineograph.core.registry import find_task
from kineograph.core.task import load_weights, task_state_dict
from kineograph.nn.quantizers import LFQ
from tests.codec.playing import noise_for, parameters_of_all, train
from tests.codec.small_cvivit import GAME, batch_for, build, each_quantizer, sizes


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Codec -------------------------------------------------------------------------------------------------------------


def test_it_is_found_by_name():
    assert find_task("cvivit") is TASK is CViViT


@each_quantizer
@sizes
def test_tokens_decode_to_what_forward_reconstructs(quantizer, channels, frames, height, width):
    task = build((height, width), channels, frames, quantizer=quantizer)
    batch = batch_for(task)
    task(batch, noise_for(batch))  # a codebook that has moved
    task.eval()
    tokens = task.encode(batch.video, batch.frame_mask)
    assert tokens.dtype == torch.int64
    shape = (1 + (frames - 1) // 2, height // 4, width // 4)
    assert tokens.shape == (2, *task.shape_for(frames, height, width)) == (2, *shape)
    assert task.tokens_per_clip() == shape[0] * shape[1] * shape[2]
    assert tokens.max() < task.vocabulary == task.quantizer.codes
    pixels = task.decode(tokens)
    assert pixels.shape == batch.pixels.shape
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    fake = task(batch, noise_for(batch)).fake.unflatten(0, (2, frames))
    assert torch.allclose(pixels, ((fake + 1) / 2).clamp(0, 1), atol=1e-5)
    assert torch.equal(task.reconstruct(batch), pixels)


def test_encoding_computes_no_entropy(monkeypatch):
    task = build(quantizer={"kind": "lfq", "codes": 256}).eval()
    batch = batch_for(task)
    wanted = task(batch, noise_for(batch)).quantized.ids
    monkeypatch.setattr(LFQ, "entropies", lambda *_: pytest.fail("nobody reads it"))
    assert torch.equal(task.encode(batch.video).flatten(0, 1), wanted)


@pytest.mark.parametrize("changed", range(5))
def test_tokens_do_not_know_the_future(changed):
    task = build(temporal_depth=2).eval()
    clips = batch_for(task).video
    other = clips.clone()
    other[:, changed] = torch.rand_like(other[:, changed])
    first, second = task.encoder(clips * 2 - 1), task.encoder(other * 2 - 1)
    apart = (first - second).abs().amax((0, 2, 3, 4))  # of each token time
    time = (changed + 1) // 2
    assert (apart[:time] == 0).all()
    assert (apart[time:] > 0).all()
    assert torch.equal(task.encode(clips)[:, :time], task.encode(other)[:, :time])


@pytest.mark.parametrize("changed", range(3))
def test_pixels_do_not_know_the_tokens_of_the_future(changed):
    task = build(temporal_depth=2).eval()
    tokens = torch.randint(task.vocabulary, (2, 3, 4, 4))
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1 + torch.randint(100, (2, 4, 4))) % task.vocabulary
    apart = (task.decode(tokens) - task.decode(other)).abs().amax((0, 2, 3, 4))  # of each frame
    start = max(0, 2 * changed - 1)
    assert (apart[:start] == 0).all()
    assert (apart[start:] > 0).all()


@each_quantizer
def test_an_image_has_the_tokens_of_a_clip_that_begins_with_it(quantizer):
    task = build(quantizer=quantizer)
    batch = batch_for(task, (5,) * 8)
    train(task, batch, 3)
    task.eval()
    tokens = task.encode(batch.video)
    for frames in (1, 3):
        assert torch.equal(task.encode(batch.video[:, :frames]), tokens[:, : (frames + 1) // 2])
        pixels = task.decode(tokens[:, : (frames + 1) // 2])
        assert torch.allclose(pixels, task.decode(tokens)[:, :frames], atol=1e-5)


def test_clips_of_any_size_at_run_time():
    task = build((16, 16), frames=5).eval()
    for frames, height, width in ((1, 8, 8), (9, 16, 16), (21, 4, 32)):
        tokens = task.encode(torch.rand(1, frames, 3, height, width))
        assert tokens.shape == (1, (frames + 1) // 2, height // 4, width // 4)
        assert task.decode(tokens).shape == (1, frames, 3, height, width)


def test_places_are_told_apart():
    """Without positions, equal patches all over a frame would have equal features."""
    flat = build().eval().encoder(torch.zeros(1, 1, 3, 16, 16)).flatten(0, 3)  # N D
    assert torch.cdist(flat, flat).add(torch.eye(16)).min() > 1e-3


def test_the_order_of_the_past_matters():
    """Without positions, the last time of one block would see a bag of times."""
    temporal = build().encoder.temporal
    x = torch.randn(1, 4, 1, 1, 16)
    apart = temporal(x) - temporal(x[:, [0, 2, 1, 3]])
    assert apart[0, 0].abs().max() == 0
    assert apart[0, 3].abs().max() > 1e-3


def test_flat_patches_of_different_brightness_are_told_apart():
    """A norm of patches would make them one."""
    levels = torch.tensor([-1.0, -0.5, 0.1, 0.5, 1.0])[:, None, None, None, None].expand(-1, 1, 3, 16, 16)
    found = build().eval().encoder(levels)[:, 0, 1, 1]
    assert torch.cdist(found, found).add(10 * torch.eye(5)).min() > 0.1


def test_patch_may_be_rectangular_and_temporal_patch_longer():
    task = build((16, 24), frames=7, patch=[4, 8], temporal_patch=3).eval()
    tokens = task.encode(torch.rand(2, 7, 3, 16, 24))
    assert tokens.shape == (2, 3, 4, 3)
    assert task.decode(tokens).shape == (2, 7, 3, 16, 24)
    every = build(frames=4, temporal_patch=1)
    assert every.shape_for(4, 16, 16) == (4, 4, 4)


@pytest.mark.parametrize(
    ("frames", "patch", "near"), [(12, 2, "11, 13 …"), (2, 4, "1, 5 …"), (0, 2, "1 …"), (16, 4, "13, 17 …")]
)
def test_frames_that_do_not_fit_are_named_with_their_neighbours(frames, patch, near):
    task = build(frames=1, temporal_patch=patch)
    with pytest.raises(ConfigError) as error:
        task.shape_for(frames, 16, 16)
    assert str(error.value) == f"frames={frames} does not fit this cvivit: use 1 + {patch}k ({near})"


def test_what_does_not_fit_is_refused_everywhere():
    with pytest.raises(ConfigError, match="frames=4 does not fit"):
        build(frames=4)
    with pytest.raises(
        ConfigError, match=r"data.size=\[18, 16\].*covers 4 × 4.*height must be a multiple of 4 \(16 or 20\)"
    ):
        build((18, 16))
    with pytest.raises(ConfigError, match=r"width must be a multiple of 8 \(16 or 24\)"):
        build((16, 20), patch=[4, 8])
    task = build()
    with pytest.raises(ConfigError, match="frames=6"):
        task.encode(torch.rand(1, 6, 3, 16, 16))
    with pytest.raises(ConfigError, match="width=18 must be a multiple of 2 × heads = 4"):
        build(width=18)
    with pytest.raises(ConfigError, match="at least 1 pixel"):
        build(patch=0)
    with pytest.raises(ConfigError, match=r"adversarial.levels=5 .* use 4 or fewer"):
        build(adversarial={"levels": 5})


def test_depths_are_built_as_asked():
    def count(**keys) -> list[int]:
        task = build(**keys)
        parts = (task.encoder.spatial, task.encoder.temporal, task.decoder.spatial, task.decoder.temporal)
        return [len(part.transformer.blocks) for part in parts]

    assert count(spatial_depth=2, temporal_depth=3) == [2, 3, 2, 3]
    assert count(decoder_spatial_depth=3, decoder_temporal_depth=2) == [1, 1, 3, 2]
    assert len(build(spatial_depth=2, temporal_depth=3).blocks()) == 10


def test_blocks_are_configured_as_asked():
    plain = build()
    wide = build(mlp_ratio=8)
    assert wide.encoder.spatial.transformer.blocks[0].mlp.down.in_features > 16 * 4
    assert not build(mlp="gelu").decoder.temporal.transformer.blocks[0].mlp.gated
    assert isinstance(build(norm="layer").encoder.spatial.transformer.norm, torch.nn.LayerNorm)
    assert isinstance(build(qk_norm=False).encoder.spatial.transformer.blocks[0].attention.norm_q, torch.nn.Identity)
    clips = batch_for(plain).video
    shaky = build(dropout=0.5)
    assert torch.equal(plain.encoder(clips), plain.encoder(clips))
    assert not torch.equal(shaky.encoder(clips), shaky.encoder(clips))


def test_mask_for_keeps_a_tube_with_one_real_frame():
    task = build(temporal_patch=2)
    mask = torch.arange(5) < torch.tensor([1, 2, 3, 4, 5])[:, None]
    assert task.mask_for(mask).sum(1).tolist() == [1, 2, 2, 3, 3]
    assert task.mask_for(mask[:, :1]).tolist() == [[True]] * 5


# Training ----------------------------------------------------------------------------------------------------------


def moving_bar() -> Batch:
    """A bright bar that walks to the right over a slope."""
    frames = torch.zeros(5, 3, 16, 16)
    frames += torch.linspace(0.1, 0.5, 16)[:, None] * torch.tensor([0.5, 1.0, 0.8])[:, None, None]
    for time in range(5):
        frames[time, :, :, 2 + 2 * time : 4 + 2 * time] = 0.95
    return Batch.collate([Sample(pixels=(frames * 255).to(torch.uint8))], [0])


@each_quantizer
def test_overfits_one_clip(quantizer):
    task = build(width=32, quantizer=quantizer)
    batch = moving_bar()
    before = task.eval().validate(batch, noise_for(batch))["psnr"].value()
    train(task.train(), batch, 80)
    found = task.eval().validate(batch, noise_for(batch))
    assert found["psnr"].value() > 26 > before + 10
    assert found["codes/perplexity"].value() > 4


def test_both_players_move_and_the_game_does_not_break_the_clip():
    task = build(width=32, adversarial={"width": 8, "levels": 2, "start": 10, "penalty_every": 4})
    batch = moving_bar()
    before = {player: [p.clone() for p in parameters_of_all(task, player)] for player in task.players}
    train(task, batch, 10)
    assert all(torch.equal(a, b) for a, b in zip(before["discriminator"], parameters_of_all(task, "discriminator")))
    train(task, batch, 50)
    for player in task.players:
        moved = [not torch.equal(a, b) for a, b in zip(before[player], parameters_of_all(task, player))]
        assert all(moved), player
    assert task.eval().validate(batch, noise_for(batch))["psnr"].value() > 15


def test_images_alone_train_and_their_weights_go_on_with_clips():
    """Image pre-training: the same names and shapes, whatever the number of frames."""
    images = build(frames=1, **GAME)
    batch = batch_for(images)
    train(images, batch, 2)
    task = build(frames=5, **GAME)
    load_weights(task, task_state_dict(images))
    assert torch.equal(task.eval().encode(batch.video), images.eval().encode(batch.video))


def test_validation_is_deterministic_and_says_how_good(vgg):
    task = build(perceptual={"weight": 0.5, "weights": str(vgg), "frames": 1}, **GAME).eval()
    batch = batch_for(task)
    with torch.no_grad():
        first, second = (task.validate(batch, noise_for(batch, step)) for step in (0, 1000))
    assert {"loss", "psnr", "lpips", "codes/use", "codes/perplexity"} <= first.keys() == second.keys()
    assert all(torch.equal(first[name].value(), second[name].value()) for name in first)
    expected = first["reconstruction"].value() + 0.5 * first["lpips"].value()
    assert torch.allclose(first["loss"].value(), expected)
    error = (task.reconstruct(batch) - batch.video).square().mean((2, 3, 4))
    assert torch.allclose(first["psnr"].value(), (-10 * error.log10()).mean(), rtol=1e-4)


def test_bf16_autocast_trains(vgg):
    task = build(quantizer={"kind": "lfq", "codes": 256}, perceptual={"weights": str(vgg)}, **GAME)
    batch = batch_for(task, (5, 3))
    with torch.autocast("cpu", torch.bfloat16):
        shared = task(batch, noise_for(batch))
        losses = [task.loss(player, shared) for player in task.players]
    for loss in reversed(losses):
        assert loss.total.sum.dtype == torch.float32
        loss.total.sum.backward()
    assert all(torch.isfinite(p.grad).all() for p in task.parameters() if p.requires_grad)


def test_compiled_parts_cover_the_networks(vgg):
    task = build(perceptual={"weights": str(vgg)}, **GAME)
    assert task.compile_targets() == [task.encoder, task.decoder, task.discriminator, task.perceptual]
    assert build().compile_targets()[2:] == []


def test_paper_sized_codec_builds_on_the_meta_device():
    """As large as the public implementation at width 512: 51.35 M parameters against a discriminator of 20.68 M."""
    with torch.device("meta"):
        task = build(
            (128, 128), frames=17, width=512, heads=8, spatial_depth=4, temporal_depth=4, patch=8,
            quantizer={"kind": "lfq", "codes": 8192}, adversarial={"width": 96, "levels": 5},
        )  # fmt: skip
    generator, discriminator = (sum(p.numel() for p in parameters_of_all(task, player)) for player in task.players)
    assert task.shape_for(17, 128, 128) == (9, 16, 16)
    assert generator == pytest.approx(51.35e6, rel=0.05)
    assert discriminator == pytest.approx(20.68e6, rel=0.05)
