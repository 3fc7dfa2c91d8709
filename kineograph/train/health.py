"""Detects stages that go wrong, from the numbers that are logged anyway. docs/health.md lists every finding.

`StageHealth` reads the records of metrics.jsonl and knows nothing else, so that a resumed stage reads the file again and
stands where it was. Thresholds are far from anything that a stage that learns has shown; each says why.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from kineograph.core.health import UNTRAINED_LOSS, Finding, Limit, Severity, to_float
from kineograph.train.config import PlayerConfig

Record = Mapping[str, Any]

YOUNG_STEPS = 100  # a shorter stage is a trial: what it has learned is not judged
YOUNG_PATH = 0.05  # of lr · steps: AdamW moves a weight by about lr a step, and weights are about 1/√width
MIN_PATH = 1e-5  # below, no weight has moved by more than rounding
ZERO_LOGS = 10  # logged steps in a row with a loss or gradient of exactly 0
SKIP_WINDOW = 100  # steps over which skipped updates are counted
SKIP_FATAL, SKIP_WARNING = 0.4, 0.01  # shares of updates; fp16 skips 1 in 2,000 when its scale doubles
SPIKE_LOGS = 50  # logged steps that a spike is compared with
SPIKE_RISE, SPIKE_TOP = 10.0, 3.0  # over their median and over their highest: small batches of a diffusion vary tenfold
DIVERGED_LOGS, DIVERGED_RISE = 3, 10.0  # logged steps in a row this far above the loss of untrained weights
OVERFIT_RISES, OVERFIT_RISE = 3, 1.25  # validations in a row that rise, and how far above the best the last must be

# Name → severity, what it means, what helps.
SIGNS: dict[str, tuple[Severity, str, str]] = {
    "no_learning_rate": (
        "fatal",
        "The weights stay what they are, random or not.",
        "Raise the learning rate; 1e-4 to 2e-3 is usual.",
    ),
    "no_gradient": (
        "fatal",
        "Nothing trains this part: its targets have no information, or its loss is saturated.",
        "Look at the data and captions; if other stages encode the data, look at those.",
    ),
    "zero_loss": (
        "warning",
        "There is nothing to learn: the targets are all the same, or memorised.",
        "Look at the data; if a codec encodes them, look at its reconstructions.",
    ),
    "skipped_updates": (
        "fatal",
        "The stage trains on a part of its data only, or diverges.",
        "Lower train.lr, lengthen train.warmup, set train.precision=bf16 or fp32, or look for broken items in the data.",
    ),
    "loss_spike": (
        "warning",
        "Training jumped out of what it had learned; it may recover.",
        "Lower train.lr or train.clip, or look at the items around this step.",
    ),
    "diverged": (
        "warning",
        "Training has diverged; what it learns afterwards is poor even if the loss comes back.",
        "Lower train.lr, lengthen train.warmup, or set train.clip.",
    ),
    "overfitting": (
        "warning",
        "The stage memorises its data.",
        "Add data or augmentation, raise dropout or train.weight_decay, make the network smaller or train for fewer steps; "
        "`--checkpoint best` uses the weights with the lowest validation loss.",
    ),
    "nonfinite_weights": (
        "fatal",
        "The stage cannot draw or encode anything.",
        "Lower train.lr, set train.precision=bf16 or fp32, and train from an earlier checkpoint or again.",
    ),
    "nonfinite_loss": (
        "fatal",
        "The weights, the data or the arithmetic hold nan or inf.",
        "Lower train.lr, set train.precision=bf16 or fp32, or look for broken items in the data.",
    ),
    "blank_data": (
        "fatal",
        "There is nothing to learn.",
        "Look at a few items of the data (kineo data check), or at the codec that encoded them.",
    ),
    "identical_data": ("warning", "The stage memorises one item.", "Look at the data and its splits."),
    "one_caption": (
        "warning",
        "Captions cannot steer what this stage draws.",
        "Give items their own captions, or set text.kind=none to train without.",
    ),
}


def make_finding(
    name: str, evidence: str, value: float | None = None, limit: float | None = None, severity: Severity | None = None
) -> Finding:
    """One of SIGNS with its evidence; `severity`: another one than usual."""
    usual, meaning, remedy = SIGNS[name]
    return Finding(name, severity or usual, evidence, meaning, remedy, value, limit)


def _describe_loss(split: str, step: int) -> str:
    return f"the {split} loss of step {step:,} is not a finite number"


@dataclass
class StageHealth:
    """The findings of one stage."""

    steps: int
    players: Mapping[str, PlayerConfig]
    limits: Sequence[Limit] = ()
    starts_random: bool = True  # False: from trained weights, whose loss need not fall
    batch_size: int = 32
    schedule_steps: int | None = None  # with train.minutes: of the recipe; `steps` is then an estimate until the end
    scales_loss: bool = False  # fp16: the first updates are skipped until the loss scale fits
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _losses: list[tuple[int, float]] = field(default_factory=list)  # logged training losses, nan where not finite
    _logged: dict[str, list[float]] = field(default_factory=dict)  # other logged numbers that have a limit
    _skips: deque[tuple[int, float]] = field(
        default_factory=lambda: deque([(0, 0.0)])
    )  # step, updates skipped until it
    _early_skips: float = 0.0  # of the first steps
    _zeros: dict[str, int] = field(default_factory=dict)  # number → logged steps in a row in which it was exactly 0
    _beyond: dict[str, int] = field(default_factory=dict)  # limit → logged steps in a row beyond it
    _validations: list[tuple[int, Record]] = field(default_factory=list)

    # what happens ----------------------------------------------------------------------------------------------------

    def replay(self, records: Iterable[Record]) -> None:
        """Read what an earlier process of this stage logged."""
        for record in records:
            if isinstance(finding := record.get("finding"), dict):
                self._reported.add((str(finding.get("name")), str(finding.get("severity"))))
            else:
                self.observe(record)

    def is_new(self, finding: Finding) -> bool:
        """Whether the finding has not been reported yet. Asking reports it."""
        key = (finding.name, finding.severity)
        is_new = key not in self._reported
        self._reported.add(key)
        return is_new

    def check_start(self) -> list[Finding]:
        """Findings that the config alone gives: learning rates that cannot move a weight."""
        paths = {name: player.lr * self.steps for name, player in self.players.items()}
        is_judged = not self._is_trial() and self.schedule_steps is None  # the clock may allow any number of steps
        tiny = {name: path for name, path in paths.items() if path == 0 or (path < MIN_PATH and is_judged)}
        findings = []
        for name, path in tiny.items():
            lr, key = self.players[name].lr, "train.lr" if len(paths) == 1 else f"the lr of player {name}"
            evidence = f"{key} is {lr:g}: over {self.steps:,} steps a weight moves by at most about {path:.2g}, and {MIN_PATH:g} is needed"
            severity: Severity = "fatal" if len(tiny) == len(paths) and not self._is_trial() else "warning"
            findings.append(make_finding("no_learning_rate", evidence, path, MIN_PATH, severity))
        return findings

    def observe(self, record: Record) -> list[Finding]:
        """Findings of a record of metrics.jsonl, training or validation."""
        if any(name.startswith("metric/") for name in record):
            return []
        if record.get("split") == "validation":
            return self._observe_validation(record)
        return self._observe_step(record)

    def needs_validation(self, step: int) -> bool:
        """Whether the end of the stage needs validation metrics that `step` has not logged."""
        is_needed = any(limit.needs_validation() for limit in self.limits)
        return is_needed and not self._is_trial() and not any(done == step for done, _ in self._validations)

    def check_end(self, nonfinite: Sequence[str] = ()) -> list[Finding]:
        """Findings at the end of the stage; `nonfinite` names tensors of the weights that hold nan or inf."""
        values = {**(self._validations[-1][1] if self._validations else {}), **self._compute_training_means()}
        found = [*self._check_finite_end(values, nonfinite), *self._check_skips(at_end=True)]
        if not any(finding.severity == "fatal" for finding in found):  # else the numbers only follow from that
            found += self._check_zero(at_end=True)
            found += self._check_limits(values, at_end=True)
        return found

    # training --------------------------------------------------------------------------------------------------------

    def _observe_step(self, record: Record) -> list[Finding]:
        step = int(record["step"])
        if "loss" in record:
            self._losses.append((step, to_float(record["loss"])))
        for name in self._list_end_metrics():
            if name in record:
                self._logged.setdefault(name, []).append(to_float(record[name]))
        if "skipped" in record:
            self._skips.append((step, to_float(record["skipped"])))
            self._early_skips = self._skips[-1][1] if step <= SKIP_WINDOW else self._early_skips
            while len(self._skips) > 2 and self._skips[0][0] < step - SKIP_WINDOW:
                self._skips.popleft()
        for name in ("loss", *self._name_norms()):
            if name in record:
                self._zeros[name] = self._zeros.get(name, 0) + 1 if record[name] == 0 else 0
        found = [*self._check_skips(), *self._check_zero(), *self._check_spike(), *self._check_divergence()]
        for limit in self.limits:
            if limit.logs and limit.metric in record:
                finding = limit.check(record)
                self._beyond[limit.name] = self._beyond.get(limit.name, 0) + 1 if finding else 0
                if finding and self._beyond[limit.name] >= limit.logs:
                    found.append(
                        replace(finding, evidence=f"{finding.evidence}, in {limit.logs} logged steps in a row")
                    )
        return found

    def _name_norms(self) -> dict[str, str]:
        """The gradient norm of each player, by its name in the log."""
        first = next(iter(self.players))
        return {"gradient_norm" if name == first else f"{name}/gradient_norm": name for name in self.players}

    def _check_zero(self, at_end: bool = False) -> list[Finding]:
        found = []
        seen = len(self._losses)
        for norm, player in self._name_norms().items():
            zeros = self._zeros.get(norm, 0)
            if zeros >= ZERO_LOGS or (at_end and zeros == seen > 1 and not self._is_trial()):
                evidence = f"the gradient norm of {player} was exactly 0 in the last {zeros} logged steps"
                severity: Severity = "fatal" if norm == "gradient_norm" else "warning"
                found.append(make_finding("no_gradient", evidence, 0.0, severity=severity))
        if self._zeros.get("loss", 0) >= ZERO_LOGS:
            evidence = f"the loss was exactly 0 in the last {self._zeros['loss']} logged steps"
            found.append(make_finding("zero_loss", evidence, 0.0))
        return found

    def _check_skips(self, at_end: bool = False) -> list[Finding]:
        step, skipped = self._skips[-1]
        start, before = self._skips[0]
        share = (skipped - before) / max(1, step - start)
        if share >= SKIP_FATAL and (step - start >= SKIP_WINDOW // 2 or at_end):
            evidence = f"{skipped - before:.0f} of the last {step - start} updates were skipped because their gradient was not finite"
            return [make_finding("skipped_updates", evidence, share, SKIP_FATAL)]
        if self.scales_loss:
            skipped -= self._early_skips
        if skipped >= 5 and skipped / step > SKIP_WARNING:
            evidence = f"{skipped:.0f} of {step} updates were skipped because their gradient was not finite"
            meaning = "A healthy stage skips none (with fp16 few, when the loss scale doubles)."
            finding = make_finding("skipped_updates", evidence, skipped / step, SKIP_WARNING, "warning")
            return [replace(finding, meaning=meaning)]
        return []

    def _check_spike(self) -> list[Finding]:
        """The last loss towers over those before it. Compared with the first loss too: noise around 0 is no spike."""
        if len(self._losses) <= SPIKE_LOGS:
            return []
        step, loss = self._losses[-1]
        before = [value for _, value in self._losses[-SPIKE_LOGS - 1 : -1] if math.isfinite(value)]
        first = self._losses[0][1]
        if len(before) < SPIKE_LOGS // 2 or min(before) <= 0 or not loss > 0.01 * first:
            return []
        median = statistics.median(before)
        if loss < SPIKE_RISE * median or loss < SPIKE_TOP * max(before):
            return []
        evidence = f"the loss of step {step:,} is {loss:.4g}, {loss / median:.0f} times the median of the {len(before)} logged steps before"
        return [make_finding("loss_spike", evidence, loss / median, SPIKE_RISE)]

    def _check_divergence(self) -> list[Finding]:
        """The loss stays far above that of untrained weights, where the task says that the two compare."""
        first, last = self._find_untrained_loss(), self._losses[-DIVERGED_LOGS:]
        compares = self.starts_random and any(limit.share_of == UNTRAINED_LOSS for limit in self.limits)
        if not compares or len(self._losses) <= DIVERGED_LOGS or not first > 0:
            return []
        rise = min(loss for _, loss in last) / first
        if not rise > DIVERGED_RISE:
            return []
        evidence = (
            f"the loss is {last[-1][1]:.4g} at step {last[-1][0]:,}, and that of untrained weights was {first:.4g}"
        )
        return [make_finding("diverged", evidence, rise, DIVERGED_RISE)]

    def _find_untrained_loss(self) -> float:
        """The first logged loss; of small batches, which vary, the highest of three."""
        first = [loss for _, loss in self._losses[: 1 if self.batch_size >= 8 else 3]]
        return max(first) if first else math.nan

    def _list_end_metrics(self) -> set[str]:
        """Logged numbers that a limit at the end looks at."""
        names = {name for limit in self.limits for name in (limit.metric, limit.share_of) if name is not None}
        return {name.removeprefix("train/") for name in names if name.startswith("train/")}

    def _compute_training_means(self) -> dict[str, float]:
        """Means of the last tenth of the logged steps, and the loss of untrained weights; none where logged steps are too few."""
        if self._is_trial() or len(self._losses) < 10:
            return {}
        means = {}
        for name, values in self._logged.items():
            if finite := [value for value in values if math.isfinite(value)]:
                means[f"train/{name}"] = statistics.fmean(finite[-max(3, len(finite) // 10) :])
        return means | ({UNTRAINED_LOSS: self._find_untrained_loss()} if self.starts_random else {})

    # validation ------------------------------------------------------------------------------------------------------

    def _observe_validation(self, record: Record) -> list[Finding]:
        step, loss = int(record["step"]), to_float(record.get("loss"))
        self._validations.append((step, record))
        if not math.isfinite(loss):
            twice = len(self._validations) > 1 and not math.isfinite(to_float(self._validations[-2][1].get("loss")))
            return [
                make_finding(
                    "nonfinite_loss", _describe_loss("validation", step), severity="fatal" if twice else "warning"
                )
            ]
        return [*self._check_limits(record, at_end=False), *self._check_overfitting()]

    def _check_limits(self, values: Record, at_end: bool) -> list[Finding]:
        found = []
        step = self._validations[-1][0] if self._validations else 0
        for limit in self.limits:
            # The check at the end repeats the last validation's.
            if limit.logs or not (limit.always or at_end or self.steps <= 2 * step < 2 * self.steps):
                continue
            finding = limit.check(values)
            if finding is None or (self._is_trial() and not limit.always):
                continue
            is_judged = limit.always or (at_end and not self._is_young())
            found.append(finding if is_judged else replace(finding, severity="warning"))
        return found

    def _check_overfitting(self) -> list[Finding]:
        losses = [(step, to_float(record.get("loss"))) for step, record in self._validations]
        best_step, best = min(losses, key=lambda pair: pair[1] if math.isfinite(pair[1]) else math.inf)
        last = [loss for _, loss in losses[-OVERFIT_RISES - 1 :]]
        rises = len(last) > OVERFIT_RISES and all(a < b for a, b in pairwise(last))
        if not rises or best <= 0 or last[-1] < OVERFIT_RISE * best:
            return []
        edges = [0, *(step for step, _ in losses)]
        at_best, now = (
            self._compute_mean_loss(edges[edges.index(best_step) - 1], best_step),
            self._compute_mean_loss(*edges[-2:]),
        )
        if at_best is None or now is None or now >= at_best:
            return []
        evidence = (
            f"the validation loss rose from {best:.4g} at step {best_step:,} to {last[-1]:.4g}, while the training loss fell "
            f"from {at_best:.4g} to {now:.4g}"
        )
        return [make_finding("overfitting", evidence, last[-1] / best, OVERFIT_RISE)]

    def _compute_mean_loss(self, start: int, stop: int) -> float | None:
        losses = [loss for step, loss in self._losses if start < step <= stop and math.isfinite(loss)]
        return statistics.fmean(losses) if losses else None

    # the end ---------------------------------------------------------------------------------------------------------

    def _check_finite_end(self, values: Record, nonfinite: Sequence[str]) -> list[Finding]:
        if nonfinite:
            names = ", ".join(nonfinite[:3]) + (" …" if len(nonfinite) > 3 else "")
            evidence = f"{len(nonfinite)} tensors hold nan or inf: {names}"
            return [make_finding("nonfinite_weights", evidence, float(len(nonfinite)), 0.0)]
        step = self._validations[-1][0] if self._validations else 0
        if "loss" in values and not math.isfinite(to_float(values["loss"])):
            return [make_finding("nonfinite_loss", _describe_loss("validation", step))]
        if self._losses and not math.isfinite(self._losses[-1][1]):
            # One bad batch is skipped and harms nothing; several in a row mean that training cannot go on.
            in_a_row = self._skips[-1][1] - self._skips[-2][1] if len(self._skips) > 1 else 0.0
            evidence = _describe_loss("training", self._losses[-1][0])
            return [make_finding("nonfinite_loss", evidence, severity="warning" if in_a_row == 1 else "fatal")]
        return []

    def _is_trial(self) -> bool:
        """Whether the stage is too short to have learned anything."""
        return self.steps < YOUNG_STEPS

    def _is_young(self) -> bool:
        """Whether the stage may be healthy and still have learned nothing: short, slow, or mostly warm-up."""
        first = next(iter(self.players.values()))
        schedule = self.schedule_steps or self.steps
        return self._is_trial() or schedule < 2 * first.warmup or first.lr * self.steps < YOUNG_PATH
