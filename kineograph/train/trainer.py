"""The only training loop. It trains one stage (a Task and its data) and never learns what a family is.

phases.py decides what comes next; this file does it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kineograph.core import distributed, heartbeat
from kineograph.core.batch import Batch
from kineograph.core.capabilities import ChecksHealth
from kineograph.core.device_copy import fetch_floats
from kineograph.core.errors import InputError, RunFailed, Stopped
from kineograph.core.health import Finding
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import Mean, Task
from kineograph.train import checkpoint
from kineograph.train.clock import StageClock, read_share
from kineograph.train.config import TrainConfig
from kineograph.train.data_probe import DataProbe
from kineograph.train.determinism import allow_all_algorithms
from kineograph.train.health import StageHealth
from kineograph.train.phases import (
    Cursor,
    Phase,
    advance,
    is_finished,
    is_logged,
    is_snapshot,
    schedule_position,
    skip_removed_phases,
)
from kineograph.train.progress_bar import Progress
from kineograph.train.rank_log import RankLog
from kineograph.train.saver import Saver
from kineograph.train.step_timer import StepFlops, is_measured
from kineograph.train.stepper import Stepper
from kineograph.train.stop import StopRequest

Record = dict[str, Any]


class BatchSource(Protocol):
    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step, in order."""


@dataclass
class TrainerHooks:
    """The functions that the Trainer calls and the places where it writes, from run/train.py."""

    checkpoints: Path
    log: Callable[[Record], None]
    validation_batches: Callable[[], Iterable[Batch]] | None = None
    evaluate: Callable[[int, Task], tuple[dict[str, float], Record]] | None = None
    """(step, task) → metrics by name, and labels that say what they are based on."""
    draw_samples: Callable[[int, Stepper], Callable[[], None]] | None = None
    """(step, stepper) → a function that encodes and writes the samples, called in the background."""
    publish: Callable[[checkpoint.Checkpoint, bool], None] | None = None
    """(checkpoint, is_best): upload a checkpoint to the trackers."""
    extra_state: dict[str, Any] = field(default_factory=dict)
    """Added to every checkpoint's state.json: assets, resolved config, position in the data."""
    stop: StopRequest = field(default_factory=StopRequest)
    quiet: bool = False
    rank_log: RankLog | None = None
    step_flops: StepFlops | None = None
    warm_started: bool = False
    """Whether the stage starts from trained weights."""
    started: float = field(default_factory=lambda: time.monotonic())
    """When this process began to work on the stage, from where train.minutes counts."""


ENDLESS = 2**40  # steps that no stage reaches before its time is over


def saved_cursor(config: TrainConfig, saved: checkpoint.Checkpoint) -> Cursor:
    """Where the stage of a checkpoint stands."""
    share = read_share(saved.state(), config.seconds)
    return skip_removed_phases(config, Cursor(saved.step, saved.phase, share))


def describe_failure(stage: str, finding: Finding) -> str:
    """The message that ends a run."""
    return f"stage {stage}: {finding} Set train.health=warn to go on all the same"


