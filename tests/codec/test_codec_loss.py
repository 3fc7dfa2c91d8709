from __future__ import annotations

import pytest
import torch

from kineograph.codec.adversarial import AdversarialConfig
from kineograph.codec.codec_loss import (
    DiscriminatorFrames,
    Reconstruction,
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
