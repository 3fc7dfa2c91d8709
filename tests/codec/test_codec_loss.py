from __future__ import annotations

import pytest
import torch

from kineograph.codec.adversarial import AdversarialConfig
from kineograph.codec.codec_loss import (
    DiscriminatorFrames,
    Reconstruction,
    codec_limits,
    explained_variance,
    frames_to_pixels,
    pixels_to_frames,
    sample_perceptual_frames,
    to_unit_range,
)
from kineograph.core.noise import Noise


def keep_of(lengths: list[int], frames: int) -> torch.Tensor:
    return (torch.arange(frames) < torch.tensor(lengths)[:, None]).float().flatten()


def test_all_frames_are_seen_unless_fewer_are_asked_for():
    keep, noise = keep_of([4, 2], 4), Noise.for_rows(0, 0, 2)
    for frames in (None, 4, 9):
        places, weights = sample_perceptual_frames(keep, frames, noise)
        assert places is None
        assert torch.equal(weights, keep)


def test_seen_frames_are_real_different_and_stand_for_their_clip():
    keep = keep_of([6, 3, 1, 2], 6)
    for step in range(50):
        places, weights = sample_perceptual_frames(keep, 2, Noise.for_rows(0, step, 4))
        clips = places.view(4, 2)
        assert torch.equal(clips // 6, torch.arange(4)[:, None].expand(4, 2))
        assert (clips[:, 0] != clips[:, 1]).all()
        assert torch.equal(weights > 0, keep[places] > 0)  # padding only where a clip has nothing else, at no weight
        assert torch.equal(weights.view(4, 2).sum(1), torch.tensor([6.0, 3.0, 1.0, 2.0]))


def test_the_weighted_sum_is_in_the_mean_that_of_all_frames():
    keep = keep_of([5, 3], 5)
    values = torch.randn(10, generator=torch.Generator().manual_seed(0))
    found = []
    for step in range(2000):
        places, weights = sample_perceptual_frames(keep, 2, Noise.for_rows(0, step, 2))
        found.append((values[places] * weights).sum())
    spread = torch.stack(found).std() / 2000**0.5
    assert (torch.stack(found).mean() - (values * keep).sum()).abs() < 4 * spread


def test_which_frames_are_seen_is_keyed_by_sample_and_step():
    keep = keep_of([8] * 4, 8)
    together, _ = sample_perceptual_frames(keep, 3, Noise.for_rows(3, 5, 4))
    half, _ = sample_perceptual_frames(keep[16:], 3, Noise(3, 5, 2 + torch.arange(2)))
    assert torch.equal(together[6:] - 16, half)
    assert not torch.equal(together, sample_perceptual_frames(keep, 3, Noise.for_rows(3, 6, 4))[0])


def test_pixels_go_in_and_come_out():
    pixels = torch.rand(2, 3, 3, 4, 4)
    inside = pixels_to_frames(pixels)
    assert inside.shape == (6, 3, 4, 4)
    assert inside.min() < 0
    assert torch.allclose(frames_to_pixels(inside, 2), pixels, atol=1e-6)
    assert to_unit_range(torch.tensor([-3.0, 0.0, 3.0])).tolist() == [0.0, 0.5, 1.0]


def test_the_discriminator_is_shown_runs_of_real_frames_that_stand_for_their_clips():
    keep = torch.tensor([[1.0] * 7, [1.0] * 5 + [0.0] * 2, [1.0] * 2 + [0.0] * 5])
    starts = set()
    for step in range(40):
        scene = DiscriminatorFrames.sample(_reconstruction(keep, step), AdversarialConfig(frames=3))
        times = scene.indices.view(3, 3) - torch.arange(3)[:, None] * 7
        assert scene.frames == 3
        assert (times.diff(dim=1) == 1).all()
        assert times[0].max() < 7 and times[1].max() < 5 and times[2, 0] == 0
        assert scene.keep.view(3, 3).tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]
        assert torch.allclose(scene.weights.view(3, 3).sum(1), keep.sum(1))
        starts.add(int(times[0, 0]))
    assert starts == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("frames", [None, 7, 20])
def test_the_discriminator_is_shown_everything_unless_less_is_asked_for(frames):
    keep = torch.tensor([[1.0] * 7, [1.0] * 5 + [0.0] * 2])
    scene = DiscriminatorFrames.sample(_reconstruction(keep, 0), AdversarialConfig(frames=frames))
    assert scene.indices is None and scene.frames == 7 and scene.weights.tolist() == keep.flatten().tolist()


def _reconstruction(keep, step):
    pictures = torch.zeros(keep.numel(), 1, 2, 2)
    return Reconstruction(pictures, pictures, keep.flatten(), None, None, Noise.for_rows(0, step, keep.shape[0]))


# Explained variance --------------------------------------------------------------------------------------------------


