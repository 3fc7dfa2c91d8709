"""The interface between the evaluation runner and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kineograph.core.batch import Shape
from kineograph.core.metric_options import MetricOptions
from kineograph.core.task import Mean, Task
from kineograph.data.open_source import DataConfig

if TYPE_CHECKING:
    from kineograph.evaluate.extractor.registry import Extractor, Extractors
    from kineograph.evaluate.saved_statistics import SavedStatistics
    from kineograph.stage.load import StageLoader

# "clips": there is more than one frame; "paired": row i is drawn for real item i
# "sound": generated clips have it
Kind = Literal["captions", "real", "generated", "reconstruction", "tokens", "losses", "clips", "paired", "sound"]
KIND_NAMES: dict[Kind, str] = {
    "captions": "captions", "real": "real items", "generated": "drawn samples", "reconstruction": "reconstructions",
    "tokens": "tokens", "losses": "losses", "clips": "clips of several frames", "paired": "a drawing of each real item",
    "sound": "sound",
}  # fmt: skip
PixelKind = Literal["real", "generated", "reconstruction"]
Side = Literal["real", "generated"]


@dataclass
class EvalBatch:
    """One batch for the metrics; only the fields that some metric needs are set. Row i of every field is the same item."""

    captions: list[str] | None = None
    real: Tensor | None = None  # B T C H W, float in [0, 1]
    frame_mask: Tensor | None = None  # B T, bool: False where a frame of `real` is padding
    generated: Tensor | None = None  # B T C H W: sampled for `captions`
    sound: Tensor | None = None  # B T S in [−1, 1]: of `generated`
    real_sound: Tensor | None = None  # B T S: of `real`
    reconstruction: Tensor | None = None  # B T C H W: `real` through the codec
    tokens: Tensor | None = None  # B t h w: its codes
    token_mask: Tensor | None = None  # B t, bool: False where latent frames are padding; None: no padding
    spare: bool = False  # another process has the same rows: metrics must not count them
    losses: dict[str, Mean] | None = None  # from Task.validate
    _features: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # by kind of pixels and extractor

    def clips(self, kind: PixelKind) -> Tensor:
        """B T C H W"""
        pixels: Tensor | None = getattr(self, kind)
        assert pixels is not None
        return pixels

    def mask(self, kind: PixelKind) -> Tensor:
        """B T, bool: False where a frame is padding. Generated clips have none."""
        if kind != "generated" and self.frame_mask is not None:
            return self.frame_mask
        pixels = self.clips(kind)
        return torch.ones(pixels.shape[:2], dtype=torch.bool, device=pixels.device)

    def frames(self, kind: PixelKind) -> Tensor:
        """All frames but padding, F C H W."""
        pixels = self.clips(kind)
        return pixels[self.mask(kind).to(pixels.device)]

    def frame_pairs(self, fake: Literal["generated", "reconstruction"]) -> tuple[Tensor, Tensor]:
        """Real frames and those made for them, F C H W each, without padding; a sample of another length counts as far as it goes."""
        real, made = self.clips("real"), self.clips(fake)
        if real.shape[2:] != made.shape[2:]:
            raise MetricSkipped(
                f"pictures of {_size(made)} cannot be compared with real ones of {_size(real)} pixel by pixel"
            )
        length = min(real.shape[1], made.shape[1])
        mask = self.mask("real")[:, :length].to(real.device)
        return real[:, :length][mask], made[:, :length].to(real.device)[mask]

    def features(self, kind: PixelKind, extractor: Extractor) -> Tensor:
        """Features of `frames`, F D, computed once for all metrics that share the extractor."""
        key = (kind, id(extractor))
        if key not in self._features:
            self._features[key] = extractor.features(self.frames(kind))
        return self._features[key]


def _size(pixels: Tensor) -> str:
    """`64 × 64 × 3`"""
    *_, channels, height, width = pixels.shape
    return f"{height} × {width} × {channels}"


@dataclass(frozen=True)
class EvalContext:
    """The trained stage under evaluation, or a set of files without one."""

    stage: str
    task: Task | None
    data: DataConfig | None
    shape: Shape
    device: torch.device
    captions: list[str] | None  # a few held-out captions, to check their form
    extractors: Extractors
    stages: StageLoader | None = None  # the run's other stages
    reference: bool = False  # distributions are compared with another set than the held-out items
    start: str | None = None  # what samples start from, where it is not captions and noise alone

    @property
    def options(self) -> MetricOptions:
        return self.extractors.options


@dataclass(frozen=True)
class Result:
    """A metric's values, and labels that say how they were computed: sample count, extractor …"""

    values: dict[str, float]
    labels: dict[str, Any] = field(default_factory=dict)


class MetricSkipped(Exception):
    """A metric does not apply to this stage, for the reason given. Raised by `open`, or by `update` when it shows later."""


class WeightsMissing(MetricSkipped):
    """A metric needs weights or a package; the reason names the command that installs them."""


class Metric(Protocol):
    """Accumulates batches, then computes. The module's METRIC has `open(context)`, which may raise MetricSkipped."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Kind]]

    def update(self, batch: EvalBatch) -> list[str] | None:
        """Add a batch. May return a remark for every row, shown under the samples (✓, ✗ red 3 left)."""

    def compute(self) -> Result: ...


@runtime_checkable
class FeatureMetric(Protocol):
    """A metric over the features of a network."""

    label: str  # the network, and the first digits of its weights' SHA-256
    needs: ClassVar[frozenset[Kind]]


@runtime_checkable
class DistributionMetric(Protocol):
    """Compares the features of two sets. With `EvalContext.reference`, `update` ignores real items, and `add` or `load` gives them."""

    def add(self, batch: EvalBatch, side: Side) -> None: ...

    def load(self, side: Side, saved: SavedStatistics) -> None:
        """Take a side from saved statistics; MetricSkipped where they are of other features."""

    def save(self, side: Side, saved: SavedStatistics) -> None:
        """Put the features of a side into `saved`. Collective."""
