"""The only training loop. It trains one stage: a Task and its data; it never learns what a family is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kineograph.core import ranks
from kineograph.core.batch import Batch
from kineograph.core.errors import InputError, RunFailed, Stopped
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import Mean
from kineograph.train import checkpoint
from kineograph.train.progress import Progress
from kineograph.train.stepper import Stepper
from kineograph.train.stop import StopRequest

Record = dict[str, Any]


class Steps(Protocol):
    """Where batches come from: `steps(start, stop)` gives the micro-batches of each step, in order."""

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]: ...


@dataclass
class Surroundings:
    """What the Trainer is given from outside: where to write and whom to tell."""

    checkpoints: Path
    log: Callable[[Record], None]
    validation: Callable[[], Iterable[Batch]] | None = None
    show: Callable[[int, Stepper], None] | None = None  # draw samples and reconstructions after a step
    saved: dict[str, Any] = field(
        default_factory=dict
    )  # what else belongs into each checkpoint: assets, resolved config
    stop: StopRequest = field(default_factory=StopRequest)
    quiet: bool = False


class Trainer:
    """Trains a stage from its last complete checkpoint, or from 0, to `steps`."""

    def __init__(self, stage: str, stepper: Stepper, data: Steps, around: Surroundings) -> None:
        self.stage = stage
        self.stepper = stepper
        self.config = stepper.config
        self.data = data
        self.around = around
        self.progress = Progress(stage, self.config.steps, around.quiet)
        self.best = math.inf
        self.best_step: int | None = None
        self.elapsed = 0.0  # seconds of training before this process took over

    def resume(self) -> int:
        """Take up the newest complete checkpoint. → steps already made."""
        checkpoint.clean(self.around.checkpoints)
        found = checkpoint.latest(self.around.checkpoints, self.progress.note)
        if found is None:
            return 0
        if not found.has("optimizer"):
            raise InputError(
                f"{found.path} holds weights alone, as they were imported: train them on in a new run, with stages.{self.progress.stage}.init="
                f"{found.path.parent.parent} (or weights=DIR of the folder they came from)"
            )
        self.stepper.load(found)
        state = found.state()
        self.best = math.inf if state["best"] is None else state["best"]
        self.best_step = state["best_step"]
        self._point_to_best()  # a kill may have come between a save and its pointer
        self.elapsed = state["elapsed"]
        return found.step

    def fit(self, done: int) -> None:
        """Train from `done` completed steps to the end; every way out of here has saved what was made."""
        config, stepper = self.config, self.stepper
        stepper.task.train()
        if config.save_first and done == 0:
            self._save(0)
        clock = _Clock(self.elapsed)
        with self.progress.shown(done):
            batches = self.data.steps(done, config.steps)
            for step in range(done, config.steps):
                micro = self._next(batches, clock, done)
                values = stepper.step(step, micro)
                done = step + 1
                clock.count(sum(map(len, micro)) * ranks.world())
                last = done == config.steps
                self.progress.advance(done)
                if done == 1 or done % config.log_every == 0 or last:
                    self._log(done, values, clock)
                with clock.paused():
                    improved = self._due(done, config.validate_every) and self._validate(done)
                    if self.around.show and self._due(done, config.sample_every):
                        self.around.show(done, stepper)
                    self.elapsed = clock.elapsed()
                    if improved or last or done % config.save_every == 0 or self.around.stop:
                        self._save(done)
                if self.around.stop and not last:
                    raise self._stopped(done)

    def _next(self, batches: Iterator[list[Batch]], clock: _Clock, done: int) -> list[Batch]:
        """The next step's micro-batches. A signal to the whole process group may end the data's workers before it is heard here."""
        try:
            with clock.waiting():
                return next(batches)
        except RunFailed:
            if not self.around.stop:
                raise
            self._save(done)
            raise self._stopped(done) from None

    def _stopped(self, done: int) -> Stopped:
        by = self.around.stop.by
        return Stopped(f"stopped by {by} at step {done} of {self.stage}, saved; run the same command to go on")

    def _due(self, done: int, every: int) -> bool:
        return every > 0 and (done % every == 0 or done == self.config.steps)

    def _log(self, done: int, values: dict[str, Tensor], clock: _Clock) -> None:
        """The one place that waits for the device: all numbers of a step in one transfer."""
        stepper = self.stepper
        named = values | {"skipped": stepper.skipped, "skipped_in_a_row": stepper.skipped_in_a_row}
        numbers = dict(zip(named, torch.stack([v.to(torch.float32) for v in named.values()]).tolist(), strict=True))
        in_a_row = int(numbers.pop("skipped_in_a_row"))
        if in_a_row >= self.config.max_nonfinite:
            raise RunFailed(
                f"stage {self.stage}: the gradient was not finite in {in_a_row} steps in a row (train.max_nonfinite={self.config.max_nonfinite}); "
                f"the weights of step {done - in_a_row} are untouched. Lower train.lr, lengthen train.warmup, or look at the data around step {done}"
            )
        record: Record = {"stage": self.stage, "split": "train", "step": done, **numbers, **stepper.rates(done - 1)}
        first = stepper.averages.get(stepper.task.players[0])
        if first is not None:
            record["ema_decay"] = first.decay
        record |= clock.report(stepper.device)
        self.around.log(record)
        self.progress.numbers(done, numbers.get("loss", math.nan), record["time/samples_per_second"])

    @torch.no_grad()
    def _validate(self, done: int) -> bool:
        """Judge the averaged weights with fixed data and noise. → whether they are the best so far."""
        if self.around.validation is None:
            return False
        joined: dict[str, Mean] = {}
        seed = key_of(self.stepper.seed, "validation")
        started = time.monotonic()
        with self.stepper.eval_mode() as task:
            for batch in self.around.validation():
                batch = batch.to(self.stepper.device)
                for name, mean in task.validate(batch, Noise(seed, 0, batch.slots)).items():
                    count = torch.as_tensor(mean.count, dtype=torch.float64, device=mean.sum.device)
                    before = joined.get(name, Mean(torch.zeros_like(count), torch.zeros_like(count)))
                    joined[name] = Mean(before.sum + mean.sum.to(torch.float64), before.count + count)
        means = {name: float(ranks.sum_(mean.sum) / ranks.sum_(mean.count)) for name, mean in joined.items()}  # type: ignore[arg-type]
        seconds = time.monotonic() - started
        self.around.log(
            {"stage": self.stage, "split": "validation", "step": done, **means, "time/validation_seconds": seconds}
        )
        self.progress.note(f"{self.stage}  step {done}  validation loss {means['loss']:.4g}")
        improved = means["loss"] < self.best
        if improved:
            self.best, self.best_step = means["loss"], done
        return improved

    def _point_to_best(self) -> None:
        """best.json says what the checkpoint knows."""
        pointer = checkpoint.best(self.around.checkpoints)
        if ranks.is_first() and self.best_step is not None and (pointer or {}).get("step") != self.best_step:
            checkpoint.set_best(self.around.checkpoints, self.best_step, self.best)

    def _save(self, done: int) -> None:
        best = None if math.isinf(self.best) else self.best
        state = {
            "stage": self.stage,
            "stepper": self.stepper.state(),
            "best": best,
            "best_step": self.best_step,
            "elapsed": self.elapsed,
            **self.around.saved,
        }
        if ranks.is_first():
            checkpoint.save(self.around.checkpoints, done, self.stepper.tensors(), state)
            self._point_to_best()
            checkpoint.prune(self.around.checkpoints, self.config.keep_last, done)
        ranks.barrier()


class _Clock:
    """Throughput between two reports, without pauses for pictures and saving."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._begin = self._mark = time.monotonic()
        self._samples = self._steps = 0
        self._waited = self._pause = 0.0

    def waiting(self) -> _Span:
        return _Span(self, "_waited")

    def paused(self) -> _Span:
        return _Span(self, "_pause")

    def count(self, samples: int) -> None:
        self._samples += samples
        self._steps += 1

    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._begin

    def report(self, device: torch.device) -> Record:
        seconds = max(1e-9, time.monotonic() - self._mark - self._pause)
        steps = max(1, self._steps)
        record = {
            "time/samples_per_second": self._samples / seconds,
            "time/step_ms": 1000 * seconds / steps,
            "time/data_ms": 1000 * self._waited / steps,
            "time/elapsed": self.elapsed(),
        }
        if device.type == "cuda":
            record["time/memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        self._mark, self._samples, self._steps, self._waited, self._pause = time.monotonic(), 0, 0, 0.0, 0.0
        return record


class _Span:
    def __init__(self, clock: _Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        setattr(self.clock, self.name, getattr(self.clock, self.name) + time.monotonic() - self.started)
