"""Each mode sees what the package that it names would see. Expected values are written from the packages' definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchmetrics.functional.image import structural_similarity_index_measure

from kineograph.core.batch import Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.core.metric_options import MetricOptions
from kineograph.evaluate.extractor import i3d, inception
from kineograph.evaluate.extractor.registry import Extractor, Extractors
from kineograph.evaluate.metric.fvd import Fvd
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, MetricSkipped
from kineograph.evaluate.similarity import psnr, ssim
from kineograph.evaluate.statistics import inception_score, kernel_distance
from tests.evaluate.test_extractors import Colours, random_weights, scripted

CPU = torch.device("cpu")


class _Stop(Exception):
    pass


def first_input(network: nn.Module, pixels: torch.Tensor) -> np.ndarray:
    """What reaches the first convolution."""
    seen: list[torch.Tensor] = []

    def stop(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0])
        raise _Stop

    handle = network.layers[0].register_forward_pre_hook(stop)  # type: ignore[operator]
    with pytest.raises(_Stop):
        network(pixels)
    handle.remove()
    return seen[0].numpy()


def bilinear(picture: np.ndarray, new: int, shift: float) -> np.ndarray:
    """H W → new new: pixels at (j + shift) · size / new − shift, held at the borders."""

    def weights(size: int) -> np.ndarray:
        at = np.clip((np.arange(new) + shift) * size / new - shift, 0, size - 1)
        low = np.floor(at).astype(int)
        matrix = np.zeros((new, size))
        np.add.at(matrix, (np.arange(new), low), 1 - (at - low))
        np.add.at(matrix, (np.arange(new), np.minimum(low + 1, size - 1)), at - low)
        return matrix

    return weights(picture.shape[0]) @ picture @ weights(picture.shape[1]).T


def pillow_bicubic(picture: np.ndarray) -> np.ndarray:
    image = Image.fromarray(picture.astype(np.float32))  # mode F
    return np.asarray(image.resize((299, 299), Image.Resampling.BICUBIC)).clip(0, 255)


@pytest.mark.parametrize("size", [(40, 30), (500, 333)])
def test_inception_sees_what_each_package_shows_it(size):
    picture = np.random.default_rng(0).integers(0, 256, (3, *size), dtype=np.uint8)
    pixels = torch.from_numpy(picture)[None].float() / 255
    network = inception.InceptionV3()
    expected = {
        "tensorflow": [(bilinear(channel, 299, 0.0) - 128) / 128 for channel in picture],
        "clean": [(pillow_bicubic(channel) - 128) / 128 for channel in picture],
        "pytorch": [bilinear(channel / 255, 299, 0.5) * 2 - 1 for channel in picture],
    }
    for mode, channels in expected.items():
        network.set_mode(mode)
        assert np.abs(first_input(network, pixels)[0] - np.stack(channels)).max() < 1e-4, mode


def test_i3d_resizes_from_the_corner_or_at_half_pixels():
    clip = np.random.default_rng(0).integers(0, 256, (2, 3, 24, 20), dtype=np.uint8)
    network = i3d.I3D()
    for mode, shift in (("tensorflow", 0.0), ("pytorch", 0.5)):
        network.set_mode(mode)
        seen = first_input(network, torch.from_numpy(clip)[None].float() / 255)  # 1 3 T H W
        assert np.abs(seen[0, 1, 1] - (bilinear(clip[1, 1] / 255, 224, shift) * 2 - 1)).max() < 1e-4


def test_fvd_as_cd_fvd_computes_it():
    """Its batch norms have ε = 1e-5, where TensorFlow has 1e-3, and its covariances are divided by n."""
    network = i3d.I3D()
    network.load_state_dict(random_weights(network))
    unit, pixels = network.layers[2], torch.randn(2, 64, 1, 2, 2)
    for mode, eps in (("tensorflow", 1e-3), ("pytorch", 1e-5)):
        network.set_mode(mode)
        expected = torch.einsum("oi,bithw->bothw", unit.weight[..., 0, 0, 0], pixels)
        shape = (1, 64, 1, 1, 1)
        expected = (expected - unit.mean.view(shape)) / (unit.var.view(shape) + eps).sqrt() + unit.bias.view(shape)
        assert torch.allclose(unit(pixels), expected.relu(), atol=1e-5), mode
    clips = torch.rand(3, 10, 3, 8, 8)
    context = EvalContext("", None, None, Shape(10, 8, 8, 3, 8.0), CPU, None, Extractors(CPU))
    for mode, divisor in (("tensorflow", 2), ("pytorch", 3)):
        network.set_mode(mode)
        metric = Fvd(Extractor(network, "i3d", CPU), context)
        features = metric.extractor.features(clips).double()
        metric.sides.add("real", features)
        centred = features - features.mean(0)
        assert torch.allclose(metric.sides.gaussian("real").covariance, centred.T @ centred / divisor)


def test_a_picture_of_the_networks_size_is_not_touched():
    pixels = torch.rand(1, 3, 299, 299)
    network = inception.InceptionV3()
    for mode in network.modes:
        network.set_mode(mode)
        scale = pixels * 2 - 1 if mode == "pytorch" else (pixels * 255 - 128) / 128
        assert np.allclose(first_input(network, pixels), scale.numpy())


def test_earlier_layers_of_inception_give_their_pooled_maps():
    """64 and 192 channels after the two max-pools, 768 before the auxiliary classifier, as pytorch-fid's --dims."""
    layers = inception.InceptionV3().layers
    for width, end in ((64, 4), (192, 7), (768, 15), (2048, 18)):
        assert inception._ENDS[width] == end
        assert layers[:end](torch.zeros(1, 3, 79, 79)).shape[1] == width
    assert isinstance(layers[3], nn.MaxPool2d) and isinstance(layers[6], nn.MaxPool2d)
    stem = inception.InceptionV3().layers[:4]
    stem.load_state_dict(random_weights(stem))
    network = inception.InceptionV3()
    network.layers[:4].load_state_dict(stem.state_dict())
    network.set_depth(64)
    pixels = torch.rand(1, 3, 299, 299)
    with torch.no_grad():
        assert torch.allclose(network(pixels), stem((pixels * 255 - 128) / 128).mean((2, 3)), atol=1e-5)


