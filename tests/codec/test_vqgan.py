from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kineograph.codec.vqgan import TASK, VQGAN, VQGANConfig
from kineograph.core.batch import Batch, Sample, Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, load_weights, player_parameters, task_state_dict
from kineograph.nn.quantizers import LFQ
from tests.codec.playing import gradients, noise_for, parameters_of_all, run_player, train, validate_in_shares

SMALL = {"width": 8, "multipliers": [1, 2], "perceptual": {"weight": 0}}
GAME = {"adversarial": {"width": 8, "levels": 2}}
QUANTIZERS = (
    {"kind": "vq", "codes": 32, "dim": 4},
    {"kind": "lfq", "codes": 256},
    {"kind": "fsq", "levels": [5, 5, 4]},
)
each_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q["kind"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(size=(16, 16), channels: int = 3, frames: int = 1, notes: list | None = None, **keys) -> VQGAN:
    config = parse(VQGANConfig, {**SMALL, **keys})
    shape = Shape(frames, *size, channels, 8.0)
    return VQGAN.build(config, BuildContext(shape, note=(notes if notes is not None else []).append))


def batch_for(task: VQGAN, clips: int = 2, frames: int | None = None) -> Batch:
    shape = task.shape
    size = (frames or shape.frames, shape.channels, shape.height, shape.width)
    samples = [Sample(pixels=torch.randint(0, 256, size, dtype=torch.uint8)) for _ in range(clips)]
    return Batch.collate(samples, range(clips))


# Codec -------------------------------------------------------------------------------------------------------------


def test_it_is_found_by_name():
    assert find_task("vqgan") is TASK is VQGAN


@each_quantizer
@pytest.mark.parametrize(("channels", "frames", "height", "width"), [(1, 1, 16, 16), (3, 3, 16, 24), (4, 1, 8, 32)])
def test_tokens_decode_to_what_forward_reconstructs(quantizer, channels, frames, height, width):
    task = build((height, width), channels, frames, quantizer=quantizer)
    batch = batch_for(task)
    task(batch, noise_for(batch))  # a codebook that has moved
    task.eval()
    tokens = task.encode(batch.video, batch.frame_mask)
    assert tokens.shape == (2, *task.shape_for(frames, height, width)) == (2, frames, height // 4, width // 4)
    assert tokens.max() < task.vocabulary == task.quantizer.codes
    pixels = task.decode(tokens)
    assert pixels.shape == batch.pixels.shape
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    fake = task(batch, noise_for(batch)).fake.view(pixels.shape)
    assert torch.allclose(pixels, ((fake + 1) / 2).clamp(0, 1), atol=1e-6)
    assert torch.equal(task.reconstruct(batch), pixels)


def test_encoding_computes_no_entropy(monkeypatch):
    task = build(quantizer={"kind": "lfq", "codes": 256}).eval()
    batch = batch_for(task)
    wanted = task(batch, noise_for(batch)).quantized.ids
    monkeypatch.setattr(LFQ, "entropies", lambda *_: pytest.fail("nobody reads it"))
    assert torch.equal(task.encode(batch.video).flatten(0, 1), wanted)


def test_frames_are_tokenized_one_by_one():
    task = build(frames=3).eval()
    clips = batch_for(task).video
    tokens = task.encode(clips)
    for t in range(3):
        assert torch.equal(task.encode(clips[:, t : t + 1]), tokens[:, t : t + 1])
    changed = clips.clone()
    changed[:, 2] = 1 - changed[:, 2]
    assert torch.equal(task.encode(changed)[:, :2], tokens[:, :2])


@pytest.mark.parametrize(("patch", "multipliers", "factor"), [(1, [1, 2, 2], 4), (2, [1, 1, 2], 8), (4, [1, 1, 1], 16)])
def test_factor_is_patch_times_halvings(patch, multipliers, factor):
    task = build((32, 64), patch=patch, multipliers=multipliers)
    assert task.encode(torch.rand(1, 1, 3, 32, 64)).shape == (1, 1, 32 // factor, 64 // factor)


def test_sizes_that_do_not_fit_are_named_with_their_neighbours():
    with pytest.raises(ConfigError, match=r"data.size=\[30, 32\].*height must be a multiple of 4 \(28 or 32\)"):
        build((30, 32))
    with pytest.raises(ConfigError, match=r"width must be a multiple of 4 \(4\)"):
        build((32, 3))
    with pytest.raises(ConfigError, match="18"):
        build().encode(torch.rand(1, 1, 3, 16, 18))


def test_blocks_and_attention_are_built_as_asked():
    def count(**keys) -> tuple[int, int]:
        task = build(**keys)
        return sum(p.numel() for p in task.encoder.parameters()), sum(p.numel() for p in task.decoder.parameters())

    plain = count(blocks=1)
    assert count(blocks=[1, 1]) == plain
    assert count(blocks=2) > plain
    more = count(blocks=1, decoder_blocks=[1, 2])
    assert more[0] == plain[0]
    assert more[1] > plain[1]
    attentive = count(blocks=1, attention=True)
    assert attentive[0] > plain[0]
    assert attentive[1] > plain[1]
    assert len(build(blocks=[1, 2]).blocks()) == 6
    with pytest.raises(ConfigError, match="3 numbers for 2 levels"):
        build(blocks=[1, 2, 3])


# Losses ------------------------------------------------------------------------------------------------------------


@each_quantizer
def test_without_a_game_there_is_one_player_and_the_quantizer_still_learns(quantizer):
    for off in (None, {"weight": 0}):
        task = build(quantizer=quantizer, adversarial=off)
        assert task.players == ("generator",)
        assert task.discriminator is None
        assert not task.is_active("discriminator", 10**6)
        batch = batch_for(task)
        shared = task(batch, noise_for(batch))
        loss = run_player(task, "generator", shared)
        assert torch.allclose(
            loss.total.value(), loss.terms["reconstruction"].value() + loss.terms["quantizer"].value()
        )
        if quantizer["kind"] != "fsq":
            assert loss.terms["quantizer"].value() != 0
            (through,) = torch.autograd.grad(shared.quantized.loss, task.encoder.layers[0].weight, retain_graph=True)
            assert through.abs().sum() > 0
        assert gradients(task, "generator") > 0


@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_reconstruction_loss_by_hand(kind):
    task = build(loss=kind)
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    apart = shared.fake - (batch.video.flatten(0, 1) * 2 - 1)
    expected = apart.abs().mean() if kind == "l1" else apart.square().mean()
    assert torch.allclose(task.loss("generator", shared).terms["reconstruction"].value(), expected)


def test_players_do_not_touch_each_other():
    task = build(**GAME)
    assert task.players == ("generator", "discriminator")
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    run_player(task, "discriminator", shared)
    assert gradients(task, "discriminator") > 0
    assert gradients(task, "generator") == 0
    task.zero_grad()
    run_player(task, "generator", shared)
    assert gradients(task, "generator") > 0
    assert gradients(task, "discriminator") == 0
    names = [set(player_parameters(task, player)) for player in task.players]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {name for name, _ in task.named_parameters()}


def test_generator_gradient_is_that_of_the_plain_sum_of_terms(vgg):
    """The judges' gradients are taken at the pictures and carried on; the parameters must not notice."""
    task = build(perceptual={"weight": 0.7, "weights": str(vgg)}, **GAME)
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    loss = run_player(task, "generator", shared)
    found = {name: p.grad.clone() for name, p in player_parameters(task, "generator").items()}
    task.zero_grad()
    strength = loss.terms["adversarial_weight"].value()
    plain = (
        (shared.fake - shared.real).abs().mean((1, 2, 3)).sum()
        + shared.quantized.loss * 2
        + 0.7 * task.perceptual(shared.fake, shared.real).sum()
        - strength * task.discriminator(shared.fake).mean((1, 2)).sum()
    )
    plain.backward()
    assert torch.allclose(loss.total.sum, plain, rtol=1e-5)
    for name, p in player_parameters(task, "generator").items():
        assert torch.allclose(found[name], p.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("perceptual", [True, False])
def test_adaptive_weight_is_the_ratio_of_gradients_at_the_last_layer(vgg, perceptual):
    """As in the VQGAN paper, where the reconstruction loss includes the perceptual one."""
    keys = {"perceptual": {"weight": 3, "weights": str(vgg)}} if perceptual else {}
    task = build(adversarial={"width": 8, "levels": 2, "weight": 0.5}, **keys)
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    last = task.to_pixels.conv.weight
    judged = (shared.fake - shared.real).abs().mean((1, 2, 3))
    if perceptual:
        judged = judged + 3 * task.perceptual(shared.fake, shared.real)
    (wanted,) = torch.autograd.grad(judged.mean(), last, retain_graph=True)
    (push,) = torch.autograd.grad(-task.discriminator(shared.fake).mean(), last, retain_graph=True)
    found = task.loss("generator", shared).terms["adversarial_weight"].value()
    assert torch.allclose(found, 0.5 * wanted.norm() / push.norm(), rtol=1e-3)


@pytest.mark.usefixtures("trusted")
def test_fp16_trains_with_the_adaptive_weight_and_gradients_of_fp32(vgg):
    """As the trainer runs it: autocast, and a loss that is scaled before its backward pass."""
    task = build(adversarial={"width": 8, "levels": 2}, perceptual={"weight": 1, "weights": str(vgg)})
    batch = batch_for(task)
    weights, gradient = {}, {}
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, 2.0**14)):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            shared = task(batch, noise_for(batch))
            loss = task.loss("generator", shared)
        weights[dtype] = loss.terms["adversarial_weight"].value()
        (found,) = torch.autograd.grad(loss.total.value() * scale, task.to_pixels.conv.weight)
        gradient[dtype] = found / scale
    assert torch.allclose(weights[torch.float16], weights[torch.float32], rtol=0.03)
    apart = (gradient[torch.float16] - gradient[torch.float32]).norm() / gradient[torch.float32].norm()
    assert apart < 0.05


@pytest.mark.usefixtures("trusted")
def test_adaptive_weight_can_be_fixed_and_is_capped():
    fixed = build(adversarial={"width": 8, "levels": 2, "weight": 0.25, "adaptive": False})
    batch = batch_for(fixed)
    assert fixed.loss("generator", fixed(batch, noise_for(batch))).terms["adversarial_weight"].value() == 0.25
    capped = build(adversarial={"width": 8, "levels": 2, "weight": 0.5, "adaptive_max": 1e-3})
    found = capped.loss("generator", capped(batch, noise_for(batch))).terms["adversarial_weight"].value()
    assert found == pytest.approx(0.5e-3)


def test_the_game_starts_late():
    task = build(adversarial={"width": 8, "levels": 2, "start": 5})
    batch = batch_for(task)
    assert [task.is_active("discriminator", step) for step in (0, 4, 5)] == [False, False, True]
    assert task.is_active("generator", 0)
    before = task.loss("generator", task(batch, noise_for(batch, 4)))
    assert "adversarial" not in before.terms
    assert "adversarial" in task.loss("generator", task(batch, noise_for(batch, 5))).terms


def test_a_discriminator_that_knows_nothing_does_not_move_the_generator(monkeypatch):
    """The adaptive weight alone scales its arbitrary gradient to the size of the reconstruction's."""
    task = build(adversarial={"width": 8, "levels": 2})
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))

    def shares() -> tuple[float, float]:
        """The weight as it is, and without measure_separation."""
        weight = task.loss("generator", shared).terms["adversarial_weight"].value().item()
        with monkeypatch.context() as patch:
            patch.setattr("kineograph.codec.codec_loss.measure_separation", lambda real, fake, keep: torch.ones(()))
            return weight, task.loss("generator", shared).terms["adversarial_weight"].value().item()

    with torch.no_grad():
        for p in task.discriminator.layers[-1].parameters():
            p.mul_(1e-3)
    weight, scaled = shares()
    assert weight < 0.01 * scaled
    optimizer = torch.optim.Adam(task.discriminator.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        task.loss("discriminator", shared).total.value().backward(inputs=list(task.discriminator.parameters()))
        optimizer.step()
    weight, scaled = shares()
    assert weight == pytest.approx(scaled)


def test_the_generator_follows_the_discriminator_slowly_at_first():
    task = build(adversarial={"width": 8, "levels": 2, "start": 5, "warmup": 4, "adaptive": False, "weight": 0.5})
    batch = batch_for(task)
    weights = [
        task.loss("generator", task(batch, noise_for(batch, step))).terms["adversarial_weight"].value().item()
        for step in (5, 7, 9, 20)
    ]
    assert weights == pytest.approx([0.1, 0.3, 0.5, 0.5])
    assert task.is_active("discriminator", 5)


def test_bce_trains_both_players():
    task = build(adversarial={"width": 8, "levels": 2, "loss": "bce", "adaptive": False, "weight": 0.5})
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    fake = task.discriminator(shared.fake)
    loss = task.loss("discriminator", shared)
    expected = (F.softplus(-task.discriminator(shared.real)) + F.softplus(fake)).mean() / 2
    assert torch.allclose(loss.terms["bce"].value(), expected)
    assert torch.allclose(task.loss("generator", shared).terms["adversarial"].value(), F.softplus(-fake).mean())


def test_penalty_cadence_and_scale():
    task = build(adversarial={"width": 8, "levels": 2, "penalty": 3.0, "penalty_every": 4})
    batch = batch_for(task)
    for step in range(9):
        loss = task.loss("discriminator", task(batch, noise_for(batch, step)))
        expected = loss.terms["hinge"].value()
        assert ("penalty" in loss.terms) == (step % 4 == 0)
        if "penalty" in loss.terms:
            assert loss.terms["penalty"].value() > 0
            expected = expected + 3.0 / 2 * 4 * loss.terms["penalty"].value()
        assert torch.allclose(loss.total.value(), expected)
    off = build(adversarial={"width": 8, "levels": 2, "penalty": 0})
    assert "penalty" not in off.loss("discriminator", off(batch, noise_for(batch, 0))).terms


def test_the_reconstruction_is_computed_once():
    task = build(**GAME)
    calls = []
    task.encoder.register_forward_hook(lambda *_: calls.append("encoder"))
    task.decoder.register_forward_hook(lambda *_: calls.append("decoder"))
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    for player in task.players:
        run_player(task, player, shared)
    assert calls == ["encoder", "decoder"]


def test_padded_frames_count_for_nothing():
    task = build(frames=3, **GAME).eval()
    batch = batch_for(task, clips=2)
    batch.frame_mask = torch.tensor([[True, True, False], [True, False, False]])
    other = Batch(**{**batch.__dict__, "pixels": batch.pixels.clone()})
    other.pixels[~other.frame_mask] = 77
    for player in task.players:
        a, b = (task.loss(player, task(x, noise_for(x))) for x in (batch, other))
        assert a.total.count == 3
        assert torch.allclose(a.total.sum, b.total.sum, rtol=1e-4)
    assert torch.allclose(
        task.validate(batch, noise_for(batch))["psnr"].sum, task.validate(other, noise_for(other))["psnr"].sum
    )


def test_sums_and_counts_of_halves_add_up_to_the_whole():
    task = build(quantizer={"kind": "fsq"}).eval()
    batch = batch_for(task, clips=4)
    halves = [Batch(slots=batch.slots[i : i + 2], pixels=batch.pixels[i : i + 2]) for i in (0, 2)]
    whole = task.loss("generator", task(batch, noise_for(batch))).total
    parts = [task.loss("generator", task(half, noise_for(half))).total for half in halves]
    assert torch.allclose(whole.sum, parts[0].sum + parts[1].sum, rtol=1e-5)
    assert whole.count == parts[0].count + parts[1].count == 4


# Perceptual net ----------------------------------------------------------------------------------------------------


def test_perceptual_is_off_with_a_line_or_an_error():
    notes: list[str] = []
    assert build(notes=notes, perceptual={}).perceptual is None
    assert len(notes) == 1
    assert "perceptual loss is off" in notes[0]
    assert "perceptual.weights" in notes[0]
    build(notes=notes, perceptual={"weight": 0})
    assert len(notes) == 1
    with pytest.raises(ConfigError, match="does not exist"):
        build(perceptual={"weights": "/nowhere/vgg.safetensors"})


def test_perceptual_is_frozen_and_neither_trained_nor_saved(vgg):
    task = build(perceptual={"weights": str(vgg)}, **GAME).train()
    assert not any(part.training for part in task.perceptual.modules())
    assert not any(p.requires_grad for p in task.perceptual.parameters())
    for player in task.players:
        assert not any(name.startswith("perceptual") for name in player_parameters(task, player))
    assert not any(name.startswith("perceptual") for name in task_state_dict(task))
    batch = batch_for(task)
    before = [p.clone() for p in task.perceptual.parameters()]
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], 0.1, weight_decay=0.5)
    run_player(task, "generator", task(batch, noise_for(batch)))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, task.perceptual.parameters()))
    with pytest.raises(ConfigError, match="too small"):
        build((8, 8), perceptual={"weights": str(vgg)})


