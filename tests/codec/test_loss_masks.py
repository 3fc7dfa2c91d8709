"""data.masks in the losses of codecs: what a mask hides gives no gradient and no error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kineograph.core.batch import Batch
from kineograph.core.capabilities import SupportsLossMasks
from kineograph.core.task import Task
from tests.codec import small_cvivit, test_causal_vae, test_vqgan
from tests.codec.playing import noise_for

MAKERS = {
    "vqgan": lambda: test_vqgan.build(frames=2, **test_vqgan.GAME),
    "cvivit": lambda: small_cvivit.build(**small_cvivit.GAME),
    "causal_vae": lambda: test_causal_vae.build(frames=5, **test_causal_vae.GAME),
}


def masked(task: Task, rows: int = 2) -> tuple[Batch, torch.Tensor]:
    """A batch of which the left half counts, and the mask B·T 1 H W."""
    torch.manual_seed(0)
    shape = task.shape
    size = (rows, shape.frames, shape.channels, shape.height, shape.width)
    mask = torch.zeros(rows, shape.height, shape.width, dtype=torch.uint8)
    mask[:, :, : shape.width // 2] = 255
    pixels = torch.randint(0, 256, size, dtype=torch.uint8)
    batch = Batch(slots=torch.arange(rows), pixels=pixels, loss_mask=mask)
    return batch, (mask > 0)[:, None].repeat_interleave(shape.frames, 0)


@pytest.mark.parametrize("name", MAKERS)
def test_hidden_pixels_give_neither_error_nor_gradient(name: str) -> None:
    task = MAKERS[name]()
    assert isinstance(task, SupportsLossMasks)
    batch, shown = masked(task)
    step = 10_000  # the discriminator judges
    shared = task(batch, noise_for(batch, step))
    shared.fake.retain_grad()
    loss = task.loss("generator", shared)
    loss.total.sum.backward(retain_graph=True)
    assert "adversarial" in loss.terms
    hidden = ~shown.expand_as(shared.fake)
    assert not shared.fake.grad[hidden].any() and shared.fake.grad[~hidden].any()
    each = (shared.fake - shared.real).abs()[~hidden]
    error = (each if task.config.loss == "l1" else each.square()).mean()
    terms = loss.terms["reconstruction"]
    torch.testing.assert_close(terms.sum / terms.count, error)
    # The discriminator sees real pixels where nothing counts.
    seen = replace(shared, fake=torch.where(hidden, torch.rand_like(shared.fake), shared.fake))
    first, second = (task.loss("discriminator", each).total.sum for each in (shared, seen))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("name", MAKERS)
def test_a_white_mask_changes_nothing(name: str) -> None:
    task = MAKERS[name]().eval()
    batch, _ = masked(task)
    plain = task.validate(replace(batch, loss_mask=None), noise_for(batch))
    white = task.validate(replace(batch, loss_mask=torch.full_like(batch.loss_mask, 255)), noise_for(batch))
    half = task.validate(batch, noise_for(batch))
    for key, mean in plain.items():
        torch.testing.assert_close(torch.as_tensor(white[key].sum), torch.as_tensor(mean.sum), msg=key)
    changed = [
        key for key in plain if not torch.allclose(torch.as_tensor(half[key].sum), torch.as_tensor(plain[key].sum))
    ]
    assert {"loss", "psnr", "explained_variance"} <= set(changed)
