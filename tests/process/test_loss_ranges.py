from __future__ import annotations

import pytest
import torch

from kineograph.core.noise import Noise
from kineograph.process.loss_ranges import loss_by_mask_share, loss_by_timestep
from kineograph.process.masking import TokenMask, mask_tokens


def test_quarters_of_the_timesteps_add_up_to_the_loss():
    errors, t = torch.rand(40), torch.randint(0, 1000, (40,))
    t[:2] = torch.tensor([249, 250])
    present = (torch.arange(40) % 5 > 0).float()
    means = loss_by_timestep(errors * present, t, 1000, present)
    assert list(means) == ["loss/t0000-0249", "loss/t0250-0499", "loss/t0500-0749", "loss/t0750-0999"]
    assert float(sum(mean.sum for mean in means.values())) == pytest.approx(float((errors * present).sum()))
    assert float(sum(mean.count for mean in means.values())) == 32
    second = (t >= 250) & (t < 500)
    assert float(means["loss/t0250-0499"].sum) == pytest.approx(float((errors * present)[second].sum()))


def test_samples_fall_into_the_quarter_of_their_masked_share():
    """Two of eight tokens are 25 %, the upper edge of the first quarter; padding is no token."""
    mask = torch.zeros(4, 8, dtype=torch.bool)
    for row, count in enumerate((2, 3, 8, 4)):
        mask[row, :count] = True
    keep = torch.ones(4, 8, dtype=torch.bool)
    keep[3, 4:] = False  # four of four
    rows = mask.flatten().nonzero()[:, 0]
    losses = torch.rand(len(rows))
    means = loss_by_mask_share(
        lambda weights: (losses * weights).sum(), TokenMask(mask, rows, torch.ones(len(rows))), keep
    )
    assert list(means) == ["loss/masked000-025", "loss/masked025-050", "loss/masked050-075", "loss/masked075-100"]
    assert [int(mean.count) for mean in means.values()] == [2, 3, 0, 12]
    assert float(means["loss/masked000-025"].sum) == pytest.approx(float(losses[:2].sum()))


def test_rows_that_only_fill_the_batch_do_not_count():
    masked = mask_tokens(Noise.for_rows(0, 0, 6), 10)
    losses = torch.rand(len(masked.rows))
    means = loss_by_mask_share(lambda weights: (losses * weights).sum(), masked)
    assert float(sum(mean.count for mean in means.values())) == float(masked.weights.sum())
    assert float(sum(mean.sum for mean in means.values())) == pytest.approx(float((losses * masked.weights).sum()))
