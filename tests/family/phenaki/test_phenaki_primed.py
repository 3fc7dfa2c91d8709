"""Training with visible first frames, as in sampling with a prime."""

from __future__ import annotations

from collections import Counter

import torch

from kineograph.core.noise import Noise
from kineograph.family.phenaki.network import Clips

from .conftest import clips

ROWS, TIMES, PLACES = 400, 3, 4  # places: tokens a time


def test_a_share_of_the_clips_has_visible_first_frames(make) -> None:
    task, noise = make(primed=0.25).train(), Noise.for_rows(3, 5, ROWS)
    maskable = task.find_maskable(Clips.flatten(clips(ROWS, TIMES)), noise)
    times = maskable.view(ROWS, TIMES, PLACES)
    assert (times == times[:, :, :1]).all()  # whole times
    shown = Counter((~times[:, :, 0]).sum(dim=1).tolist())
    assert set(shown) == {0, 1, 2}  # never all of them
    assert 0.18 < 1 - shown[0] / ROWS < 0.32
    assert 0.6 < shown[1] / shown[2] < 1.6
    assert times[:, :, 0].int().diff(dim=1).min() >= 0  # beginnings, nothing from the middle


def test_only_later_frames_are_masked_and_scored(make, batch) -> None:
    task, noise = make(primed=1.0).train(), Noise(3, 5, batch.slots)
    found = task.get_clips(batch)
    masked, _ = task.predict(found, task.encode_text(batch, noise, drop=False), noise)
    assert not masked.mask[:, :PLACES].any()
    assert masked.mask.any(dim=1).all()
    scored = torch.zeros(masked.mask.numel()).scatter_(0, masked.rows, masked.weights).view_as(masked.mask)
    assert torch.equal(scored > 0, masked.mask)
    assert task.eval().find_maskable(found, noise) is None  # judged as ever
    assert make().train().find_maskable(found, noise) is None


def test_padding_is_never_masked_and_an_image_is_never_primed(make) -> None:
    task, noise = make(primed=1.0).train(), Noise.for_rows(0, 0, 60)
    real = torch.arange(60) % TIMES + 1  # times
    found = Clips.flatten(clips(60, TIMES), torch.arange(TIMES) < real[:, None])
    maskable = task.find_maskable(found, noise)
    assert not (maskable & ~found.keep).any()
    left = maskable[:, ::PLACES].sum(dim=1)
    assert (left >= 1).all()
    assert torch.equal(left[real == 1], torch.ones(20, dtype=left.dtype))
    assert (left[real > 1] < real[real > 1]).all()
