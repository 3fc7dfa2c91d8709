"""Findings about a stage that goes wrong, and the limits that a Task sets for its own numbers (docs/health.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kineograph.core.text_file import iterate_lines, parse_json

Severity = Literal["warning", "fatal"]


@dataclass(frozen=True)
class Finding:
    """One sign that a stage goes wrong."""

    name: str
    severity: Severity
    evidence: str
    """The number and its limit, in words."""
    meaning: str
    remedy: str
    value: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}. {self.meaning} {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        numbers = {"value": _finite(self.value), "limit": _finite(self.limit)}
        return asdict(self) | numbers

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Finding:
        """Raises ValueError, KeyError or TypeError for what `to_json` does not write: a run may be a stranger's."""
        values = {field.name: tree[field.name] for field in fields(Finding)}
        if not all(isinstance(values[name], str) for name in ("name", "evidence", "meaning", "remedy")):
            raise TypeError("a text of a finding is no string")
        if values["severity"] not in get_args(Severity):
            raise ValueError(f"severity={values['severity']!r}: warning or fatal")
        return Finding(**values)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Limit:
    """A bound that a number of a healthy stage keeps.

    Without `logs` the number is one of validation, or `train/NAME`, the mean of the last tenth of the logged steps, which is known at
    the end of the stage. Validation beyond the limit is a warning from the middle of the stage on and has its `severity` at the end,
    since a young stage may still learn. With `logs`, so many logged training steps in a row count.
    """

    name: str
    metric: str
    meaning: str
    remedy: str
    at_least: float | None = None
    at_most: float | None = None
    share_of: str | None = None
    """Another number that the metric is divided by first."""
    severity: Severity = "fatal"
    logs: int = 0
    always: bool = False
    """Whether untrained weights keep the limit too: then it is checked with `severity` from the first validation on."""

    def check(self, values: Mapping[str, Any]) -> Finding | None:
        """The finding, if `values` are beyond the limit. A number that is missing or not finite is not judged."""
        value, words = to_float(values.get(self.metric)), ""
        if self.share_of is not None:
            whole = to_float(values.get(self.share_of))
            words = f" of {self.share_of} ({whole:.4g})"
            value = value / whole if whole > 0 else math.nan
        bound = None
        if self.at_least is not None and value < self.at_least:
            bound, limit = "at least", self.at_least
        elif self.at_most is not None and value > self.at_most:
            bound, limit = "at most", self.at_most
        if bound is None or not math.isfinite(value):
            return None
        evidence = f"{self.metric} is {value:.4g}{words}, and {bound} {limit:g} is healthy"
        return Finding(self.name, self.severity, evidence, self.meaning, self.remedy, value, limit)

    def needs_validation(self) -> bool:
        """Whether one of the numbers is a validation metric."""
        names = [self.metric] if self.share_of is None else [self.metric, self.share_of]
        return not self.logs and any(not name.startswith("train/") for name in names)


def to_float(value: Any) -> float:
    """Null in metrics.jsonl is a number that was not finite."""
    return float(value) if isinstance(value, int | float) else math.nan


UNTRAINED_LOSS = "train/untrained_loss"
"""The first logged training loss of a stage that starts from random weights."""

LOSS_FALLS = Limit(
    name="nothing_learned",
    metric="train/loss",
    share_of=UNTRAINED_LOSS,
    at_most=0.97,
    meaning="The training loss ended where untrained weights begin, or above.",
    remedy="Lower train.lr (it may be far too high), lengthen train.warmup, train for more steps, or look at the data.",
)
"""For tasks whose loss compares with that of untrained weights: not for GANs, critics or fine-tuning."""


def read_findings(metrics: Path) -> Iterator[tuple[str, int, Finding]]:
    """Stage, step and finding of every finding in a metrics.jsonl, in order."""
    if not metrics.is_file():  # a pipe would block
        return
    try:
        file = open(metrics, "rb")  # noqa: SIM115  closed below
    except OSError:
        return
    with file:
        for line in iterate_lines(file):
            if b'"finding"' not in line:  # most lines: not worth parsing
                continue
            try:
                record = parse_json(line)
                yield str(record["stage"]), int(record["step"]), Finding.from_json(record["finding"])
            except (ValueError, KeyError, TypeError, OverflowError):  # cut off by a kill, or a stranger's
                continue
