"""Feature extractors by name or file: frozen networks, run in chunks, labelled with the hash of their weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kineograph.core import weight_cache as cache
from kineograph.core.batch import Shape
from kineograph.core.errors import InputError
from kineograph.core.metric_options import EXTRACTOR_METRICS, MetricOptions
from kineograph.core.safe_unpickle import sha256_of
from kineograph.core.task import freeze
from kineograph.core.trust import require_trusted_program
from kineograph.evaluate.extractor import efficientnet, i3d, inception
from kineograph.evaluate.extractor.layers import FeatureNetwork, Takes
from kineograph.evaluate.metric_api import MetricSkipped, WeightsMissing

NETWORKS: dict[str, Any] = {"inception-v3": inception, "i3d-kinetics400": i3d, "efficientnet-lite0": efficientnet}
IMAGE_METRICS = ("fid", "rfid", "kid", "is")  # --extractor without a metric's name is for these
# The weights that a metric runs by default: the first of these that is installed.
DEFAULT_WEIGHTS = {
    **dict.fromkeys(("fid", "rfid", "kid"), ("inception-v3",)),
    "is": ("inception-v3", "efficientnet-lite0"),
    "fvd": ("i3d-kinetics400",),
    "lpips": ("lpips-vgg16",),
    "paired_lpips": ("lpips-vgg16",),
}


class Extractor:
    """Pixels in [0, 1] → features, all in float32: bfloat16 or TF32 would change the scores."""

    def __init__(
        self, network: FeatureNetwork, label: str, device: torch.device, report: Callable[[str], None] = lambda _: None
    ) -> None:
        if device.type == "cpu" and network.takes == "images":  # a third faster there
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        freeze(network.to(device))
        self.network, self.label, self.device, self.report = network, label, device, report

    @property
    def protocol(self) -> dict[str, Any]:
        """Labels of its numbers: the network, and how it resizes."""
        network = self.network
        labels: dict[str, Any] = {"extractor": self.label}
        if network.mode is not None:
            labels["mode"] = network.mode
        labels["resize"] = network.resize
        if network.depths and network.width != network.depths[-1]:
            labels["features"] = network.width
        return labels

    def width(self, shape: Shape, clips: bool = False) -> int:
        """Channels of the features. A user's own network is run on an empty image or clip of this shape."""
        if self.network.width is not None:
            return self.network.width
        size = (*([shape.frames] if clips else []), shape.channels, shape.height, shape.width)
        return self.features(torch.zeros(1, *size)).shape[1]

    def features(self, pixels: Tensor) -> Tensor:
        """F C H W, or B T C H W for networks of clips → N D"""
        features: list[Tensor] = []
        done = 0
        with _float32_inference(self.device):
            for chunk in pixels.split(self.network.chunk):
                output = self.network(to_rgb8(chunk.to(self.device)))
                features.append(output.flatten(2).mean(2) if output.ndim > 2 else output)
                done += len(chunk)
                self.report(f"{self.label.split()[0]} {done:,} of {len(pixels):,}")
        return torch.cat(features).float()

    def logits(self, features: Tensor) -> Tensor:
        with _float32_inference(self.device):
            return self.network.logits(features)


def to_rgb8(pixels: Tensor) -> Tensor:
    """Real and generated pixels as a viewer sees them: 8 bits, three channels (gray is repeated, the first three of more)."""
    pixels = quantize_to_8bit(pixels)
    if pixels.shape[-3] < 3:
        return pixels[..., :1, :, :].expand(*pixels.shape[:-3], 3, *pixels.shape[-2:])
    return pixels[..., :3, :, :]


def quantize_to_8bit(pixels: Tensor) -> Tensor:
    """Round to 256 levels, as in image files: real pixels come from such files."""
    return (pixels.float().clamp(0, 1) * 255).round() / 255


@contextmanager
def _float32_inference(device: torch.device) -> Iterator[None]:
    tf32_off = torch.backends.cudnn.flags(enabled=True, allow_tf32=False) if device.type == "cuda" else nullcontext()
    with torch.no_grad(), torch.autocast(device.type, enabled=False), tf32_off:
        yield


