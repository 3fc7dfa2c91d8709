"""From a name or a file to an extractor: a frozen network, fed in chunks, whose label says which weights they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kineograph.core import weights as cache
from kineograph.core.batch import Shape
from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import sha256_of
from kineograph.core.task import freeze
from kineograph.evaluate.extractor import efficientnet, i3d, inception
from kineograph.evaluate.metric_api import MetricSkipped, WeightsMissing

Takes = Literal["pictures", "clips"]
NETWORKS: dict[str, Any] = {"inception-v3": inception, "i3d-kinetics400": i3d, "efficientnet-lite0": efficientnet}
OF_PICTURES = ("fid", "rfid", "kid", "is")  # metrics that a bare --extractor is for
NAMED_FOR = (*OF_PICTURES, "fvd", "lpips", "clip_score")


class Extractor:
    """Pixels in [0, 1] → features, float32 throughout: rounding of bfloat16 or TF32 would move the scores."""

    def __init__(self, network: nn.Module, label: str, device: torch.device, clips: bool = False) -> None:
        if device.type == "cpu" and getattr(network, "takes", None) == "pictures":  # a third faster there
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network = freeze(network.to(device))
        self.label = label
        self.device = device
        self.clips = clips
        self.looked: Callable[[str, int, int], None] = lambda label, done, total: None  # hears how far `features` is

    @property
    def takes(self) -> Takes | None:
        """None: whatever it is given, by its file's owner's word."""
        return getattr(self.network, "takes", None)

    @property
    def has_logits(self) -> bool:
        return bool(getattr(self.network, "classes", True))

    def width(self, shape: Shape) -> int:
        """Channels of its features; one of a user's own is asked with an empty picture or clip of this shape."""
        known = getattr(self.network, "width", None)
        if known is not None:
            return int(known)
        sizes = (shape.channels, shape.height, shape.width)
        return self.features(torch.zeros(1, *([shape.frames] if self.clips else []), *sizes)).shape[1]

    def features(self, pixels: Tensor) -> Tensor:
        """F C H W, or B T C H W for networks that take clips → N D"""
        found = []
        with _looking(self.device):
            for part in pixels.split(getattr(self.network, "chunk", 32)):
                seen = self.network(to_rgb8(part.to(self.device)))
                found.append(seen.flatten(2).mean(2) if seen.ndim > 2 else seen)
                self.looked(self.label, sum(map(len, found)), len(pixels))
        return torch.cat(found).float()

    def logits(self, features: Tensor) -> Tensor:
        """Of a file of one's own the output is taken for logits."""
        with _looking(self.device):
            return self.network.logits(features) if hasattr(self.network, "logits") else features  # type: ignore[operator]


def to_rgb8(pixels: Tensor) -> Tensor:
    """What a viewer gets, of real and of made pixels alike: 8 bits a channel and three channels (gray is repeated, of more the
    first three are shown), at the size that they have; every resize is the network's own."""
    pixels = quantize_to_8bit(pixels)
    channels = pixels.shape[-3]
    if channels < 3:
        return pixels[..., :1, :, :].expand(*pixels.shape[:-3], 3, *pixels.shape[-2:])
    return pixels[..., :3, :, :]


def quantize_to_8bit(pixels: Tensor) -> Tensor:
    """To the nearest of 256 steps, as a file on disk holds them: real pixels come from such files."""
    return (pixels.float().clamp(0, 1) * 255).round() / 255


@contextmanager
def _looking(device: torch.device):  # type: ignore[no-untyped-def]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        yield


class Extractors:
    """The extractors of an evaluation, each opened once. `chosen`: metric → name or file, instead of the metric's own default."""

    def __init__(self, device: torch.device, chosen: Mapping[str, str] | None = None) -> None:
        self.device = device
        self.chosen = dict(chosen or {})
        self.looked: Callable[[str, int, int], None] | None = None  # hears how far any of them is with a batch
        self._open: dict[str, Extractor] = {}

    def choice(self, metric: str, default: str) -> str:
        return self.chosen.get(metric, default)

    def open(self, metric: str, default: str, takes: Takes) -> Extractor:
        value = self.choice(metric, default)
        if value not in self._open:
            self._open[value] = open_extractor(value, self.device, takes == "clips")
            self._open[value].looked = self._tell
        found = self._open[value]
        if found.takes not in (takes, None):
            raise MetricSkipped(
                f"{metric} looks at {takes}, and {value} is for {found.takes}: name another --extractor"
            )
        return found

    def _tell(self, label: str, done: int, total: int) -> None:
        if self.looked is not None:
            self.looked(label, done, total)


def open_extractor(value: str, device: torch.device, clips: bool = False) -> Extractor:
    """A name (inception-v3 …), a safetensors file of one of these networks, or any TorchScript file."""
    if value in NETWORKS:
        try:
            found = cache.find(value)
        except cache.NotThere as error:
            raise WeightsMissing(str(error)) from None
        return Extractor(build_network(cache.load(found.path), found.path, value), f"{value} {found.short}", device)
    path = Path(value)
    if not path.is_file():
        raise InputError(f"--extractor {value} is neither a file nor one of {', '.join(NETWORKS)}")
    label = f"{path.name} {sha256_of(path)[:12]}"
    if path.suffix == ".safetensors":
        return Extractor(build_network(cache.load(path), path), label, device)
    try:
        # Its program runs, in TorchScript's interpreter: it computes tensors and reaches nothing else. No pickle is loaded in Python.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            network = torch.jit.load(path, map_location="cpu")
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"--extractor {path} is no TorchScript file ({reason}): save the network with torch.jit.save, or give the "
            f"safetensors of one of {', '.join(NETWORKS)}"
        ) from None
    return Extractor(_Foreign(network), label, device, clips)


class _Foreign(nn.Module):
    """Scripted modules cannot be told to ignore `.train()`, so one is held."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.held = [network.eval()]

    def _apply(self, fn: Any, recurse: bool = True) -> _Foreign:
        self.held[0]._apply(fn)
        return self

    def forward(self, pixels: Tensor) -> Tensor:
        return self.held[0](pixels)


def build_network(weights: dict[str, Tensor], path: Path, name: str | None = None) -> nn.Module:
    """The network with exactly these weights: `name`, or the one that they fit."""
    for module in [NETWORKS[name]] if name else NETWORKS.values():
        with torch.device("meta"):
            network = module.build(weights)
        expected = {key: value.shape for key, value in network.state_dict().items()}
        if expected == {key: value.shape for key, value in weights.items()}:
            network.load_state_dict(weights, assign=True)
            return network
    raise InputError(f"{path} does not hold the weights of {name or ' or '.join(NETWORKS)}: names or shapes differ")


def parse_choices(words: list[str]) -> dict[str, str]:
    """`--extractor fvd=FILE`, or a name or file alone for the metrics of pictures."""
    chosen: dict[str, str] = {}
    for word in words:
        metric, equals, value = word.partition("=")
        metric = metric.replace("-", "_")
        if equals and metric in NAMED_FOR:
            chosen[metric] = value
        elif equals and not Path(word).exists():
            raise InputError(f"--extractor {word}: {metric} looks through none; use one of {', '.join(NAMED_FOR)}")
        else:
            chosen |= dict.fromkeys(OF_PICTURES, word)
    return chosen
