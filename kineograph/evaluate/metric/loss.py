"""The held-out loss and its parts, as training's own validation computes them: fixed items, fixed noise, no dropout."""

from __future__ import annotations

from typing import ClassVar

import torch

from kineograph.core import distributed
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result


class HeldOutLoss:
    name: ClassVar[str] = "loss"
    needs: ClassVar[frozenset[Kind]] = frozenset({"losses"})

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.sums: dict[str, tuple[float, float]] = {}  # name → sum, count

    @classmethod
    def open(cls, subject: EvalContext) -> HeldOutLoss:
        return cls(subject.device)

    def update(self, evidence: EvalBatch) -> None:
        assert evidence.losses is not None
        for name, mean in evidence.losses.items():
            # About the batch as such, such as the codes that it uses: its mean says little about the set.
            if "/" not in name:
                total, count = self.sums.get(name, (0.0, 0.0))
                self.sums[name] = total + float(mean.sum), count + float(mean.count)

    def compute(self) -> Result:
        joined: dict[str, tuple[float, float]] = {}
        for told in distributed.data_all_gather_object(self.sums, self.device):
            for name, (total, count) in told.items():
                before = joined.get(name, (0.0, 0.0))
                joined[name] = before[0] + total, before[1] + count
        names = sorted(joined, key=lambda name: name != "loss")  # the loss before its parts
        return Result({name: _mean(*joined[name]) for name in names})


def _mean(total: float, count: float) -> float:
    return total / count if count else float("nan")


METRIC = HeldOutLoss
