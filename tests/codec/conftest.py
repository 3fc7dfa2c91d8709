from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from kineograph.codec.perceptual import Lpips


@pytest.fixture(scope="session")
def vgg(tmp_path_factory):
    """Random weights where VGG16's would lie."""
    path = tmp_path_factory.mktemp("weights") / "lpips.safetensors"
    torch.manual_seed(3)
    weights = Lpips().state_dict()
    save_file({name: value.abs() if name.startswith("lin") else value for name, value in weights.items()}, path)
    return path


@pytest.fixture
def trusted(monkeypatch):
    """The gradient of an untrained discriminator counts as that of one that tells real from fake."""
    monkeypatch.setattr("kineograph.codec.codec_loss.measure_separation", lambda real, fake, keep: torch.ones(()))
