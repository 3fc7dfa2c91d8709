"""When a stage trains, saves, validates, evaluates, draws and publishes: pure functions of the config and a cursor.

    train → … → train → save → validate → evaluate → sample → publish → train → … → publish → check

After each step the phases that are due follow in this order. They are counted in steps (`train.validate_every` …) or,
with `train.epoch_samples`, in samples: then each epoch ends with all of them. With `train.minutes` the clock decides how
far the stage is, and a phase that is due every tenth of `train.steps` comes after every tenth of the time. The checkpoint comes first and holds the
cursor, so a run that is killed in a later phase comes back into that phase and trains nothing twice. The last phase of
a stage checks its health, so a stage that fails the check is checked again before the next stage trains on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kineograph.train.checkpoint_folder import ORDER, Phase
from kineograph.train.clock import NO_SHARE, Share
from kineograph.train.config import TrainConfig


@dataclass(frozen=True)
class Cursor:
    """Where a stage stands: optimizer steps completed, and the phase that comes next."""

    step: int = 0
    phase: Phase = "train"
    share: Share = NO_SHARE
    """How far the clock was before and after the last step; without train.minutes it is not used."""

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


def advance(config: TrainConfig, cursor: Cursor, share: float = 0.0) -> Cursor:
    """The cursor after its phase is done. `share`: how far the clock is after a training step, with train.minutes."""
    later = ORDER[ORDER.index(cursor.phase) + 1 :]
    if cursor.phase == "train":
        cursor = Cursor(cursor.step + 1, "train", Share(cursor.share.now, share))
    return replace(cursor, phase=next((phase for phase in due_phases(config, cursor) if phase in later), "train"))


def skip_removed_phases(config: TrainConfig, cursor: Cursor) -> Cursor:
    """Advance a saved cursor whose phase is no longer due, because `train.*_every` changed since."""
    return cursor if cursor.phase in ("train", *due_phases(config, cursor)) else advance(config, cursor)


def is_finished(config: TrainConfig, cursor: Cursor) -> bool:
    return cursor.phase == "train" and schedule_position(config, cursor) >= config.steps


def schedule_position(config: TrainConfig, cursor: Cursor) -> float:
    """How far the stage is, in the steps that its recipe is written in: the steps made or, with train.minutes, the clock's share of them."""
    return cursor.step if config.minutes is None else cursor.share.now * config.steps


def due_phases(config: TrainConfig, cursor: Cursor) -> tuple[Phase, ...]:
    """The phases that follow the step just made, in order. After the last step, every phase that is ever due."""
    step, position = cursor.step, schedule_position(config, cursor)
    before = step - 1 if config.minutes is None else cursor.share.before * config.steps
    is_last = position == config.steps

    def is_due(every: int) -> bool:
        if every == 0:
            return False
        if is_last:
            return True
        if config.epoch_samples is not None:
            return _crosses(config, step, config.epoch_samples)
        return math.floor(position / every) > math.floor(before / every)

    due: dict[Phase, bool] = {
        "save": is_due(config.save_every) or is_snapshot(config, step),
        "validate": is_due(config.validate_every),
        "evaluate": bool(config.metrics) and is_due(config.evaluate_every),
        "sample": is_due(config.sample_every),
    }
    due["check"] = config.health != "off" and is_last
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
