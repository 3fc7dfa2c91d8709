"""Trains, judges and samples the entries of a race, each a subprocess of the public commands: the crash of one ends no other."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from kineograph.core.errors import Stopped
from kineograph.core.notes import Note
from kineograph.core.run_folder import RunFolder, open_nofollow
from kineograph.run.listing import read_run

MISSING = 4  # exit code of kineo evaluate: some metric could not be computed
WAIT = 0.5  # seconds between checks of a run that another process trains


@dataclass(frozen=True)
class Entry:
    """One family with one seed."""

    family: str
    seed: int
    folder: Path  # of the race

    @property
    def name(self) -> str:
        return f"{self.family}-{self.seed}"

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def samples(self) -> Path:
        return self.folder / "samples" / self.name

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"


@dataclass(frozen=True)
class Judge:
    """How every entry is judged."""

    samples: int
    metrics: str | None = None
    extractors: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    """Extractor weights on this machine: with others, all entries are judged again."""

    def arguments(self) -> list[str]:
        chosen = ["--metrics", self.metrics] if self.metrics else []
        return ["--samples", str(self.samples), *chosen, *(f"--extractor={name}" for name in self.extractors)]


class CommandFailed(Exception):
    """A command of an entry failed; its message is the last line that it printed."""


@dataclass
class Runner:
    judge: Judge
    note: Note
    trust: bool = False  # pass --trust on
    findings: dict[str, list[str]] = field(default_factory=dict)
    """Entry → what is fatally wrong with its stages, by its last judging."""
    _children: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: str | None = None
    _noted: set[str] = field(default_factory=set)

    def run(self, entries: Sequence[Entry], jobs: int, finish: Callable[[Entry, str | None], None]) -> None:
        """Run all entries, `jobs` at a time; `finish` gets each with the reason why it failed, or None. A signal stops all."""
        slots: queue.Queue[int] = queue.Queue()
        for slot in range(jobs):
            slots.put(slot)

        def work(entry: Entry) -> None:
            if self._stopped:
                return
            slot = slots.get()
            try:
                failure = self._race(entry, _make_environment(slot, jobs))
            finally:
                slots.put(slot)
            if not self._stopped:
                finish(entry, failure)

        with self._handle_signals(), ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(work, entry) for entry in entries]:
                future.result()
        if self._stopped:
            raise Stopped(
                f"stopped by {self._stopped}; what was trained is saved, and the same command goes on with the race"
            )

    def _race(self, entry: Entry, environment: dict[str, str]) -> str | None:
        """Train, judge and sample one entry. → why it failed"""
        entry.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._train(entry, environment)
            self.note(f"{entry.name}: judging")
            lines = self._call(entry, environment, ["evaluate", str(entry.run), *self.judge.arguments()], (0, MISSING))
            self._note_skipped(lines)
            self.findings[entry.name] = _find_fatal(lines)
            prompts = entry.folder / "prompts.txt"
            if len(list(entry.samples.glob("*.json"))) < prompts.read_bytes().count(b"\n"):
                shutil.rmtree(entry.samples, ignore_errors=True)  # a part of them
                words = ["sample", str(entry.run), "--prompts", str(prompts), "--out", str(entry.samples)]
                self._call(entry, environment, words, (0,))
        except CommandFailed as error:
            return str(error)
        return None

    def _train(self, entry: Entry, environment: dict[str, str]) -> None:
        run = RunFolder(entry.run)
        if run.exists() and run.in_use():
            self.note(f"{entry.name}: waits for the process that trains {entry.run}")
            while run.in_use() and not self._stopped:
                time.sleep(WAIT)
        if run.exists() and read_run(entry.run).state == "finished":
            self.note(f"{entry.name}: trained already")
            return
        shutil.rmtree(entry.samples, ignore_errors=True)  # of an earlier run with this name
        self.note(f"{entry.name}: training")
        plan = str(entry.folder / "plans" / f"{entry.family}.yaml")
        self._call(entry, environment, ["train", plan, f"seed={entry.seed}", "--run", str(entry.run)], (0,))

    def _call(self, entry: Entry, environment: dict[str, str], words: list[str], fine: tuple[int, ...]) -> list[str]:
        """Run a command of this package; its output goes to the entry's log. → its lines"""
        if self._stopped:
            raise CommandFailed("stopped")
        words = [*words, "--trust"] if self.trust else words
        with open(entry.log, "ab", opener=open_nofollow) as log:
            start = log.tell()
            log.write(f"$ kineo {' '.join(words)}\n".encode())
            log.flush()
            # A session of its own: a signal from the terminal reaches it once, through this process.
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "kineograph", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        with self._lock:
            self._children.add(child)
            if self._stopped:
                child.terminate()
        code = child.wait()
        with self._lock:
            self._children.discard(child)
        lines = _read_lines(entry.log, start)
        is_judged = code == 1 and bool(_find_fatal(lines))  # `evaluate` of a weak family: all figures are written
        if code not in fine and not is_judged:
            last = lines[-1].removeprefix("error: ") if lines else f"it printed nothing; see {entry.log}"
            raise CommandFailed(f"kineo {words[0]} ended with code {code}: {last}")
        return lines

    def _note_skipped(self, lines: Sequence[str]) -> None:
        """Name the metrics that have no column, with the reason, once."""
        for line in lines:
            if line.startswith("skipped ") and line not in self._noted:
                self._noted.add(line)
                self.note(line)

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Pass SIGINT and SIGTERM on as SIGTERM, upon which training saves."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self._stopped = signal.Signals(number).name
            for child in tuple(self._children):
                child.terminate()

        handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _make_environment(slot: int, jobs: int) -> dict[str, str]:
    """Entries that run side by side get a GPU each, where there are several."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if jobs == 1 or gpus < 2 or "CUDA_VISIBLE_DEVICES" in os.environ:
        return dict(os.environ)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": str(slot % gpus)}


def _find_fatal(lines: Sequence[str]) -> list[str]:
    """The fatal findings of `kineo evaluate`, which it prints when everything is written."""
    return [line.replace(": fatal: ", ": ") for line in lines if ": fatal: " in line]


def _read_lines(log: Path, start: int) -> list[str]:
    """The last lines that were printed after the command."""
    with open(log, "rb") as file:
        file.seek(start)
        lines = file.read()[-65_536:].decode("utf-8", "replace").splitlines()[1:]
    return [line.strip() for line in lines if line.strip()]
