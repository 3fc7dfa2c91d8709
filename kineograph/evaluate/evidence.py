"""The seam between the evaluation runner and its metrics: what a metric is shown, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kineograph.core.batch import Shape
from kineograph.core.task import Mean, Task
from kineograph.data.config import DataConfig

Kind = Literal["captions", "real", "generated", "reconstruction", "tokens", "losses"]


@dataclass
class Evidence:
    """One batch of what can be judged; only what some metric needs is filled in. Row i of each field belongs together."""

    captions: list[str] | None = None
    real: Tensor | None = None  # B T C H W, float in [0, 1]
    frame_mask: Tensor | None = None  # B T, bool: which frames of `real` are no padding
    generated: Tensor | None = None  # B T C H W: drawn for `captions`
    reconstruction: Tensor | None = None  # B T C H W: `real` through the codec
    tokens: Tensor | None = None  # B t h w: its codes
    losses: dict[str, Mean] | None = None  # what Task.validate tells about this batch


@dataclass(frozen=True)
class Subject:
    """The trained stage that is judged."""

    stage: str
    task: Task
    data: DataConfig
    shape: Shape
    device: torch.device
    captions: list[str] | None  # some of the held-out ones, to see what they are like


@dataclass(frozen=True)
class Result:
    """Numbers, and labels that say what they rest on: how many samples, which extractor."""

    values: dict[str, float]
    labels: dict[str, Any] = field(default_factory=dict)


class LeftOut(Exception):
    """A metric cannot judge this subject: the reason, for a person. From `open`, or from `update` when it shows later."""


class Metric(Protocol):
    """Looks at evidence batch by batch, then answers. The module's METRIC has `open(subject)`, which may raise LeftOut."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Kind]]

    def update(self, evidence: Evidence) -> list[str] | None:
        """Take in a batch. May answer a remark a row, shown under the samples (✓, ✗ red 3 left)."""

    def compute(self) -> Result: ...
