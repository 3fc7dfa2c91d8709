from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from kineograph.core import weight_cache as cache
from kineograph.core.batch import Shape
from kineograph.core.errors import InputError
from kineograph.core.metric_options import MetricOptions
from kineograph.evaluate.extractor import efficientnet, i3d, inception
from kineograph.evaluate.extractor.layers import SamePool3d, Unit, pad_same, resize_as_tensorflow
from kineograph.evaluate.extractor.registry import Extractors, build_network, open_extractor, parse_choices, to_rgb8
from kineograph.evaluate.metric_api import EvalBatch, MetricSkipped, WeightsMissing

CPU = torch.device("cpu")
PICTURES = Shape(frames=1, height=16, width=16, channels=3, fps=8)


def random_weights(network: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for name, value in network.state_dict().items():
        spread = (2 / value[0].numel()) ** 0.5 if value.ndim > 1 else 0.1
        found[name] = (
            torch.rand_like(value) + 0.5 if name.endswith(("var", "scale")) else torch.randn_like(value) * spread
        )
    return found


def scripted(network: nn.Module, path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(network), path)
    return str(path)


class Colours(nn.Module):
    """Mean and deviation of each colour."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(2)
        return torch.cat([flat.mean(2), flat.std(2)], 1)


# Layers --------------------------------------------------------------------------------------------------------------


def test_resize_reads_at_the_places_tensorflow_read_at():
    """A ramp shows the place that was read: j · W / new, held at the last pixel. (Half-pixel centres would give (j + ½) W / new − ½.)"""
    ramp = torch.arange(20.0).expand(1, 1, 7, 20)
    wide = resize_as_tensorflow(ramp, 7, 50)
    assert torch.allclose(wide[0, 0, 3], (torch.arange(50) * 20 / 50).clamp(max=19), atol=1e-4)
    tall = resize_as_tensorflow(ramp.mT, 50, 7)
    assert torch.allclose(tall, wide.mT)
    small = resize_as_tensorflow(ramp, 7, 5)  # no antialiasing: every fourth pixel as it is
    assert torch.allclose(small[0, 0, 0], torch.tensor([0.0, 4, 8, 12, 16]), atol=1e-4)
    assert resize_as_tensorflow(ramp, 7, 20) is ramp


@pytest.mark.parametrize(("size", "before", "after"), [(8, 2, 3), (9, 3, 3), (1, 3, 3)])
def test_same_padding_is_tensorflows(size, before, after):
    padded = pad_same(torch.ones(1, 1, size), (7,), 2)[0, 0]
    assert padded.shape == (size + before + after,)
    assert padded[:before].sum() == 0 == padded[size + before :].sum()
    assert F.max_pool1d(padded[None, None], 7, 2).shape[-1] == -(-size // 2)


def test_a_unit_is_convolution_norm_and_activation():
    unit = Unit(3, 4, (3, 3), 2, scaled=True, activation=F.relu6)
    weights = random_weights(unit)
    unit.load_state_dict(weights)
    x = torch.randn(2, 3, 9, 9) * 9
    norm = nn.BatchNorm2d(4, eps=1e-3).eval()
    norm.load_state_dict(
        {"weight": weights["scale"], "bias": weights["bias"], "running_mean": weights["mean"], "running_var": weights["var"],
         "num_batches_tracked": torch.tensor(1)}
    )  # fmt: skip
    assert torch.allclose(unit(x), F.relu6(norm(F.conv2d(x, weights["weight"], stride=2, padding=1))), atol=1e-5)
    assert SamePool3d((3, 3, 3), (2, 2, 2))(torch.ones(1, 1, 5, 4, 4)).shape == (1, 1, 3, 2, 2)


# Networks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inception_weights() -> dict[str, torch.Tensor]:
    return random_weights(inception.InceptionV3(classes=5))


def test_inception_gives_features_and_logits_without_bias(inception_weights, tmp_path):
    save_file(inception_weights, tmp_path / "net.safetensors")
    found = open_extractor(str(tmp_path / "net.safetensors"), CPU)
    pictures = torch.rand(2, 3, 16, 16)
    features = found.features(pictures)
    assert features.shape == (2, 2048)
    assert found.network.classes
    assert torch.allclose(found.logits(features), features @ inception_weights["fc"].T)
    bare = {name: value for name, value in inception_weights.items() if name != "fc"}
    assert not build_network(bare, tmp_path).classes  # type: ignore[operator]


def test_average_pools_leave_padding_out_and_the_last_pool_is_a_maximum():
    pools = [part for part in inception.InceptionV3().modules() if isinstance(part, nn.AvgPool2d | nn.MaxPool2d)]
    averages = [pool for pool in pools if isinstance(pool, nn.AvgPool2d)]
    assert len(averages) == 8
    assert not any(pool.count_include_pad for pool in averages)
    assert isinstance(pools[-1], nn.MaxPool2d)
    assert pools[-1].stride == 1


def test_inception_files_of_pytorch_fid_fit_and_torchvisions_are_refused(inception_weights, tmp_path):
    kinds = {"weight": "conv.weight", "bias": "bn.bias", "mean": "bn.running_mean", "var": "bn.running_var"}
    units = list(dict.fromkeys(name.rpartition(".")[0] for name in inception_weights if name != "fc"))
    assert len(units) == len(set(inception._torch_names())) == 94
    theirs = {"fc.weight": inception_weights["fc"], "fc.bias": torch.zeros(5)}
    for ours, name in zip(units, inception._torch_names(), strict=True):
        theirs |= {f"{name}.{kinds[kind]}": inception_weights[f"{ours}.{kind}"] for kind in kinds}
        theirs[f"{name}.bn.weight"] = torch.ones(len(inception_weights[f"{ours}.bias"]))
    torch.save(dict(sorted(theirs.items())), tmp_path / "pt.pth")
    found = inception.from_torch(tmp_path / "pt.pth")
    assert set(found) == set(inception_weights)
    assert all(torch.equal(found[name], value) for name, value in inception_weights.items())
    theirs["Mixed_5b.branch1x1.bn.weight"] = torch.full((64,), 0.5)
    torch.save(theirs, tmp_path / "tv.pth")
    with pytest.raises(InputError, match="torchvision's was trained anew"):
        inception.from_torch(tmp_path / "tv.pth")


def test_i3d_takes_clips_of_any_length_from_ten_on():
    network = i3d.I3D()
    network.load_state_dict(random_weights(network))
    with torch.no_grad():
        found = network(torch.rand(1, i3d.SHORTEST, 3, 20, 24))
    assert found.shape == (1, 400)
    assert torch.isfinite(found).all()


def test_efficientnet_sees_pictures_of_any_size():
    network = efficientnet.EfficientNetLite0()
    network.load_state_dict(random_weights(network))
    with torch.no_grad():
        features = network(torch.rand(2, 3, 40, 30))
    assert features.shape == (2, 1280)
    assert network.logits(features).shape == (2, 1000)


# Opening -------------------------------------------------------------------------------------------------------------


def test_a_file_of_ones_own_is_labelled_and_fed_in_chunks(tmp_path):
    found = open_extractor(scripted(Colours(), tmp_path / "colours.pt"), CPU)
    assert found.label.startswith("colours.pt ")
    assert len(found.label) == len("colours.pt ") + 12
    pictures = torch.rand(70, 3, 16, 16)
    features = found.features(pictures)
    assert torch.allclose(features, Colours()((pictures * 255).round() / 255), atol=1e-6)
    assert found.width(PICTURES) == 6


def test_real_and_made_pixels_are_seen_alike():
    """A made pixel between two steps looks like the file that would be written of it; gray is gray in all channels."""
    real = torch.randint(0, 256, (2, 3, 8, 8)) / 255
    assert torch.equal(to_rgb8(real), real)
    assert torch.equal(to_rgb8(real + 0.4 / 255), to_rgb8(real))
    assert torch.equal(to_rgb8(real + 2), torch.ones_like(real))
    gray = torch.rand(2, 1, 8, 8)
    assert torch.equal(to_rgb8(gray)[:, 0], to_rgb8(gray)[:, 2])
    assert to_rgb8(torch.rand(2, 5, 4, 8, 8)).shape == (2, 5, 3, 8, 8)


def test_features_ignore_autocast(tmp_path):
    found = open_extractor(scripted(Colours(), tmp_path / "colours.pt"), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = found.features(torch.rand(2, 3, 16, 16).bfloat16())
    assert features.dtype == torch.float32


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(WeightsMissing, match="kineo weights get inception-v3"):
        open_extractor("inception-v3", CPU)
    with pytest.raises(InputError, match="neither a file nor one of inception-v3"):
        open_extractor("inception-v4", CPU)
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(InputError, match="is not a TorchScript file"):
        open_extractor(str(tmp_path / "text.pt"), CPU)
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="does not hold the weights of inception-v3 or"):
        open_extractor(str(tmp_path / "other.safetensors"), CPU)


def test_a_wrong_kind_of_extractor_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path))
    with torch.device("meta"):
        names = i3d.I3D().state_dict()
    cache.store("i3d-kinetics400", {name: torch.zeros(value.shape) for name, value in names.items()})
    with pytest.raises(MetricSkipped, match="fid needs an extractor of images, and i3d-kinetics400 takes clips"):
        Extractors(CPU, MetricOptions(extractors={"fid": "i3d-kinetics400"})).open("fid", "inception-v3", "images")


def test_choices_are_for_one_metric_or_for_those_of_pictures():
    assert parse_choices(["a.pt", "fvd=b.pt", "clip-score=runs/x/clip"]) == {
        **dict.fromkeys(("fid", "rfid", "kid", "is"), "a.pt"),
        "fvd": "b.pt",
        "clip_score": "runs/x/clip",
    }
    with pytest.raises(InputError, match="loss has no extractor"):
        parse_choices(["loss=a.pt"])


def test_features_are_computed_once_for_all_metrics_and_padding_is_never_seen(tmp_path):
    found = open_extractor(scripted(Colours(), tmp_path / "colours.pt"), CPU)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = EvalBatch(real=torch.rand(2, 3, 3, 8, 8), generated=torch.rand(2, 3, 3, 8, 8), frame_mask=mask)
    first = batch.features("real", found)
    assert first.shape == (3, 6)
    assert batch.features("real", found) is first
    assert batch.features("generated", found).shape == (6, 6)
    assert torch.equal(batch.frames("real")[2], batch.real[1, 0])  # type: ignore[index]
