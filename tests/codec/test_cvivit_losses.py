"""C-ViViT's losses: two players, padding, images beside clips, the perceptual net."""

from __future__ import annotations

import pytest
import torch

from kineograph.core.task import player_parameters, task_state_dict
from tests.codec.playing import gradients, noise_for, run_player
from tests.codec.small_cvivit import GAME, QUANTIZERS, batch_for, build, cut, each_quantizer, repainted


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
        terms = loss.terms["reconstruction"].value() + loss.terms["quantizer"].value()
        assert torch.allclose(loss.total.value(), terms)
        if quantizer["kind"] != "fsq":
            assert loss.terms["quantizer"].value() != 0
            first = task.encoder.first.weight
            (through,) = torch.autograd.grad(shared.quantized.loss, first, retain_graph=True)
            assert through.abs().sum() > 0
        assert all(p.grad is not None for p in player_parameters(task, "generator").values())


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
    names = [set(player_parameters(task, player)) for player in task.players]
    assert not names[0] & names[1]
    frozen = {name for name, _ in task.named_parameters() if name.startswith("perceptual")}
    assert names[0] | names[1] | frozen == {name for name, _ in task.named_parameters()}
    assert not frozen & task_state_dict(task).keys()


def test_generator_gradient_is_that_of_the_plain_sum_of_terms(vgg):
    task = build(perceptual={"weight": 0.7, "weights": str(vgg)}, **GAME)
    batch = batch_for(task, (5, 3))
    shared = task(batch, noise_for(batch))
    loss = run_player(task, "generator", shared)
    found = {name: p.grad.clone() for name, p in player_parameters(task, "generator").items()}
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
    for name, p in player_parameters(task, "generator").items():
        assert torch.allclose(found[name], p.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("perceptual", [True, False])
def test_adaptive_weight_is_the_ratio_of_gradients_at_the_layers_that_paint(vgg, perceptual, frames):
    """For images too: there only the first frame's layer paints, and the weight must not be that of nothing."""
    keys = {"perceptual": {"weight": 1, "weights": str(vgg)}} if perceptual else {}
    task = build(frames=frames, adversarial={"width": 8, "levels": 2, "weight": 0.5}, **keys)
    batch = batch_for(task)
    shared = task(batch, noise_for(batch))
    layers = [task.to_pixels.first.weight] + ([task.to_pixels.tubes.weight] if frames > 1 else [])
    judged = (shared.fake - shared.real).abs().mean((1, 2, 3))
    if perceptual:
        judged = judged + task.perceptual(shared.fake, shared.real)

    def length(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, layers, retain_graph=True)]).norm()

    wanted, push = length(judged.mean()), length(-task.discriminator(shared.fake, frames).mean())
    found = run_player(task, "generator", shared).terms["adversarial_weight"].value()
    assert found > 0
    assert torch.allclose(found, 0.5 * wanted / push, rtol=1e-3)


@pytest.mark.usefixtures("trusted")
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
    assert [task.is_active("discriminator", step) for step in (0, 2, 3)] == [False, False, True]
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
    # Two frames of three clips: fake, real; then real, fake and two perturbed ones.
    assert seen == [(6, 2), (6, 2), (24, 2)]


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
