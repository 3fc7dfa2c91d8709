from __future__ import annotations

import pytest
import torch

from kineograph.codec.cvivit import TASK, CViViT, CViViTConfig
from kineograph.core.batch import Batch, Sample, Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.core.lookup import find_task
from kineograph.core.task import BuildContext, load_weights, parameters_of, weights_of
from tests.codec.playing import gradients, noise_for, parameters_of_all, run_player, train

SMALL = {
    "width": 16, "heads": 2, "spatial_depth": 1, "temporal_depth": 1, "patch": 4, "perceptual": {"weight": 0},
    "quantizer": {"kind": "fsq", "levels": [8, 8, 8]},
}  # fmt: skip
GAME = {"adversarial": {"width": 8, "levels": 2}}
QUANTIZERS = (
    {"kind": "vq", "codes": 32, "dim": 4},
    {"kind": "lfq", "codes": 256},
    {"kind": "fsq", "levels": [5, 5, 4]},
)
each_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q["kind"])
sizes = pytest.mark.parametrize(
    ("channels", "frames", "height", "width"), [(1, 1, 16, 16), (3, 5, 8, 24), (4, 3, 16, 8), (2, 7, 8, 8)]
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(size=(16, 16), channels: int = 3, frames: int = 5, notes: list | None = None, **keys) -> CViViT:
    config = parse(CViViTConfig, {**SMALL, **keys})
    shape = Shape(frames, *size, channels, 8.0)
    return CViViT.build(config, BuildContext(shape, note=(notes if notes is not None else []).append))


def batch_for(task: CViViT, lengths: tuple[int, ...] | None = None) -> Batch:
    shape = task.shape
    samples = [
        Sample(pixels=torch.randint(0, 256, (length, shape.channels, shape.height, shape.width), dtype=torch.uint8))
        for length in lengths or (shape.frames, shape.frames)
    ]
    return Batch.collate(samples, range(len(samples)))


def repainted(batch: Batch) -> Batch:
    """The same clips with noise where the padding is."""
    pixels = torch.where(
        batch.frame_mask[:, :, None, None, None], batch.pixels, torch.randint_like(batch.pixels, 0, 256)
    )
    assert not torch.equal(pixels, batch.pixels)
    return Batch(slots=batch.slots, pixels=pixels, frame_mask=batch.frame_mask)


def cut(batch: Batch, row: int, frames: int) -> Batch:
    """One clip of a batch, alone."""
    return Batch(slots=batch.slots[row : row + 1], pixels=batch.pixels[row : row + 1, :frames])


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


# Losses ------------------------------------------------------------------------------------------------------------


@each_quantizer
def test_without_a_game_there_is_one_player_and_the_quantizer_still_learns(quantizer):
    for off in (None, {"weight": 0}):
        task = build(quantizer=quantizer, adversarial=off)
        assert task.players == ("generator",)
        assert task.discriminator is None
        assert not task.plays("discriminator", 10**6)
        batch = batch_for(task)
        shared = task(batch, noise_for(batch))
        loss = run_player(task, "generator", shared)
        terms = loss.terms["reconstruction"].value() + loss.terms["quantizer"].value()
        assert torch.allclose(loss.total.value(), terms)
        if quantizer["kind"] != "fsq":
            assert loss.terms["quantizer"].value() != 0
            first = task.encoder.first.weight
            (through,) = torch.autograd.grad(shared.quantized.loss, first, retain_graph=True)
            assert through.abs().sum() > 0
        assert all(p.grad is not None for p in parameters_of(task, "generator").values())


@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_reconstruction_loss_counts_real_frames_only(kind):
    task = build(loss=kind)
    batch = batch_for(task, (5, 2, 1))
    shared = task(batch, noise_for(batch))
    apart = (shared.fake - (batch.video.flatten(0, 1) * 2 - 1))[batch.frame_mask.flatten()]
    assert apart.shape[0] == 8
    expected = apart.abs().mean() if kind == "l1" else apart.square().mean()
    found = task.loss("generator", shared)
    assert found.total.count == 8
    assert torch.allclose(found.terms["reconstruction"].value(), expected)


def test_players_do_not_touch_each_other(vgg):
    task = build(**GAME, perceptual={"weights": str(vgg)})
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
    names = [set(parameters_of(task, player)) for player in task.players]
    assert not names[0] & names[1]
    frozen = {name for name, _ in task.named_parameters() if name.startswith("perceptual")}
    assert names[0] | names[1] | frozen == {name for name, _ in task.named_parameters()}
    assert not frozen & weights_of(task).keys()


def test_generator_gradient_is_that_of_the_plain_sum_of_terms(vgg):
    task = build(perceptual={"weight": 0.7, "weights": str(vgg)}, **GAME)
    batch = batch_for(task, (5, 3))
    shared = task(batch, noise_for(batch))
    loss = run_player(task, "generator", shared)
    found = {name: p.grad.clone() for name, p in parameters_of(task, "generator").items()}
    task.zero_grad()
    keep = batch.frame_mask.flatten().float()
    each = (
        (shared.fake - shared.real).abs().mean((1, 2, 3))
        + 0.7 * task.perceptual(shared.fake, shared.real)
        - loss.terms["adversarial_weight"].value() * task.discriminator(shared.fake, 5, keep).mean((1, 2))
    )
    plain = (each * keep).sum() + shared.quantized.loss * 8
    plain.backward()
    assert torch.allclose(loss.total.sum, plain, rtol=1e-5)
    for name, p in parameters_of(task, "generator").items():
        assert torch.allclose(found[name], p.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("perceptual", [True, False])
def test_adaptive_weight_is_the_ratio_of_gradients_at_the_layers_that_paint(vgg, perceptual, frames):
    """For images too: there only the first frame's layer paints, and the weight must not be that of nothing."""
    keys = {"perceptual": {"weight": 1, "weights": str(vgg)}} if perceptual else {}
    task = build(frames=frames, adversarial={"width": 8, "levels": 2, "weight": 0.5}, **keys)
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    layers = [task.to_pixels.first.weight] + ([task.to_pixels.tubes.weight] if frames > 1 else [])
    judged = (
        task.perceptual(shared.fake, shared.real) if perceptual else (shared.fake - shared.real).abs().mean((1, 2, 3))
    )

    def length(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, layers, retain_graph=True)]).norm()

    wanted, push = length(judged.mean()), length(-task.discriminator(shared.fake, frames).mean())
    found = run_player(task, "generator", shared).terms["adversarial_weight"].value()
    assert found > 0
    assert torch.allclose(found, 0.5 * wanted / push, rtol=1e-3)


