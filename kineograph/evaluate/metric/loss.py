"""The held-out loss and its terms, as training validates: fixed items, fixed noise, no dropout."""

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
    def open(cls, context: EvalContext) -> HeldOutLoss:
        return cls(context.device)

    def update(self, batch: EvalBatch) -> None:
        assert batch.losses is not None
        for name, mean in batch.losses.items():
            # "group/name" describes a batch, such as the codes that it uses: the mean says little about the set.
            # "loss/…" is the loss of a range of noise levels or mask shares.
            if "/" not in name or name.startswith("loss/"):
                _add(self.sums, name, float(mean.sum), float(mean.count))

    def compute(self) -> Result:
        totals: dict[str, tuple[float, float]] = {}
        for sums in distributed.data_all_gather_object(self.sums, self.device):
            for name, (total, count) in sums.items():
                _add(totals, name, total, count)
        names = sorted(totals, key=lambda name: name != "loss")  # the loss before its terms
        means = {name: totals[name][0] / totals[name][1] if totals[name][1] else float("nan") for name in names}
        # No sample may fall into a range of few samples.
        means = {name: value for name, value in means.items() if value == value or not name.startswith("loss/")}
        return Result(means)


def _add(sums: dict[str, tuple[float, float]], name: str, total: float, count: float) -> None:
    before = sums.get(name, (0.0, 0.0))
    sums[name] = before[0] + total, before[1] + count


METRIC = HeldOutLoss
