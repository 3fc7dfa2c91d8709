"""The seam between the evaluation runner and its metrics: what a metric is shown, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kineograph.core.batch import Shape
from kineograph.core.task import Mean, Task
from kineograph.data.config import DataConfig

if TYPE_CHECKING:
    from kineograph.evaluate.extractor.registry import Extractor, Extractors
    from kineograph.stage.load import StageLoader

Kind = Literal[
    "captions", "real", "generated", "reconstruction", "tokens", "losses", "clips"
]  # clips: of more than a frame


@dataclass
class EvalBatch:
    """One batch of what can be judged; only what some metric needs is filled in. Row i of each field belongs together."""

    captions: list[str] | None = None
    real: Tensor | None = None  # B T C H W, float in [0, 1]
    frame_mask: Tensor | None = None  # B T, bool: which frames of `real` are no padding
    generated: Tensor | None = None  # B T C H W: drawn for `captions`
    reconstruction: Tensor | None = None  # B T C H W: `real` through the codec
    tokens: Tensor | None = None  # B t h w: its codes
    spare: bool = False  # another process judges the same: metrics are not shown it
    losses: dict[str, Mean] | None = None  # what Task.validate tells about this batch
    seen: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # features by what was looked at and extractor

    def pictures(self, kind: Literal["real", "generated", "reconstruction"]) -> Tensor:
        """All frames that are no padding, side by side: F C H W. A clip counts as its frames."""
        pixels = getattr(self, kind)
        if kind != "generated" and self.frame_mask is not None:
            return pixels[self.frame_mask.to(pixels.device)]
        return pixels.flatten(0, 1)

    def features(self, kind: Literal["real", "generated", "reconstruction"], extractor: Extractor) -> Tensor:
        """Of `pictures`, F D; computed once for all metrics that look through the same extractor."""
        key = (kind, extractor.label)
        if key not in self.seen:
            self.seen[key] = extractor.features(self.pictures(kind))
        return self.seen[key]


@dataclass(frozen=True)
class EvalContext:
    """The trained stage that is judged."""

    stage: str
    task: Task
    data: DataConfig
    shape: Shape
    device: torch.device
    captions: list[str] | None  # some of the held-out ones, to see what they are like
    extractors: Extractors
    stages: StageLoader | None = None  # the run's other stages, where there is a run


@dataclass(frozen=True)
class Result:
    """Numbers, and labels that say what they rest on: how many samples, which extractor."""

    values: dict[str, float]
    labels: dict[str, Any] = field(default_factory=dict)


class MetricSkipped(Exception):
    """A metric cannot judge this subject: the reason, for a person. From `open`, or from `update` when it shows later."""


class WeightsMissing(MetricSkipped):
    """It could, once something is there that a command brings: extractor weights, a package."""


class Metric(Protocol):
    """Looks at evidence batch by batch, then answers. The module's METRIC has `open(subject)`, which may raise LeftOut."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Kind]]

    def update(self, evidence: EvalBatch) -> list[str] | None:
        """Take in a batch. May answer a remark a row, shown under the samples (✓, ✗ red 3 left)."""

    def compute(self) -> Result: ...