def test_adaptive_weight_can_be_fixed_and_is_capped():
    fixed = build(adversarial={"width": 8, "levels": 2, "weight": 0.25, "adaptive": False})
    batch = batch_for(fixed)
    assert fixed.loss("generator", fixed(batch, noise_for(batch))).terms["adversarial_weight"].value() == 0.25
    capped = build(adversarial={"width": 8, "levels": 2, "weight": 0.5, "adaptive_max": 1e-3})
    found = capped.loss("generator", capped(batch, noise_for(batch))).terms["adversarial_weight"].value()
    assert found == pytest.approx(0.5e-3)


def test_the_game_starts_late_and_the_penalty_is_lazy():
    task = build(adversarial={"width": 8, "levels": 2, "start": 3, "penalty": 3.0, "penalty_every": 4})
    batch = batch_for(task)
    assert [task.plays("discriminator", step) for step in (0, 2, 3)] == [False, False, True]
    assert "adversarial" not in task.loss("generator", task(batch, noise_for(batch, 2))).terms
    for step in (3, 4, 5, 8):
        shared = task(batch, noise_for(batch, step))
        assert "adversarial" in task.loss("generator", shared).terms
        loss = task.loss("discriminator", shared)
        expected = loss.terms["hinge"].value()
        assert ("penalty" in loss.terms) == (step % 4 == 0)
        if "penalty" in loss.terms:
            assert loss.terms["penalty"].value() > 0
            expected = expected + 3.0 / 2 * 4 * loss.terms["penalty"].value()
        assert torch.allclose(loss.total.value(), expected)


def test_the_discriminator_may_judge_a_few_frames():
    task = build(adversarial={"width": 8, "levels": 2, "frames": 2, "penalty_every": 1})
    seen = []
    task.discriminator.register_forward_hook(lambda _, inputs, __: seen.append((inputs[0].shape[0], inputs[1])))
    batch = batch_for(task, (5, 5, 3))
    for player in ("generator", "discriminator"):
        run_player(task, player, task(batch, noise_for(batch)))
        assert gradients(task, player) > 0
    assert seen == [(6, 2), (18, 2)]  # two frames of three clips; real, fake and nudged ones


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


# Padding, and images beside clips ----------------------------------------------------------------------------------


@each_quantizer
def test_padding_counts_for_nothing(quantizer, vgg):
    """Whatever it shows: in no token, loss, score, gradient or code."""
    torch.manual_seed(0)
    found = []
    for change in (False, True):
        torch.manual_seed(1)
        task = build(quantizer=quantizer, perceptual={"weights": str(vgg), "frames": 2}, **GAME)
        batch = batch_for(task, (5, 4, 2, 1))
        if change:
            batch = repainted(batch)
        torch.manual_seed(2)
        shared = task(batch, noise_for(batch))
        losses = {player: run_player(task, player, shared) for player in reversed(task.players)}
        steep = torch.cat([p.grad.flatten() for p in task.parameters() if p.grad is not None])
        with torch.no_grad():
            seen = task.eval().validate(batch, noise_for(batch))
        tokens = task.encode(batch.video, batch.frame_mask)[task.mask_for(batch.frame_mask)]
        codes = [value for name, value in task.quantizer.state_dict().items() if "project" not in name]
        found.append((losses, steep, seen, tokens, codes))
    (losses, steep, seen, tokens, codes), other = found
    for player, loss in losses.items():
        assert loss.total.count == 12
        for name, term in loss.terms.items():
            assert torch.allclose(term.sum, other[0][player].terms[name].sum, rtol=1e-5), name
        assert torch.allclose(loss.total.sum, other[0][player].total.sum, rtol=1e-5)
    assert torch.allclose(steep, other[1], rtol=1e-4, atol=1e-6)
    assert all(torch.allclose(seen[name].sum, other[2][name].sum, rtol=1e-5) for name in seen)
    assert torch.equal(tokens, other[3])
    assert all(torch.allclose(a, b) for a, b in zip(codes, other[4], strict=True))