def test_labels_name_the_mode_the_resize_and_the_layer():
    found = Extractor(inception.InceptionV3(), "inception-v3 abc", CPU)
    assert found.protocol == {
        "extractor": "inception-v3 abc",
        "mode": "tensorflow",
        "resize": "bilinear from the corner to 299",
    }
    found.network.set_mode("clean")
    found.network.set_depth(192)
    assert found.protocol["resize"] == "antialiased bicubic to 299"
    assert (found.protocol["mode"], found.protocol["features"]) == ("clean", 192)


def test_a_mode_that_the_network_does_not_have_is_refused(tmp_path):
    own = scripted(Colours(), tmp_path / "colours.pt")
    chosen = {"fid": own, "is": own}
    with pytest.raises(
        MetricSkipped, match=r"mode clean does not apply to .*colours.pt: it resizes in its own way only"
    ):
        Extractors(CPU, MetricOptions(fid_mode="clean", extractors=chosen)).open("fid", "inception-v3", "images")
    with pytest.raises(MetricSkipped, match="features of width 64 are Inception's"):
        Extractors(CPU, MetricOptions(fid_features=64, extractors=chosen)).open("fid", "inception-v3", "images")
    plain = Extractors(CPU, MetricOptions(fid_mode="clean", extractors=chosen)).open("is", "inception-v3", "images")
    assert plain.protocol["resize"] == "by the network"


