"""What a preset takes of a GPU: doctor's estimate from a process of its own, and the settings with which it fits a given memory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kineograph.core.text_file import parse_json
from kineograph.run.layers import preset_names
from kineograph.run.presets import Preset
from kineograph.studio.workers import run_worker

GIB = 2**30
SIZES = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 192)  # GiB of GPUs that people have
USUAL = 24
CACHE = "kineo cache beforehand"  # as doctor says it; the stage's key `cache` does it at the beginning of training
# What the parts of the bar are called, in its order.
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer moments",
    "ema": "averaged weights (EMA)",
    "text": "text encoder",
    "activations": "activations",
}


@dataclass(frozen=True)
class Fit:
    """A stage with some settings."""

    settings: tuple[str, ...]
    memory: Mapping[str, int]  # part → bytes

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class StageMemory:
    """Doctor's estimate of one stage on one GPU."""

    name: str
    task: str
    trained: int
    frozen: int
    clip: tuple[int, int, int]  # frames, height, width
    precision: str
    batch_size: int
    accumulate: int
    micro: int  # rows of a micro-batch
    sample_bytes: float
    usable: float  # share of the memory
    base: Fit
    savings: tuple[Fit, ...]
    combinations: tuple[Fit, ...]

    def fits(self, fit: Fit, memory: float) -> bool:
        return fit.total <= self.usable * memory

    def split_batch(self, memory: float) -> Fit | None:
        """The largest micro-batches that fit. They train the same, only slower."""
        rows, left = self.micro * self.accumulate, self.usable * memory - self.base.total
        largest = self.micro + int(left // max(1.0, self.sample_bytes))
        if largest < 1 or self.micro < 2:
            return None
        parts = next(k for k in range(1, rows + 1) if rows % k == 0 and rows // k <= largest)
        saved = round((self.micro - rows // parts) * self.sample_bytes)
        activations = max(0, self.base.memory["activations"] - saved)
        return Fit((f"train.accumulate={parts}",), {**self.base.memory, "activations": activations})

    def choose(self, memory: float) -> Fit | None:
        """The stage as it is; else in smaller micro-batches; else with one setting; else with several. None: nothing fits."""
        split = self.split_batch(memory)
        candidates = [self.base, *([split] if split else []), *self.savings, *self.combinations]
        return next((fit for fit in candidates if self.fits(fit, memory)), None)


@dataclass(frozen=True)
class Estimate:
    """What is known of a preset, stage by stage as doctor finds it."""

    began: float
    stages: tuple[StageMemory, ...] = ()
    seconds: float | None = None  # None: it is under way
    error: str = ""

    @property
    def is_done(self) -> bool:
        return self.seconds is not None


def worker_command(preset: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kineograph.studio.estimate_worker", preset]


class Estimator:
    """Runs doctor, once for each preset, one at a time. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, Estimate] = {}
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def estimate(self, preset: str) -> Estimate:
        """What is known so far; the first call begins it."""
        if preset not in preset_names():
            raise KeyError(preset)
        with self._lock:
            if preset in self._known:
                return self._known[preset]
            begun = self._known[preset] = Estimate(time.time())
        threading.Thread(target=self._run, args=(preset,), daemon=True).start()
        return begun

    def _run(self, preset: str) -> None:
        error = ""
        with self._turn:
            try:
                with run_worker(worker_command(preset)) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        tree = parse_json(line)
                        error = error or tree.get("error", "")
                        if not error:
                            self._change(preset, stages=(*self._known[preset].stages, read_stage_memory(tree)))
                if process.returncode and not error:
                    error = f"the process that estimates has ended with exit code {process.returncode}"
            except (OSError, ValueError, KeyError) as failure:
                error = f"the estimate cannot be read ({failure})"
        self._change(preset, error=error, seconds=time.time() - self._known[preset].began)

    def _change(self, preset: str, **changes: Any) -> None:
        with self._lock:
            self._known[preset] = replace(self._known[preset], **changes)


def read_stage_memory(tree: Mapping[str, Any]) -> StageMemory:
    """A line of estimate_worker.py."""
    fits: dict[str, Any] = {key: tuple(_read_fit(*pair) for pair in tree[key]) for key in ("savings", "combinations")}
    same = {key: tree[key] for key in StageMemory.__dataclass_fields__ if key in tree and key not in fits}
    return StageMemory(**{**same, "clip": tuple(tree["clip"])}, base=_read_fit([], tree["memory"]), **fits)


def _read_fit(settings: Sequence[str], memory: Mapping[str, int]) -> Fit:
    keys = tuple("cache=true" if setting == CACHE else setting for setting in settings)
    return Fit(keys, {part: memory[part] for part in PARTS})


def make_command(preset: Preset, chosen: Mapping[str, Fit]) -> str:
    """What to type: the preset's own command with the settings of each stage."""
    settings = [(stage, setting) for stage, fit in chosen.items() for setting in fit.settings]
    keys = [setting if setting.startswith("stages.") else f"stages.{stage}.{setting}" for stage, setting in settings]
    return " ".join([preset.command, *keys])