# Training ----------------------------------------------------------------------------------------------------------


def smooth_picture() -> Batch:
    y, x = torch.linspace(0, 3, 16)[:, None], torch.linspace(0, 3, 16)[None]
    waves = torch.stack([torch.sin(2 * x + y), torch.cos(x * y), torch.sin(y * 2 + 0 * x)]) * 0.4 + 0.5
    return Batch.collate([Sample(pixels=(waves * 255).to(torch.uint8)[None])], [0])


@each_quantizer
def test_overfits_one_picture(quantizer):
    task = build(width=16, quantizer=quantizer)
    batch = smooth_picture()
    before = task.eval().validate(batch, noise_for(batch))["psnr"].value()
    train(task.train(), batch, 150)
    found = task.eval().validate(batch, noise_for(batch))
    assert found["psnr"].value() > 26 > before + 8
    assert found["codes/perplexity"].value() > 4


def test_both_players_move_and_the_game_does_not_break_the_picture():
    task = build(width=16, adversarial={"width": 8, "levels": 2, "start": 10, "penalty_every": 4})
    batch = smooth_picture()
    before = {player: [p.clone() for p in parameters_of_all(task, player)] for player in task.players}
    train(task, batch, 10)
    assert all(torch.equal(a, b) for a, b in zip(before["discriminator"], parameters_of_all(task, "discriminator")))
    train(task, batch, 60)
    for player in task.players:
        moved = [not torch.equal(a, b) for a, b in zip(before[player], parameters_of_all(task, player))]
        assert all(moved), player
    assert task.eval().validate(batch, noise_for(batch))["psnr"].value() > 15


