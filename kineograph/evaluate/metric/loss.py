"""The held-out loss and its parts, as training's own validation computes them: fixed items, fixed noise, no dropout."""

from __future__ import annotations

from typing import ClassVar

from kineograph.evaluate.evidence import Evidence, Kind, Result, Subject


class HeldOutLoss:
    name: ClassVar[str] = "loss"
    needs: ClassVar[frozenset[Kind]] = frozenset({"losses"})

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    @classmethod
    def open(cls, subject: Subject) -> HeldOutLoss:
        return cls()

    def update(self, evidence: Evidence) -> None:
        assert evidence.losses is not None
        for name, mean in evidence.losses.items():
            if (
                "/" in name
            ):  # about the batch as such, such as the codes that it uses: its mean says little about the set
                continue
            self.sums[name] = self.sums.get(name, 0.0) + float(mean.sum)
            self.counts[name] = self.counts.get(name, 0.0) + float(mean.count)

    def compute(self) -> Result:
        names = sorted(self.sums, key=lambda name: name != "loss")  # the loss before its parts
        return Result(
            {name: self.sums[name] / self.counts[name] if self.counts[name] else float("nan") for name in names}
        )


METRIC = HeldOutLoss
