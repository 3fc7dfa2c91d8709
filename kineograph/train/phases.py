"""When a stage trains, saves, validates, evaluates, draws and publishes: one state machine, as pure functions of the config and a cursor.

    train → … → train → save → validate → evaluate → sample → publish → train → …

After every step the phases that are due follow in this order. What is due is counted in steps (`train.validate_every` …) or, with
`train.epoch_samples`, in samples: then each epoch ends with all of them. The checkpoint comes first, so that a run that is killed while
it validates, evaluates or draws comes back into that phase and trains nothing twice; the cursor is part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kineograph.train.config import TrainConfig

Phase = Literal["train", "save", "validate", "evaluate", "sample", "publish"]
ORDER: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Cursor:
    """Where a stage stands: optimizer steps completed, and what it does next."""

    step: int = 0
    phase: Phase = "train"

    def covers(self, record: Mapping[str, Any]) -> bool:
        """Whether a line of metrics.jsonl was written before the run came here."""
        if record["step"] != self.step or self.phase == "train":
            return record["step"] <= self.step
        return ORDER.index(phase_of(record)) < ORDER.index(self.phase)


def phase_of(record: Mapping[str, Any]) -> Phase:
    """The phase that writes such a line."""
    if record.get("split") != "validation":
        return "train"
    return "evaluate" if any(name.startswith("metric/") for name in record) else "validate"


def advance(config: TrainConfig, cursor: Cursor) -> Cursor:
    """Where the run stands once what `cursor` names is done."""
    step = cursor.step + (cursor.phase == "train")
    later = ORDER[ORDER.index(cursor.phase) + 1 :]
    return Cursor(step, next((phase for phase in due_phases(config, step) if phase in later), "train"))


def skip_removed_phases(config: TrainConfig, cursor: Cursor) -> Cursor:
    """A saved cursor under a config whose cadence may have changed since: a phase that is no longer due is passed over."""
    return cursor if cursor.phase in ("train", *due_phases(config, cursor.step)) else advance(config, cursor)


def is_finished(config: TrainConfig, cursor: Cursor) -> bool:
    return cursor.phase == "train" and cursor.step >= config.steps


def due_phases(config: TrainConfig, step: int) -> tuple[Phase, ...]:
    """What follows step `step`, in order. The last step is followed by everything that is ever due."""

    def now(every: int) -> bool:
        if every == 0:
            return False
        met = step % every == 0 if config.epoch_samples is None else _passes(config, step, config.epoch_samples)
        return met or step == config.steps

    wanted: dict[Phase, bool] = {
        "save": now(config.save_every) or is_snapshot(config, step),
        "validate": now(config.validate_every),
        "evaluate": bool(config.metrics) and now(config.evaluate_every),
        "sample": now(config.sample_every),
    }
    wanted["publish"] = config.log_checkpoints and (wanted["save"] or wanted["validate"])  # a new best is saved too
    return tuple(phase for phase in ORDER if wanted.get(phase))


def is_logged(config: TrainConfig, step: int) -> bool:
    """Whether step `step` is told to metrics.jsonl."""
    return step == 1 or step % config.log_every == 0 or step == config.steps


def is_snapshot(config: TrainConfig, step: int) -> bool:
    """Whether the checkpoint of step `step` is kept for good."""
    return config.save_every_samples is not None and _passes(config, step, config.save_every_samples)


def _passes(config: TrainConfig, step: int, samples: int) -> bool:
    """Whether the samples of step `step` reach the next multiple of `samples`; counted from 0, so that nothing drifts."""
    done = step * config.batch_size
    return done // samples > (done - config.batch_size) // samples
