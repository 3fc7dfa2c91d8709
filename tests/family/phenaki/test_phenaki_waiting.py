"""Training steps and sampling never ask the device for a number: shapes and choices are known on the host."""

from __future__ import annotations

import pytest
import torch

from kineograph.core.batch import Prompts
from kineograph.core.noise import Noise
from kineograph.family.phenaki import PhenakiSample
from kineograph.train.config import TrainConfig
from kineograph.train.stepper import Stepper
from tests.family.phenaki.conftest import CAPTIONS, batch_of
from tests.text.waiting import NoWaiting


@pytest.mark.parametrize("keys", [{}, {"critic": "self", "primed": 0.5}, {"critic": "network"}])
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_waits_for_nothing(make, keys, padded) -> None:
    stepper = Stepper(make(**keys), TrainConfig(batch_size=4, warmup=0))
    batch = batch_of(4)
    if padded:
        batch.frame_mask = torch.arange(5) < torch.tensor([5, 1, 3, 5])[:, None]
    stepper.step(0, [batch])  # optimizers make their state at the first
    with NoWaiting():
        stepper.step(1, [batch])


@pytest.mark.parametrize("critic", ["none", "self", "network"])
def test_sampling_waits_for_nothing(make, codec, critic) -> None:
    task = make(critic=critic).eval()
    prompts = Prompts(Noise.for_rows(0, 0, 2), CAPTIONS[:2])
    codec.decode = lambda tokens: torch.zeros(2, 5, 3, 8, 8)  # the test's own looks at its tokens
    with NoWaiting():
        task.sample(prompts, PhenakiSample(steps=3))