class Trainer:
    """Trains a stage from its last complete checkpoint, or from step 0, to `train.steps` or the end of `train.minutes`."""

    def __init__(self, stage: str, stepper: Stepper, data: BatchSource, hooks: TrainerHooks) -> None:
        self.stage = stage
        self.stepper = stepper
        self.timer = stepper.timer
        self.config = stepper.config
        self.data = data
        self.hooks = hooks
        log_note = hooks.rank_log.write if hooks.rank_log is not None else None
        self.is_timed = self.config.minutes is not None
        steps = None if self.is_timed else self.config.steps
        self.progress = Progress(stage, steps, hooks.quiet or not distributed.is_first(), log_note)
        self.saver = Saver(hooks.checkpoints)
        task = stepper.task
        self.health = StageHealth(
            self.config.steps,
            stepper.players,
            task.health_limits() if isinstance(task, ChecksHealth) else (),
            starts_random=not hooks.warm_started,
            batch_size=self.config.batch_size,
            schedule_steps=self.config.steps if self.is_timed else None,
            scales_loss=stepper.scale is not None,
        )
        self._probe = DataProbe("captions" in task.reads) if self.config.health != "off" else None
        self.saved_step: int | None = None  # of the checkpoint that this process last wrote or resumed from
        self.best_loss = math.inf
        self.best_step: int | None = None
        self.clock = StageClock(started=hooks.started)

    def resume(self) -> Cursor:
        """Load the newest complete checkpoint. → where the stage stands."""
        if distributed.is_first():
            checkpoint.remove_leftovers(self.hooks.checkpoints)
        latest = checkpoint.latest_on_all_ranks(self.hooks.checkpoints, self.progress.note)
        if latest is None:
            return Cursor()
        state = latest.state()
        if "stepper" not in state:
            raise InputError(
                f"{latest.path} holds imported weights and no training state: train them in a new run, with stages.{self.stage}.init="
                f"{latest.path.parent.parent} (or weights=DIR of the folder they came from)"
            )
        self.stepper.load(latest)
        self.saved_step = latest.step
        self.best_loss = math.inf if state["best"] is None else state["best"]
        self.best_step = state["best_step"]
        self._write_best(self.best_step, self.best_loss)  # a kill may have come between a save and its best.json
        self.clock = StageClock(state["elapsed"], self.hooks.started)
        cursor = saved_cursor(self.config, latest)
        self._expect_steps(cursor.step, cursor.share.now)
        return cursor

    def fit(self, cursor: Cursor) -> None:
        """Train from `cursor` to the end. However it ends, saves that have begun are completed first."""
        config = self.config
        with self.saver, self.progress.show(cursor.step):
            self.stepper.task.train()
            if config.save_first and cursor == Cursor():
                self._save(cursor)
                self.saver.wait()  # the data workers are forked next, and should not copy a thread in mid-write
            if config.sample_first and config.sample_every and cursor == Cursor():
                self._run_phase("sample", cursor.step)
                self.saver.wait()
            if self.config.health != "off" and schedule_position(config, cursor) < config.steps:
                self._report(self.health.check_start(), cursor.step, "train")
            self.timer.begin()
            batches = self.data.steps(cursor.step, cursor.step + ENDLESS if self.is_timed else config.steps)
            share = cursor.share.now
            while not is_finished(config, cursor):
                self.saver.check()
                is_best = False
                if cursor.phase == "train":
                    share = self._train_step(cursor, batches)
                else:
                    with self._pause():
                        is_best = self._run_phase(cursor.phase, cursor.step)
                phase, cursor = cursor.phase, advance(config, cursor, share)
                stopping = self.hooks.stop.agree()
                if phase == "save" or is_best or stopping:
                    with self._pause():
                        self._save(cursor)
                elif phase != "train" and self.saved_step == cursor.step:
                    self._note_phase(cursor)
                if stopping and not is_finished(config, cursor):
                    raise self._stopped(cursor.step)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Leave the time inside out of the throughput and the schedule of train.minutes; steps that the device still computes count."""
        self.timer.wait_for_device()
        with self.timer.outside("pause"), self.clock.pause():
            yield

    # Phases ----------------------------------------------------------------------------------------------------------

    def _train_step(self, cursor: Cursor, batches: Iterator[list[Batch]]) -> float:
        """Make the update from `cursor.step`. → how far the clock is then, with train.minutes."""
        step, config = cursor.step, self.config
        micro_batches = self._next_batches(batches, cursor)
        self._probe_data(micro_batches, step)
        position = schedule_position(config, cursor)
        pace = config.steps * (cursor.share.now - cursor.share.before) if self.is_timed else 1
        waited = self.stepper.is_waiting
        with self.timer.step(is_measured(config, step + 1)):
            values = self.stepper.step(step, micro_batches, position, pace)
        compiled = waited and not self.stepper.is_waiting
        share = self.clock.end_step(cursor.share.now, config.seconds, compiled) if config.seconds is not None else 0.0
        self.timer.count(sum(map(len, micro_batches)) * distributed.data_world())
        heartbeat.beat()
        self.progress.advance(step + 1, share if self.is_timed else None)
        if is_logged(config, step + 1) or share == 1:
            self._expect_steps(step + 1, share)
            self._log_step(step + 1, values, position, share)
        return share

    def _expect_steps(self, step: int, share: float) -> None:
        """Tell the health check how many steps the stage will have, at the speed of those that are made."""
        if self.is_timed and share > 0:
            self.health.steps = round(step / share)

    def _run_phase(self, phase: Phase, step: int) -> bool:
        """Run a phase other than training. → whether validation found the best weights so far."""
        if phase == "validate":
            return self._validate(step)
        if phase == "evaluate":
            self._evaluate(step)
        elif phase == "sample" and self.hooks.draw_samples is not None:
            with allow_all_algorithms():
                write_files = self.hooks.draw_samples(step, self.stepper)
            self.saver.then(write_files)
        elif phase == "publish":
            self._publish(step)
        elif phase == "check":
            self._check_end(step)
        return False

    def _next_batches(self, batches: Iterator[list[Batch]], cursor: Cursor) -> list[Batch]:
        """The micro-batches of the update from `cursor.step`.

        A signal to the whole process group may end the data workers before this process handles it: then save and stop.
        """
        try:
            with self.timer.outside("data"):
                return next(batches)
        except RunFailed:
            if not self.hooks.stop or distributed.is_active():  # other ranks have begun the step
                raise
            self._save(cursor)
            raise self._stopped(cursor.step) from None

    def _stopped(self, step: int) -> Stopped:
        signal = self.hooks.stop.signal_name
        return Stopped(f"stopped by {signal} at step {step} of {self.stage}, saved; run the same command to go on")

    def _log_step(self, step: int, values: dict[str, Tensor], position: float, share: float) -> None:
        """Log a step. The only place that waits for the device: all numbers of the step come in one transfer."""
        stepper = self.stepper
        numbers = fetch_floats(values | {"skipped": stepper.skipped, "skipped_in_a_row": stepper.skipped_in_a_row})
        in_a_row = int(numbers.pop("skipped_in_a_row"))
        if in_a_row >= self.config.max_nonfinite:
            raise RunFailed(
                f"stage {self.stage}: the gradient was not finite in {in_a_row} steps in a row (train.max_nonfinite={self.config.max_nonfinite}); "
                f"the weights of step {step - in_a_row} are unchanged. Lower train.lr, lengthen train.warmup, or look at the data around step {step}"
            )
        record: Record = {"stage": self.stage, "split": "train", "step": step, **numbers}
        record |= stepper.learning_rates(position)
        ema = stepper.emas.get(stepper.task.players[0])
        if ema is not None:
            record["ema_decay"] = ema.decay
        timings, slowest = self.timer.report(self.hooks.step_flops)
        record |= timings | {"time/elapsed": self.clock.seconds()} | ({"time/share": share} if self.is_timed else {})
        self.hooks.log(record)
        used = (share, (self.config.seconds or 0.0) - self.clock.seconds()) if self.is_timed else ()
        self.progress.numbers(step, numbers.get("loss", math.nan), record["time/samples_per_second"], *used)
        if self.hooks.rank_log is not None:
            self.hooks.rank_log.write_timings(self.stage, step, self.timer.own_ms, slowest)
        if slowest is not None and self.timer.should_warn(slowest):
            self.progress.note(f"{self.stage}  step {step}  {slowest}")
        self._observe(record, "train")

    def _validate(self, step: int) -> bool:
        """Validate the averaged weights with fixed data and noise. → whether they are the best so far."""
        if self.hooks.validation_batches is None:
            return False
        started = time.monotonic()
        values = self._compute_validation()
        seconds = time.monotonic() - started
        record = {"stage": self.stage, "split": "validation", "step": step, **values}
        self.hooks.log({**record, "time/validation_seconds": seconds})
        self.progress.note(f"{self.stage}  step {step}  validation loss {values['loss']:.4g}")
        is_best = values["loss"] < self.best_loss
        if is_best:
            self.best_loss, self.best_step = values["loss"], step
        self._observe(record, "validate")
        return is_best

    @torch.no_grad()
    def _compute_validation(self) -> dict[str, float]:
        """The validation metrics of the averaged weights, over all processes."""
        assert self.hooks.validation_batches is not None
        means: dict[str, Mean] = {}
        seed = key_of(self.stepper.seed, "validation")
        with self.stepper.eval_mode() as task:
            for batch in self.hooks.validation_batches():
                batch = batch.to(self.stepper.device)
                heartbeat.beat()
                for name, mean in task.validate(batch, Noise(seed, 0, batch.slots)).items():
                    count = torch.as_tensor(mean.count, dtype=torch.float64, device=mean.sum.device)
                    total = means.get(name, Mean(torch.zeros_like(count), torch.zeros_like(count)))
                    if not batch.spare:
                        total = Mean(total.sum + mean.sum.to(torch.float64), total.count + count)
                    means[name] = total
        return {
            name: float(distributed.all_reduce_(mean.sum) / distributed.all_reduce_(torch.as_tensor(mean.count)))
            for name, mean in means.items()
        }

    def _evaluate(self, step: int) -> None:
        """Compute the metrics of the averaged weights and log them under `metric/…`."""
        if self.hooks.evaluate is None:
            return
        started = time.monotonic()
        with allow_all_algorithms(), self.stepper.eval_mode() as task:
            metrics, labels = self.hooks.evaluate(step, task)
        if not metrics:
            return
        record: Record = {"stage": self.stage, "split": "validation", "step": step}
        record |= {f"metric/{name}": value for name, value in metrics.items()}
        self.hooks.log({**record, "labels": labels, "time/evaluation_seconds": time.monotonic() - started})
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.progress.note(f"{self.stage}  step {step}  {text}")

    def _publish(self, step: int) -> None:
        """Upload the checkpoint in the background: other processes would wait no longer than train.timeout."""
        publish = self.hooks.publish
        if publish is not None and self.saved_step == step:
            saved, is_best = checkpoint.checkpoint_at(self.hooks.checkpoints, step), step == self.best_step
            self.saver.then(lambda: publish(saved, is_best))

    # Health ----------------------------------------------------------------------------------------------------------

    def _probe_data(self, batches: list[Batch], step: int) -> None:
        """Look at the first batches, until they are known to differ."""
        if self._probe is None:
            return
        self._probe.add(batches)
        found = self._probe.check(distributed.all_gather_object(self._probe.summary()))
        if found is not None:
            self._probe = None
            self._report(found, step, "train")

    def _observe(self, record: Record, phase: Phase) -> None:
        if self.config.health != "off":
            self._report(self.health.observe(record), record["step"], phase)

    def _check_end(self, step: int) -> None:
        """Check the finished stage, before another is trained on it."""
        # Only the first process may have metrics.jsonl, from which a resumed stage knows its validations.
        is_needed = distributed.broadcast_object(self.health.needs_validation(step))
        if is_needed and self.hooks.validation_batches is not None:
            values = self._compute_validation()
            self._report(self.health.observe({"split": "validation", "step": step, **values}), step, "check")
        self._report(self.health.check_end(self.stepper.find_nonfinite()), step, "check")

    def _report(self, findings: list[Finding], step: int, phase: Phase) -> None:
        """Log and print new findings. The first process decides for all; a fatal one ends the stage if train.health=stop."""
        decided = distributed.broadcast_object([finding.to_json() for finding in findings])
        findings = [Finding.from_json(tree) for tree in decided]
        stops = self.config.health == "stop"
        fatal = next((finding for finding in findings if stops and finding.severity == "fatal"), None)
        for finding in filter(self.health.is_new, findings):
            record = {
                "stage": self.stage,
                "split": "health",
                "step": step,
                "phase": phase,
                "finding": finding.to_json(),
            }
            self.hooks.log({**record, finding.name: finding.value})  # the number is what trackers plot
            if finding is not fatal:  # which is the error's message
                self.progress.note(f"{self.stage}  step {step}  {finding.severity}: {finding}")
        if fatal is not None:
            raise RunFailed(describe_failure(self.stage, fatal))

    # Saving ----------------------------------------------------------------------------------------------------------

    def _position(self, cursor: Cursor) -> dict[str, Any]:
        """The part of the state that changes from phase to phase of one step."""
        return {
            "phase": cursor.phase,
            "samples": cursor.step * self.config.batch_size,
            "best": None if math.isinf(self.best_loss) else self.best_loss,
            "best_step": self.best_step,
            "elapsed": self.clock.seconds(),
        }

    def _save(self, cursor: Cursor) -> None:
        """Save the run as it stands at `cursor`, in the background."""
        if self.saved_step == cursor.step:
            self._note_phase(cursor)
        else:
            state = {
                "stage": self.stage,
                "stepper": self.stepper.state(),
                **({"clock": {**cursor.share._asdict(), "seconds": self.config.seconds}} if self.is_timed else {}),
                **self._position(cursor),
                **self.hooks.extra_state,
            }
            self.saver.save(cursor.step, self.stepper.local_state(), state)
        self.saved_step = cursor.step
        best_step, best_loss = self.best_step, self.best_loss  # as they are now: training goes on

        def finish() -> None:
            self._write_best(best_step, best_loss)
            folder, config = self.hooks.checkpoints, self.config
            checkpoint.prune(folder, config.keep_last, cursor.step, lambda step: is_snapshot(config, step))

        self.saver.then(finish)

    def _note_phase(self, cursor: Cursor) -> None:
        """Record a finished phase in the checkpoint of this step, whose weights are saved or being saved."""
        position = self._position(cursor)
        self.saver.then(lambda: checkpoint.update_state(self.hooks.checkpoints, cursor.step, position))

    def _write_best(self, step: int | None, loss: float) -> None:
        """Write best.json. The best checkpoint of a run resumed from elsewhere may not be here: then there is none."""
        folder = self.hooks.checkpoints
        if not distributed.is_first() or step is None or checkpoint.read_best(folder).get("step") == step:
            return
        if step in checkpoint.saved_steps(folder):
            checkpoint.write_best(folder, step, loss)
