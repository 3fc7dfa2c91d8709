"""The interface between the evaluation runner and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kineograph.core.batch import Shape
from kineograph.core.task import Mean, Task
from kineograph.data.open_source import DataConfig

if TYPE_CHECKING:
    from kineograph.evaluate.extractor.registry import Extractor, Extractors
    from kineograph.stage.load import StageLoader

# "clips" means that there is more than one frame
Kind = Literal["captions", "real", "generated", "reconstruction", "tokens", "losses", "clips"]
PixelKind = Literal["real", "generated", "reconstruction"]


@dataclass
class EvalBatch:
    """One batch for the metrics; only the fields that some metric needs are set. Row i of every field is the same item."""

    captions: list[str] | None = None
    real: Tensor | None = None  # B T C H W, float in [0, 1]
    frame_mask: Tensor | None = None  # B T, bool: False where a frame of `real` is padding
    generated: Tensor | None = None  # B T C H W: sampled for `captions`
    reconstruction: Tensor | None = None  # B T C H W: `real` through the codec
    tokens: Tensor | None = None  # B t h w: its codes
    token_mask: Tensor | None = None  # B t, bool: False where latent frames are padding; None: no padding
    spare: bool = False  # another process has the same rows: metrics must not count them
    losses: dict[str, Mean] | None = None  # from Task.validate
    _features: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # by kind of pixels and extractor

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

    def features(self, kind: PixelKind, extractor: Extractor) -> Tensor:
        """Features of `frames`, F D, computed once for all metrics that share the extractor."""
        key = (kind, extractor.label)
        if key not in self._features:
            self._features[key] = extractor.features(self.frames(kind))
        return self._features[key]


@dataclass(frozen=True)
class EvalContext:
    """The trained stage under evaluation."""

    stage: str
    task: Task
    data: DataConfig
    shape: Shape
    device: torch.device
    captions: list[str] | None  # a few held-out captions, to check their form
    extractors: Extractors
    stages: StageLoader | None = None  # the run's other stages


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