def test_weights_load_into_a_new_task(vgg):
    task = build(**GAME, perceptual={"weights": str(vgg)})
    batch = batch_for(task)
    train(task, batch, 2)
    torch.manual_seed(99)
    other = build(**GAME)  # without the perceptual net: it is no part of the weights
    load_weights(other, task_state_dict(task))
    assert torch.equal(task.eval().encode(batch.video), other.eval().encode(batch.video))


def test_validation_is_deterministic_and_says_how_good(vgg):
    task = build(perceptual={"weight": 0.5, "weights": str(vgg)}, **GAME).eval()
    batch = batch_for(task)
    with torch.no_grad():
        first, second = (task.validate(batch, noise_for(batch, step)) for step in (0, 1000))
    assert first.keys() == second.keys()
    assert {"loss", "psnr", "lpips", "codes/use", "codes/perplexity"} <= first.keys()
    assert all(torch.equal(first[name].value(), second[name].value()) for name in first)
    expected = first["reconstruction"].value() + 0.5 * first["lpips"].value()
    assert torch.allclose(first["loss"].value(), expected)
    error = (task.reconstruct(batch) - batch.video).square().mean((1, 2, 3, 4))
    assert torch.allclose(first["psnr"].value(), (-10 * error.log10()).mean(), rtol=1e-4)


def test_validation_does_not_depend_on_the_number_of_processes(monkeypatch):
    task = build(quantizer={"kind": "fsq", "levels": [5, 5, 4]}).eval()
    whole = batch_for(task, clips=4)
    shares = [whole.rows([0]), whole.rows([1, 2, 3]), replace(whole.rows([0]), spare=True)]
    expected = validate_in_shares(task, [whole], monkeypatch)
    assert validate_in_shares(task, shares, monkeypatch) == pytest.approx(expected, rel=1e-4)


def test_bf16_autocast_trains(vgg):
    task = build(quantizer={"kind": "lfq", "codes": 256}, perceptual={"weights": str(vgg)}, **GAME)
    batch = batch_for(task)
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
    with torch.device("meta"):
        task = build(
            (256, 256), width=128, multipliers=[1, 2, 4, 8], blocks=[0, 0, 0, 1], decoder_blocks=[0, 0, 0, 2],
            quantizer={"kind": "lfq"}, adversarial={"width": 128, "levels": 4},
        )  # fmt: skip
    generator = sum(p.numel() for p in parameters_of_all(task, "generator"))
    assert task.shape_for(1, 256, 256) == (1, 16, 16)
    assert generator == pytest.approx(81.3e6, rel=0.05)
