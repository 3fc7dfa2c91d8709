from __future__ import annotations

import pytest
import torch
from torch import nn

from kineograph.codec.adversarial import (
    FULL_SEPARATION,
    PENALTY_STEP,
    AdversarialConfig,
    Discriminator,
    VideoDiscriminator,
    adaptive_weight,
    check_size,
    discriminator_error,
    finite_difference_r1,
    generator_error,
    gradient_at,
    measure_separation,
    perturb,
    ramp_weight,
)
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(("channels", "height", "width", "levels"), [(1, 32, 48, 3), (4, 16, 8, 2), (3, 32, 32, 5)])
def test_one_logit_a_patch(channels, height, width, levels):
    judge = Discriminator(channels, AdversarialConfig(width=8, levels=levels))
    logits = judge(torch.randn(2, channels, height, width))
    assert logits.shape == (2, height // 2**levels, width // 2**levels)


def test_a_patch_is_judged_by_its_surroundings_and_no_batch_mate():
    judge = Discriminator(3, AdversarialConfig(width=8, levels=2))
    pictures = torch.randn(2, 3, 64, 64)
    changed = pictures.clone()
    changed[1] += 1.0
    changed[0, :, 60:, 60:] += 1.0
    apart = (judge(changed) - judge(pictures)).abs()
    assert apart[0, :8, :8].max() == 0
    assert apart[0, 15, 15] > 0
    assert apart[1].min() > 0


# Clips -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_one_logit_a_patch_of_each_frame(frames):
    judge = VideoDiscriminator(3, AdversarialConfig(width=8, levels=2))
    assert judge(torch.randn(2 * frames, 3, 16, 24), frames).shape == (2 * frames, 4, 6)


def test_a_frame_is_judged_by_its_neighbours_and_no_batch_mate():
    """Two levels look two frames far."""
    judge = VideoDiscriminator(3, AdversarialConfig(width=8, levels=2))
    clips = torch.randn(2, 9, 3, 8, 8)
    changed = clips.clone()
    changed[0, 4] += 1.0
    apart = (judge(changed.flatten(0, 1), 9) - judge(clips.flatten(0, 1), 9)).unflatten(0, (2, 9)).abs().amax((2, 3))
    assert (apart[0] > 0).tolist() == [False, False, True, True, True, True, True, False, False]
    assert apart[1].max() == 0


def test_padding_changes_no_other_frame():
    """A clip is judged as if it were alone, whatever stands behind its end."""
    judge = VideoDiscriminator(3, AdversarialConfig(width=8, levels=3))
    clip = torch.randn(3, 3, 16, 16)
    alone = judge(clip, 3)
    for tail in (torch.randn(2, 3, 16, 16), torch.zeros(2, 3, 16, 16)):
        padded = torch.cat([clip, tail])
        keep = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
        assert torch.allclose(judge(padded, 5, keep)[:3], alone, atol=1e-6)
        assert not torch.allclose(judge(padded, 5)[:3], alone, atol=1e-3)


def test_it_tells_motion_from_the_same_frames_in_another_order():
    """Real: a bar that walks. Fake: its frames, shuffled. A judge of single frames meets the same pictures on both sides, so
    that its hinge loss cannot fall below 1; this one's does."""
    bars = torch.full((8, 1, 8, 8), -1.0)
    for time in range(8):
        bars[time, :, :, time] = 1.0
    starts = [bars.roll(shift, dims=3) for shift in (0, 2, 4, 6)]
    real = torch.cat(starts)
    fake = torch.cat([clip[[0, 3, 6, 1, 4, 7, 2, 5]] for clip in starts])
    config = AdversarialConfig(width=8, levels=2)

    def learnt(judge: nn.Module, *frames: int) -> float:
        optimizer = torch.optim.Adam(judge.parameters(), 3e-3)
        for _ in range(40):
            optimizer.zero_grad()
            loss = discriminator_error("hinge", judge(real, *frames), judge(fake, *frames)).mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    assert learnt(Discriminator(1, config)) > 0.99
    assert learnt(VideoDiscriminator(1, config), 8) < 0.3


def test_too_many_levels_are_refused():
    check_size(AdversarialConfig(levels=3), 8, 8)
    with pytest.raises(ConfigError, match=r"adversarial.levels=5 .* use 3 or fewer"):
        check_size(AdversarialConfig(levels=5), 8, 64)


def test_hinge_and_fooling_by_hand():
    real, fake = torch.tensor([[[2.0, 0.5]]]), torch.tensor([[[-3.0, 0.25]]])
    assert discriminator_error("hinge", real, fake) == pytest.approx(((0 + 0.5) / 2 + (0 + 1.25) / 2) / 2)
    assert generator_error("hinge", fake) == pytest.approx(2.75 / 2)


def test_bce_is_cross_entropy_of_real_and_fake_and_does_not_saturate():
    real, fake = torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    entropy = nn.functional.binary_cross_entropy_with_logits
    expected = entropy(real, torch.ones_like(real)) + entropy(fake, torch.zeros_like(fake))
    assert discriminator_error("bce", real, fake).mean() == pytest.approx(expected.item() / 2)
    assert generator_error("bce", fake).mean() == pytest.approx(entropy(fake, torch.ones_like(fake)).item())
    beaten = torch.full((1, 1, 1), -20.0, requires_grad=True)
    generator_error("bce", beaten).sum().backward()
    assert beaten.grad.item() == pytest.approx(-1.0)  # log(1 − σ(D)) would have no gradient here


def test_the_generators_weight_rises_over_the_warmup():
    config = AdversarialConfig(start=10, warmup=3)
    assert [ramp_weight(config, step) for step in (10, 11, 12, 13, 99)] == [0.25, 0.5, 0.75, 1, 1]
    assert ramp_weight(AdversarialConfig(start=10), 10) == 1


def test_a_discriminator_that_cannot_tell_real_from_fake_is_not_trusted():
    keep = torch.tensor([1.0, 1.0, 0.0])  # the last frame is padding
    fake = torch.tensor([-1.0, 0.0, 50.0])
    for difference, trust in ((-0.5, 0.0), (0.0, 0.0), (FULL_SEPARATION / 4, 0.25), (FULL_SEPARATION, 1.0), (3.0, 1.0)):
        assert measure_separation(fake + difference, fake, keep).item() == pytest.approx(trust, abs=1e-6)


def exact_r1(judge: nn.Module, real: torch.Tensor) -> float:
    """Mean over images and patches of the squared gradient norm, by autograd."""
    leaf = real.clone().requires_grad_()
    logits = judge(leaf)
    patches = [logits[:, y, x].sum() for y in range(logits.shape[1]) for x in range(logits.shape[2])]
    gradients = [torch.autograd.grad(patch, leaf, retain_graph=True)[0] for patch in patches]
    return torch.stack([gradient.square().sum((1, 2, 3)) for gradient in gradients]).mean().item()


def estimated_r1(judge: nn.Module, real: torch.Tensor, step: int) -> torch.Tensor:
    above, below = perturb(real, Noise.for_rows(0, step, len(real)))
    return finite_difference_r1(judge(above), judge(below)).mean()


def test_slope_of_a_linear_judge_is_its_gradient():
    weights = torch.randn(3, 8, 8)

    class Linear(nn.Module):
        def forward(self, x):
            return (x * weights).sum((1, 2, 3))[:, None, None]

    found = estimated_r1(Linear(), torch.rand(4000, 3, 8, 8), 0)
    assert found.item() == pytest.approx(weights.square().sum().item(), rel=0.1)


def test_the_penalty_is_autograds_all_through_a_training():
    """A discriminator soon knows noise from a picture, and then D(x + s ε) − D(x) alone is twice too large."""
    judge = Discriminator(3, AdversarialConfig(width=16, levels=2))
    optimizer = torch.optim.Adam(judge.parameters(), 2e-3, betas=(0.5, 0.95))
    real = nn.functional.interpolate(torch.rand(64, 3, 3, 3) * 2 - 1, size=16)  # flat squares
    fake = real + 0.1 * torch.randn_like(real)
    shown, ratios, one_sided = real[:32], [], []
    for step in range(61):
        if step % 20 == 0:
            exact = exact_r1(judge, shown)
            with torch.no_grad():
                found = torch.stack([estimated_r1(judge, shown, draw) for draw in range(16)]).mean()
                above, _ = perturb(shown, Noise.for_rows(0, step, 32))
                forward = ((judge(above) - judge(shown)) / PENALTY_STEP).square().mean()
            ratios.append(found.item() / exact)
            one_sided.append(forward.item() / exact)
        optimizer.zero_grad()
        discriminator_error("hinge", judge(real), judge(fake)).mean().backward()
        optimizer.step()
    assert all(0.75 < ratio < 1.25 for ratio in ratios), ratios
    assert max(one_sided) > 1.7, one_sided


def test_descending_the_penalty_lowers_the_exact_one():
    judge = Discriminator(3, AdversarialConfig(width=8, levels=2))
    real = torch.randn(8, 3, 8, 8) / 2
    before = exact_r1(judge, real)
    optimizer = torch.optim.Adam(judge.parameters(), 1e-3)
    for step in range(20):
        optimizer.zero_grad()
        estimated_r1(judge, real, step).backward()
        optimizer.step()
    assert exact_r1(judge, real) < 0.7 * before


def test_nudges_are_keyed_by_sample_and_step():
    real = torch.randn(4, 1, 8, 8)
    above, below = perturb(real, Noise.for_rows(3, 5, 4))
    assert torch.allclose(above + below, 2 * real, atol=1e-6)
    assert torch.equal(above[2:], perturb(real[2:], Noise(3, 5, 2 + torch.arange(2)))[0])
    assert not torch.equal(above, perturb(real, Noise.for_rows(3, 6, 4))[0])
    assert torch.allclose((above - real).abs(), torch.tensor(PENALTY_STEP), atol=1e-6)
    clips, _ = perturb(real.expand(4, 3, 8, 8).reshape(12, 1, 8, 8), Noise.for_rows(3, 5, 4))  # three frames a sample
    assert clips.shape == (12, 1, 8, 8)


def test_gradient_at_is_the_gradient_of_kept_samples():
    pictures = torch.randn(3, 2, 4, 4)
    keep = torch.tensor([1.0, 0.0, 1.0])
    value, gradient = gradient_at(pictures, lambda x: x.square().sum((1, 2, 3)), keep)
    assert torch.allclose(value, (pictures[0].square() + pictures[2].square()).sum())
    assert torch.allclose(gradient, 2 * pictures * keep[:, None, None, None])
    assert not value.requires_grad


def test_adaptive_weight_by_hand():
    layer = nn.Conv2d(1, 1, 1, bias=False)
    features = torch.tensor([[[[1.0, 2.0]]]])
    pictures = layer(features)
    reference, push = torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[0.0, -0.5]]]])
    # ∂/∂w Σ g·w·f = Σ g·f: 3·1 + 4·2 = 11 and −0.5·2 = −1
    assert adaptive_weight(pictures, [layer.weight], reference, push, 1e4) == pytest.approx(11.0)
    assert adaptive_weight(pictures, [layer.weight], reference, push, 5.0) == 5.0
    silent = adaptive_weight(pictures, [layer.weight], reference, torch.zeros_like(push), 7.0)
    assert silent == 7.0
    assert not silent.requires_grad
    pictures.sum().backward()  # the graph is still there
    assert layer.weight.grad == 3.0


@pytest.mark.parametrize("size", [1e-3, 1e-7, 1e-10])
def test_adaptive_weight_survives_fp16(size):
    """Gradients at single pixels are far below 6e-8, fp16's smallest number, as soon as a loss is a mean over many."""
    layer = nn.Conv2d(8, 3, 3, padding=1, bias=False).half()
    features = torch.randn(2, 8, 16, 16)
    reference, push = torch.randn(2, 3, 16, 16) * size, torch.randn(2, 3, 16, 16) * size * 4
    found = adaptive_weight(layer(features.half()).float(), [layer.weight], reference, push, 1e4)
    exact = nn.Conv2d(8, 3, 3, padding=1, bias=False)
    exact.weight.data = layer.weight.detach().float()
    assert found.item() == pytest.approx(
        adaptive_weight(exact(features), [exact.weight], reference, push, 1e4).item(), rel=0.02
    )