def test_files_are_kept_absolute_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.pt").touch()
    (tmp_path / "inception-v3").mkdir()
    found = MetricOptions(extractors={"fid": "own.pt", "kid": "inception-v3", "clip_score": "runs/x/clip"}).extractors
    assert found == {"fid": str(tmp_path / "own.pt"), "kid": "inception-v3", "clip_score": "runs/x/clip"}


def test_keys_are_checked():
    with pytest.raises(ConfigError, match="fid_mode='legacy'"):
        parse(MetricOptions, {"fid_mode": "legacy"})
    with pytest.raises(ConfigError, match="loss has no extractor"):
        parse(MetricOptions, {"extractors": {"loss": "x.pt"}})
    with pytest.raises(ConfigError, match="fvd_frames=9"):
        parse(MetricOptions, {"fvd_frames": 9})


def test_subsets_and_splits_are_as_many_as_asked_for():
    rows = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    other = torch.randn(50, 5, generator=torch.Generator().manual_seed(1)) + 0.3
    values, labels = kernel_distance(rows, other, subsets=7, size=20)
    assert labels == {"subsets": "7 × 20"}
    assert values["kid_deviation"] > 0
    with pytest.raises(MetricSkipped, match="kid_subset_size=51 is more than the 50 samples"):
        kernel_distance(rows, other, size=51)
    values, labels = inception_score(rows, splits=3)
    p = rows.double().softmax(1)
    assert labels == {"splits": 3} and values["is"] > 1
    parts = [part.shape[0] for part in p.chunk(3)]
    assert parts == [20, 20, 20]
    with pytest.raises(MetricSkipped, match="in each of 31 splits"):
        inception_score(rows, splits=31)


def test_the_deviation_of_the_score_is_over_the_splits():
    """Population deviation, as the score's paper and torch-fidelity have it: half the distance of two splits."""
    logits = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) * 2
    values, _ = inception_score(logits, splits=2)
    # With two splits a and b: mean (a + b) / 2, deviation |a − b| / 2; together they give both splits' scores.
    low, high = values["is"] - values["is_deviation"], values["is"] + values["is_deviation"]
    from kineograph.evaluate.statistics import _fix_seed

    with _fix_seed():
        order = torch.randperm(40)
    p = logits.double()[order].softmax(1)
    scores = sorted(float((q * (q.log() - q.mean(0).log())).sum(1).mean().exp()) for q in p.chunk(2))
    assert [low, high] == pytest.approx(scores, rel=1e-6)


def test_psnr_and_ssim_are_the_formulas():
    x = torch.rand(2, 3, 24, 20, generator=torch.Generator().manual_seed(0))
    y = (x + 0.2 * torch.rand(2, 3, 24, 20, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    # torchmetrics mirrors the borders; the paper and scikit-image take whole windows only.
    expected = structural_similarity_index_measure(y, x, data_range=1.0, reduction="none")
    mirrored = [nn.functional.pad(picture, (5, 5, 5, 5), mode="reflect") for picture in (x, y)]
    assert torch.allclose(ssim(*mirrored).float(), expected, atol=1e-5)
    assert not torch.allclose(ssim(x, y).float(), expected, atol=1e-5)
    assert torch.allclose(ssim(x, x), torch.ones(2, dtype=torch.float64))
    assert float(psnr(x, x + 0.1)[0]) == pytest.approx(20, abs=1e-3)


def test_pairs_are_compared_frame_by_frame_without_padding():
    real, made = torch.rand(2, 4, 3, 16, 16), torch.rand(2, 3, 3, 16, 16)
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    batch = EvalBatch(real=real, generated=made, frame_mask=mask)
    left, right = batch.frame_pairs("generated")
    assert torch.equal(left, torch.cat([real[0, :3], real[1, :1]]))
    assert torch.equal(right, torch.cat([made[0], made[1, :1]]))
    with pytest.raises(MetricSkipped, match="8 × 8 × 3 cannot be compared with real ones of 16 × 16 × 3"):
        EvalBatch(real=real, generated=torch.rand(2, 4, 3, 8, 8)).frame_pairs("generated")