def reconstruct(real: torch.Tensor, fake: torch.Tensor, lengths: list[int] | None = None) -> Reconstruction:
    """Clips B T C H W in [0, 1] and their reconstructions."""
    clips, frames = real.shape[:2]
    keep = torch.ones(clips * frames) if lengths is None else keep_of(lengths, frames)
    rows = None if lengths is None else keep.bool()
    return Reconstruction(*map(pixels_to_frames, (real, fake)), keep, None, rows, Noise.for_rows(0, 0, clips))


def pictures(count: int, frames: int = 1, seed: int = 0) -> torch.Tensor:
    """Pictures that share a pattern, each with a brightness and noise of its own."""
    random = torch.Generator().manual_seed(seed)
    pattern = torch.linspace(0.2, 0.6, 64).view(8, 8)
    brightness = 0.2 * torch.rand(count, 1, 1, 1, 1, generator=random)
    return pattern + brightness + 0.2 * torch.rand(count, frames, 3, 8, 8, generator=random)


def test_the_mean_picture_explains_nothing_and_a_copy_everything():
    real = pictures(2000)
    mean = pictures(4000, seed=1).mean(0, keepdim=True).expand_as(real)
    batches = zip(real.split(8), mean.split(8), strict=True)  # small batches, whose own means fit them well
    found = [explained_variance(reconstruct(*batch)) for batch in batches]
    assert float(sum(m.sum for m in found) / sum(m.count for m in found)) == pytest.approx(0, abs=0.01)
    assert explained_variance(reconstruct(real, real)).value() == 1
    assert explained_variance(reconstruct(real, torch.zeros_like(real))).value() < -1


def test_half_of_the_deviation_explains_three_quarters_of_the_variance():
    real = pictures(500)
    mean = real.mean(0, keepdim=True)
    found = explained_variance(reconstruct(real, mean + 0.5 * (real - mean)))
    assert float(found.value()) == pytest.approx(0.75, abs=0.01)


def test_padding_explains_nothing():
    real, fake = pictures(6, frames=4), pictures(6, frames=4, seed=1)
    lengths = [4, 2, 4, 3, 4, 1]
    keep = keep_of(lengths, 4).bool().view(6, 4)
    found = explained_variance(reconstruct(real, fake, lengths))
    other_real, other_fake = real.clone(), fake.clone()
    other_real[~keep], other_fake[~keep] = 0.0, 1.0
    again = explained_variance(reconstruct(other_real, other_fake, lengths))
    torch.testing.assert_close((found.sum, found.count), (again.sum, again.count))


def test_a_batch_of_one_is_compared_with_its_mean_colour():
    real = pictures(1, frames=3)
    flat = real.mean((3, 4), keepdim=True).expand_as(real)
    assert float(explained_variance(reconstruct(real, flat)).value()) == pytest.approx(0, abs=1e-5)
    assert explained_variance(reconstruct(real, real)).value() == 1


def test_pictures_that_are_all_the_same_are_not_judged():
    black = torch.zeros(4, 1, 3, 8, 8)
    assert not torch.isfinite(explained_variance(reconstruct(black, black)).value())
    assert all(limit.check({"explained_variance": float("nan")}) is None for limit in codec_limits(64))


@pytest.mark.parametrize("codes", [4, 64, 512, 2**18])
def test_small_and_huge_codebooks_raise_no_alarm(codes: int):
    """A batch of 256 tokens uses few of many codes; of four codes, one may stand for most pictures."""
    used = min(codes, 40) / codes
    values = {"explained_variance": 0.5, "codes/use": used, "codes/perplexity": 1.1 if codes == 4 else 10.0}
    assert [limit.name for limit in codec_limits(codes) if limit.check(values)] == []
    dead = {"codes/use": 1 / codes, "codes/perplexity": 1.0}
    found = [limit.name for limit in codec_limits(codes) if limit.check(dead)]
    assert found == ([] if codes == 4 else ["one_code"] if codes == 64 else ["one_code", "few_codes"])


@pytest.mark.parametrize(
    ("kind", "remedy"), [("vq", "quantizer.kind=fsq"), ("lfq", "quantizer.kind=fsq"), ("fsq", "fewer quantizer.levels")]
)
def test_the_remedy_for_few_codes_fits_the_quantizer(kind: str, remedy: str):
    (limit,) = [limit for limit in codec_limits(512, kind) if limit.name == "few_codes"]
    assert remedy in limit.remedy and ("fsq" in limit.remedy) == (kind != "fsq")


def test_parts_of_one_film_are_compared_with_their_mean_colour():
    """The mean of nearly equal clips beats a codec that blurs them, and nothing has collapsed."""
    film = pictures(1, frames=2)
    real = film + 0.02 * pictures(6, frames=2, seed=1)
    blurred = film + 0.05 * torch.randn(film.shape, generator=torch.Generator().manual_seed(2))
    found = explained_variance(reconstruct(real, blurred.expand_as(real)))
    assert 0.5 < float(found.value()) < 1
    flat = real.mean((0, 3, 4), keepdim=True).expand_as(real)
    assert float(explained_variance(reconstruct(real, flat)).value()) == pytest.approx(0, abs=0.05)