@pytest.mark.parametrize("quantizer", QUANTIZERS[1:], ids=lambda q: q["kind"])
def test_a_batch_of_images_and_clips_is_the_sum_of_each_alone(quantizer, vgg):
    """Clips of three lengths and images in one batch: as if each had come by itself, for both players and the scores."""
    keys = {"entropy": 0} if quantizer["kind"] == "lfq" else {}  # the entropy is of the whole batch
    task = build(quantizer={**quantizer, **keys}, perceptual={"weights": str(vgg)}, **GAME).eval()
    fixed = {"adversarial": {**GAME["adversarial"], "adaptive": False}}
    task.config = task.config.model_copy(update={"adversarial": build(**fixed).config.adversarial})
    lengths = (5, 1, 3, 1)
    batch = batch_for(task, lengths)
    alone = [cut(batch, row, length) for row, length in enumerate(lengths)]
    step = 1  # no penalty: its nudges depend on the number of frames
    for player in task.players:
        whole = task.loss(player, task(batch, noise_for(batch, step)))
        parts = [task.loss(player, task(one, noise_for(one, step))) for one in alone]
        assert whole.total.count == sum(part.total.count for part in parts) == 10
        for name in ("hinge", "real") if player == "discriminator" else ("reconstruction", "perceptual", "adversarial"):
            assert torch.allclose(whole.terms[name].sum, sum(part.terms[name].sum for part in parts), rtol=1e-4), name
    scores = task.validate(batch, noise_for(batch))
    each = [task.validate(one, noise_for(one)) for one in alone]
    for name in ("loss", "psnr", "lpips"):
        assert torch.allclose(scores[name].sum, sum(one[name].sum for one in each), rtol=1e-4), name


@pytest.mark.parametrize("kmeans", [0, 1])
def test_codebook_follows_real_tokens_only(kmeans):
    """Codes start at tokens, move to tokens, and come back to life at tokens: none of them padding's."""
    vq = {"kind": "vq", "codes": 64, "dim": 4, "kmeans": kmeans, "decay": 0.0, "revive": 0.99}
    task = build(frames=9, quantizer=vq)
    outputs = []
    task.encoder.register_forward_hook(lambda *arguments: outputs.append(arguments[2]))
    batch = batch_for(task, (9, 1, 1))
    batch.frame_mask[0, 3:] = False
    task(batch, noise_for(batch))
    mask = task.mask_for(batch.frame_mask)
    assert mask.sum() == 4
    assert task.quantizer.mass.sum() >= 4 * 16  # every real token, and a fair share for codes that begin anew
    assert task.quantizer.mass.sum() < 15 * 16
    projected = task.quantizer.project_in(outputs[0].permute(0, 4, 1, 2, 3).flatten(2, 3)).unflatten(2, (5, 4))
    features = torch.nn.functional.normalize(projected, dim=1).permute(0, 2, 3, 4, 1)  # B t h w 4
    nearest = {
        real: (task.quantizer.codebook @ features[mask == real].flatten(0, 2).T).amax(1) for real in (True, False)
    }
    assert (nearest[True] > 1 - 1e-5).sum() > 16
    assert (nearest[False] > 1 - 1e-5).sum() == 0


def test_codes_of_padding_are_not_counted():
    task = build(frames=5)
    batch = batch_for(task, (5, 1, 1))
    terms = task.loss("generator", task(batch, noise_for(batch))).terms
    ids = task.encode(batch.video, batch.frame_mask)[task.mask_for(batch.frame_mask)]
    counts = ids.unique(return_counts=True)[1].double()
    share = counts / counts.sum()
    assert terms["codes/perplexity"].value() == pytest.approx((-(share * share.log()).sum()).exp().item())


# Perceptual net ----------------------------------------------------------------------------------------------------


def test_perceptual_is_off_with_a_line():
    notes: list[str] = []
    assert build(notes=notes, perceptual={}).perceptual is None
    assert len(notes) == 1
    assert "perceptual.weights" in notes[0]


def test_perceptual_may_look_at_a_few_frames(vgg):
    task = build(perceptual={"weights": str(vgg), "frames": 2})
    rows = []
    task.perceptual.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[0]))
    batch = batch_for(task, (5, 5, 3))
    loss = run_player(task, "generator", task(batch, noise_for(batch)))
    assert rows == [6]
    assert loss.terms["perceptual"].value() > 0
    assert gradients(task, "generator") > 0
    with torch.no_grad():
        task.eval().validate(batch, noise_for(batch))
    assert rows == [6, 15]  # scores are of all frames, always


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
    load_weights(task, weights_of(images))
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
    assert task.compiled() == [task.encoder, task.decoder, task.discriminator, task.perceptual]
    assert build().compiled()[2:] == []


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
