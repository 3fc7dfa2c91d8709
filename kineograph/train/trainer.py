"""The only training loop. It trains one stage: a Task and its data; it never learns what a family is.

What comes when is cadence.py's; here is what each phase does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kineograph.core import distributed, heartbeat
from kineograph.core.batch import Batch
from kineograph.core.errors import InputError, RunFailed, Stopped
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import Mean, Task
from kineograph.core.transfer import fetch_floats
from kineograph.train import checkpoint
from kineograph.train.clock import Clock, Work
from kineograph.train.phases import Cursor, Phase, advance, is_finished, is_logged, is_snapshot, skip_removed_phases
from kineograph.train.progress import Progress
from kineograph.train.rank_log import RankLog
from kineograph.train.saver import Saver
from kineograph.train.step_times import is_measured
from kineograph.train.stepper import Stepper
from kineograph.train.stop import StopRequest

Record = dict[str, Any]


class BatchSource(Protocol):
    """Where batches come from: `steps(start, stop)` gives the micro-batches of each step, in order."""

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]: ...


@dataclass
class TrainerHooks:
    """What the Trainer is given from outside: where to write and whom to tell."""

    checkpoints: Path
    log: Callable[[Record], None]
    validation: Callable[[], Iterable[Batch]] | None = None
    evaluate: Callable[[int, Task], tuple[dict[str, float], Record]] | None = None  # metrics by name, what they rest on
    show: Callable[[int, Stepper], Callable[[], None]] | None = None  # draw after a step; → what is then left to write
    publish: Callable[[checkpoint.Checkpoint, bool], None] | None = None  # hand a checkpoint on; whether it is the best
    saved: dict[str, Any] = field(
        default_factory=dict
    )  # what else belongs into each checkpoint: assets, resolved config
    stop: StopRequest = field(default_factory=StopRequest)
    quiet: bool = False
    rank_log: RankLog | None = None  # what this process alone hears
    work: Work | None = None  # arithmetic of a step, where it was counted


class Trainer:
    """Trains a stage from its last complete checkpoint, or from 0, to `steps`."""

    def __init__(self, stage: str, stepper: Stepper, data: BatchSource, hooks: TrainerHooks) -> None:
        self.stage = stage
        self.stepper = stepper
        self.config = stepper.config
        self.data = data
        self.hooks = hooks
        heard = hooks.rank_log.write if hooks.rank_log is not None else None
        self.progress = Progress(stage, self.config.steps, hooks.quiet or not distributed.is_first(), heard)
        self.saved: int | None = None  # the step whose checkpoint this run last wrote or took up
        self.best = math.inf
        self.best_step: int | None = None
        self.elapsed = 0.0  # seconds of training before this process took over
        self.saver = Saver(hooks.checkpoints)

    def resume(self) -> Cursor:
        """Take up the newest complete checkpoint. → where the stage stands."""
        if distributed.is_first():
            checkpoint.remove_leftovers(self.hooks.checkpoints)
        found = checkpoint.latest_on_all_ranks(self.hooks.checkpoints, self.progress.note)
        if found is None:
            return Cursor()
        if "stepper" not in found.state():
            raise InputError(
                f"{found.path} holds weights alone, as they were imported: train them on in a new run, with stages.{self.stage}.init="
                f"{found.path.parent.parent} (or weights=DIR of the folder they came from)"
            )
        self.stepper.load(found)
        state = found.state()
        self.saved = found.step
        self.best = math.inf if state["best"] is None else state["best"]
        self.best_step = state["best_step"]
        self._point_to_best(self.best_step, self.best)  # a kill may have come between a save and its pointer
        self.elapsed = state["elapsed"]
        return skip_removed_phases(self.config, Cursor(found.step, found.phase))

    def fit(self, cursor: Cursor) -> None:
        """Train from `cursor` to the end; every way out of here has saved what was made."""
        with self.saver:
            self._fit(cursor)

    def _fit(self, cursor: Cursor) -> None:
        config = self.config
        self.stepper.task.train()
        if config.save_first and cursor == Cursor():
            self._save(cursor)
            self.saver.wait()  # data workers may be forked next: no thread should be in the middle of something
        clock = Clock(self.elapsed, self.stepper.device, self.stepper.times, self.hooks.work)
        with self.progress.shown(cursor.step):
            batches = self.data.steps(cursor.step, config.steps)
            while not is_finished(config, cursor):
                self.saver.check()
                improved = False
                if cursor.phase == "train":
                    self._train(cursor.step, batches, clock)
                else:
                    with clock.paused():
                        improved = self._judge(cursor.phase, cursor.step)
                done, cursor = cursor.phase, advance(config, cursor)
                stopping = self.hooks.stop.agreed()
                with clock.paused():
                    self.elapsed = clock.elapsed()
                    if done == "save" or improved or stopping:
                        self._save(cursor)
                    elif done != "train" and self.saved == cursor.step:
                        self._note_phase(cursor)
                if stopping and not is_finished(config, cursor):
                    raise self._stopped(cursor.step)

    def _train(self, step: int, batches: Iterator[list[Batch]], clock: Clock) -> None:
        """Make the update from `step` to `step` + 1."""
        heartbeat.set_activity("data")
        micro = self._next(batches, clock, step)
        with self.stepper.times.step(is_measured(self.config, step + 1)):
            values = self.stepper.step(step, micro)
        clock.count(sum(map(len, micro)) * distributed.data_world())
        heartbeat.beat()
        self.progress.advance(step + 1)
        if is_logged(self.config, step + 1):
            self._log(step + 1, values, clock)

    def _judge(self, phase: Phase, step: int) -> bool:
        """Go through a phase that looks at the weights of `step`. → whether they are the best so far, which only validation can find."""
        heartbeat.set_activity(phase)
        if phase == "validate":
            return self._validate(step)
        if phase == "evaluate":
            self._evaluate(step)
        elif phase == "sample" and self.hooks.show is not None:
            self.saver.then(self.hooks.show(step, self.stepper))  # encoding takes long: training goes on meanwhile
        elif phase == "publish" and self.hooks.publish is not None and self.saved == step and distributed.is_first():
            self.saver.wait()
            self.hooks.publish(checkpoint.checkpoint_at(self.hooks.checkpoints, step), step == self.best_step)
        return False

    def _next(self, batches: Iterator[list[Batch]], clock: Clock, done: int) -> list[Batch]:
        """The next step's micro-batches. A signal to the whole process group may end the data's workers before it is heard here."""
        try:
            with clock.waiting():
                return next(batches)
        except RunFailed:
            if not self.hooks.stop or distributed.is_active():  # the others are on their way into the step
                raise
            self._save(Cursor(done))
            raise self._stopped(done) from None

    def _stopped(self, done: int) -> Stopped:
        by = self.hooks.stop.signal_name
        return Stopped(f"stopped by {by} at step {done} of {self.stage}, saved; run the same command to go on")

    def _log(self, done: int, values: dict[str, Tensor], clock: Clock) -> None:
        """The one place that waits for the device: all numbers of a step in one transfer."""
        stepper = self.stepper
        named = values | {"skipped": stepper.skipped, "skipped_in_a_row": stepper.skipped_in_a_row}
        numbers = fetch_floats(named)
        in_a_row = int(numbers.pop("skipped_in_a_row"))
        if in_a_row >= self.config.max_nonfinite:
            raise RunFailed(
                f"stage {self.stage}: the gradient was not finite in {in_a_row} steps in a row (train.max_nonfinite={self.config.max_nonfinite}); "
                f"the weights of step {done - in_a_row} are untouched. Lower train.lr, lengthen train.warmup, or look at the data around step {done}"
            )
        record: Record = {
            "stage": self.stage,
            "split": "train",
            "step": done,
            **numbers,
            **stepper.learning_rates(done - 1),
        }
        first = stepper.emas.get(stepper.task.players[0])
        if first is not None:
            record["ema_decay"] = first.decay
        record |= self._timings(done, clock)
        self.hooks.log(record)
        self.progress.numbers(done, numbers.get("loss", math.nan), record["time/samples_per_second"])

    def _timings(self, done: int, clock: Clock) -> Record:
        """Each process's own go to its log; a process that the others wait for is told of."""
        timings, slowest = clock.report()
        if self.hooks.rank_log is not None:
            self.hooks.rank_log.timings(self.stage, done, clock.mine, slowest)
        if slowest is not None and clock.is_worth_a_word(slowest):
            self.progress.note(f"{self.stage}  step {done}  {slowest}")
        return timings

    @torch.no_grad()
    def _validate(self, done: int) -> bool:
        """Judge the averaged weights with fixed data and noise. → whether they are the best so far."""
        if self.hooks.validation is None:
            return False
        joined: dict[str, Mean] = {}
        seed = key_of(self.stepper.seed, "validation")
        started = time.monotonic()
        with self.stepper.eval_mode() as task:
            for batch in self.hooks.validation():
                batch = batch.to(self.stepper.device)
                heartbeat.beat()
                for name, mean in task.validate(batch, Noise(seed, 0, batch.slots)).items():
                    count = torch.as_tensor(mean.count, dtype=torch.float64, device=mean.sum.device)
                    before = joined.get(name, Mean(torch.zeros_like(count), torch.zeros_like(count)))
                    if batch.spare:
                        joined[name] = before
                        continue
                    joined[name] = Mean(before.sum + mean.sum.to(torch.float64), before.count + count)
        means = {
            name: float(distributed.all_reduce_(mean.sum) / distributed.all_reduce_(torch.as_tensor(mean.count)))
            for name, mean in joined.items()
        }
        seconds = time.monotonic() - started
        self.hooks.log(
            {"stage": self.stage, "split": "validation", "step": done, **means, "time/validation_seconds": seconds}
        )
        self.progress.note(f"{self.stage}  step {done}  validation loss {means['loss']:.4g}")
        improved = means["loss"] < self.best
        if improved:
            self.best, self.best_step = means["loss"], done
        return improved

    def _evaluate(self, done: int) -> None:
        """Metrics of the averaged weights, under `metric/…`."""
        if self.hooks.evaluate is None:
            return
        started = time.monotonic()
        with self.stepper.eval_mode() as task:
            found, labels = self.hooks.evaluate(done, task)
        if not found:
            return
        record: Record = {"stage": self.stage, "split": "validation", "step": done}
        record |= {f"metric/{name}": value for name, value in found.items()}
        self.hooks.log({**record, "labels": labels, "time/evaluation_seconds": time.monotonic() - started})
        told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        self.progress.note(f"{self.stage}  step {done}  {told}")

    def _point_to_best(self, step: int | None, loss: float) -> None:
        """best.json says what the checkpoint knows."""
        pointer = checkpoint.read_best(self.hooks.checkpoints) or {}
        if not distributed.is_first() or step is None or pointer.get("step") == step:
            return
        if step in checkpoint.saved_steps(
            self.hooks.checkpoints
        ):  # a run that was taken up from elsewhere may have left its best there
            checkpoint.write_best(self.hooks.checkpoints, step, loss)

    def _position(self, cursor: Cursor) -> dict[str, Any]:
        """What changes from phase to phase of one step."""
        return {
            "phase": cursor.phase,
            "samples": cursor.step * self.config.batch_size,
            "best": None if math.isinf(self.best) else self.best,
            "best_step": self.best_step,
            "elapsed": self.elapsed,
        }

    def _note_phase(self, cursor: Cursor) -> None:
        """The weights of this step are saved, or being saved: only where the run stands is new."""
        position = self._position(cursor)
        self.saver.then(lambda: checkpoint.update_state(self.hooks.checkpoints, cursor.step, position))

    def _save(self, cursor: Cursor) -> None:
        """The run as it stands at `cursor`."""
        if self.saved == cursor.step:
            self._note_phase(cursor)
        else:
            state = {
                "stage": self.stage,
                "stepper": self.stepper.state(),
                **self._position(cursor),
                **self.hooks.saved,
            }
            self.saver.save(cursor.step, self.stepper.local_state(), state)
        self.saved = cursor.step
        best = self.best_step, self.best  # as they are now: training goes on
        self.saver.then(lambda: self._tidy(cursor.step, *best))

    def _tidy(self, step: int, best_step: int | None, best: float) -> None:
        """Once step `step` lies on disk: which is the best, and which are no longer kept."""
        self._point_to_best(best_step, best)
        folder, config = self.hooks.checkpoints, self.config
        checkpoint.prune(folder, config.keep_last, step, lambda other: is_snapshot(config, other))
