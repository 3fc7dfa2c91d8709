"""When a stage trains, saves, validates, evaluates, draws and publishes: pure functions of the config and a cursor.

    train → … → train → save → validate → evaluate → sample → publish → train → … → publish → check

After each step the phases that are due follow in this order. They are counted in steps (`train.validate_every` …) or,
with `train.epoch_samples`, in samples: then each epoch ends with all of them. The checkpoint comes first and holds the
cursor, so a run that is killed in a later phase comes back into that phase and trains nothing twice. The last phase of
a stage checks its health, so a stage that fails the check is checked again before the next stage trains on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kineograph.train.config import TrainConfig

Phase = Literal["train", "save", "validate", "evaluate", "sample", "publish", "check"]
ORDER: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Cursor:
    """Where a stage stands: optimizer steps completed, and the phase that comes next."""

    step: int = 0
    phase: Phase = "train"

    def covers(self, record: Mapping[str, Any]) -> bool:
        """Whether a line of metrics.jsonl was written before this cursor."""
        if record["step"] != self.step or self.phase == "train":
            return record["step"] <= self.step
        return ORDER.index(phase_of(record)) < ORDER.index(self.phase)


def phase_of(record: Mapping[str, Any]) -> Phase:
    """The phase that writes such a line of metrics.jsonl."""
    if "finding" in record:
        return record["phase"] if record.get("phase") in ORDER else "train"
    if record.get("split") != "validation":
        return "train"
    return "evaluate" if any(name.startswith("metric/") for name in record) else "validate"


def advance(config: TrainConfig, cursor: Cursor) -> Cursor:
    """The cursor after its phase is done."""
    step = cursor.step + (cursor.phase == "train")
    later = ORDER[ORDER.index(cursor.phase) + 1 :]
    return Cursor(step, next((phase for phase in due_phases(config, step) if phase in later), "train"))


def skip_removed_phases(config: TrainConfig, cursor: Cursor) -> Cursor:
    """Advance a saved cursor whose phase is no longer due, because `train.*_every` changed since."""
    return cursor if cursor.phase in ("train", *due_phases(config, cursor.step)) else advance(config, cursor)


def is_finished(config: TrainConfig, cursor: Cursor) -> bool:
    return cursor.phase == "train" and cursor.step >= config.steps


def due_phases(config: TrainConfig, step: int) -> tuple[Phase, ...]:
    """The phases that follow step `step`, in order. After the last step, every phase that is ever due."""

    def is_due(every: int) -> bool:
        if every == 0:
            return False
        if step == config.steps:
            return True
        return step % every == 0 if config.epoch_samples is None else _crosses(config, step, config.epoch_samples)

    due: dict[Phase, bool] = {
        "save": is_due(config.save_every) or is_snapshot(config, step),
        "validate": is_due(config.validate_every),
        "evaluate": bool(config.metrics) and is_due(config.evaluate_every),
        "sample": is_due(config.sample_every),
    }
    due["check"] = config.health != "off" and step == config.steps
    due["publish"] = config.log_checkpoints and (due["save"] or due["validate"])  # validation saves a new best
    return tuple(phase for phase in ORDER if due.get(phase))


def is_logged(config: TrainConfig, step: int) -> bool:
    """Whether step `step` gets a line in metrics.jsonl."""
    return step == 1 or step % config.log_every == 0 or step == config.steps


def is_snapshot(config: TrainConfig, step: int) -> bool:
    """Whether the checkpoint of step `step` is never deleted."""
    return config.save_every_samples is not None and _crosses(config, step, config.save_every_samples)


def _crosses(config: TrainConfig, step: int, samples: int) -> bool:
    """Whether step `step` reaches a multiple of `samples`, counted from step 0 so that nothing drifts."""
    done = step * config.batch_size
    return done // samples > (done - config.batch_size) // samples