class Extractors:
    """The extractors of an evaluation, each opened once. `options.extractors` (metric → name or file) overrides a metric's default."""

    def __init__(self, device: torch.device, options: MetricOptions | None = None) -> None:
        self.device = device
        self.options = options or MetricOptions()
        self.on_progress: Callable[[str], None] = lambda text: None
        self._open: dict[tuple[str, str | None, int | None], Extractor] = {}

    @property
    def chosen(self) -> Mapping[str, str]:
        return self.options.extractors

    def choice(self, metric: str, default: str) -> str:
        return self.chosen.get(metric, default)

    def open(self, metric: str, default: str, takes: Takes) -> Extractor:
        value, options = self.choice(metric, default), self.options
        mode: str | None = None
        depth: int | None = None
        if metric in ("fid", "rfid", "kid"):
            mode, depth = options.fid_mode, options.fid_features
        elif metric == "fvd":
            mode = options.fvd_mode
        if (value, mode, depth) not in self._open:
            extractor = open_extractor(value, self.device, lambda text: self.on_progress(text))
            _set_protocol(extractor.network, value, mode, depth)
            self._open[value, mode, depth] = extractor
        extractor = self._open[value, mode, depth]
        if extractor.network.takes not in (takes, None):
            raise MetricSkipped(
                f"{metric} needs an extractor of {takes}, and {value} takes {extractor.network.takes}: "
                "choose another --extractor"
            )
        return extractor


def _set_protocol(network: FeatureNetwork, value: str, mode: str | None, depth: int | None) -> None:
    """Choose how the network resizes and which layer's features it gives; None: its own way."""
    if mode is not None:
        if mode not in network.modes:
            offer = f"it offers {' or '.join(network.modes)}" if network.modes else "it resizes in its own way only"
            raise MetricSkipped(f"mode {mode} does not apply to {value}: {offer}; leave the mode out")
        network.set_mode(mode)
    if depth is not None:
        if depth not in network.depths:
            raise MetricSkipped(
                f"features of width {depth} are Inception's, and not of {value}: leave fid_features out"
            )
        network.set_depth(depth)


def open_extractor(value: str, device: torch.device, report: Callable[[str], None] = lambda _: None) -> Extractor:
    """Open a name (inception-v3 …), a safetensors file of one of these networks, or any TorchScript file."""
    if value in NETWORKS:
        try:
            file = cache.find(value)
        except cache.WeightsNotFetched as error:
            raise WeightsMissing(str(error)) from None
        network = build_network(cache.load(file.path), file.path, value)
        return Extractor(network, f"{value} {file.short}", device, report)
    path = Path(value)
    if not os.path.isfile(path):
        raise InputError(f"--extractor {value} is neither a file nor one of {', '.join(NETWORKS)}")
    network = build_network(cache.load(path), path) if path.suffix == ".safetensors" else _TorchScript(path)
    return Extractor(network, f"{path.name} {sha256_of(path)[:12]}", device, report)


class _TorchScript(FeatureNetwork):
    """A user's own network. TorchScript's interpreter runs it: no pickle is loaded in Python.

    It is no submodule, since scripted modules cannot be frozen like others.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        require_trusted_program(f"--extractor {path} is TorchScript")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._scripted = [torch.jit.load(path, map_location="cpu").eval()]
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"--extractor {path} is not a TorchScript file ({reason}): save the network with torch.jit.save, or give "
                f"the safetensors file of one of {', '.join(NETWORKS)}"
            ) from None

    def _apply(self, fn: Any, recurse: bool = True) -> _TorchScript:
        self._scripted[0]._apply(fn)
        return self

    def forward(self, pixels: Tensor) -> Tensor:
        """A program of the user's that fails loses its metric, not the others."""
        try:
            return self._scripted[0](pixels)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise MetricSkipped(f"the extractor failed on pixels of shape {tuple(pixels.shape)}: {reason}") from None


def build_network(weights: dict[str, Tensor], path: Path, name: str | None = None) -> FeatureNetwork:
    """Build the network `name`, or the one whose names and shapes these weights have."""
    for module in [NETWORKS[name]] if name else NETWORKS.values():
        with torch.device("meta"):
            network = module.build(weights)
        expected = {key: value.shape for key, value in network.state_dict().items()}
        if expected == {key: value.shape for key, value in weights.items()}:
            network.load_state_dict(weights, assign=True)
            return network
    raise InputError(
        f"{path} does not hold the weights of {name or ' or '.join(NETWORKS)}: names or shapes of tensors differ"
    )


def parse_choices(options: list[str]) -> dict[str, str]:
    """Parse `--extractor fvd=FILE`, or a name or file alone for the metrics of images. → metric → name or file"""
    chosen: dict[str, str] = {}
    for option in options:
        metric, equals, value = option.partition("=")
        metric = metric.replace("-", "_")
        if equals and metric in EXTRACTOR_METRICS:
            chosen[metric] = value
        elif equals and not os.path.exists(option):
            raise InputError(
                f"--extractor {option}: {metric} has no extractor; use one of {', '.join(EXTRACTOR_METRICS)}"
            )
        else:
            chosen |= dict.fromkeys(IMAGE_METRICS, option)
    return chosen
