"""A watchdog over hangs (`train.watchdog`). When no process of a run has got anything done for so long, each writes the stacks of its threads
into its log, and ends with exit code 1: torchrun then starts them again where it was told to, and they go on from the last checkpoint.

A process may well be silent while another works (the first one writes pictures, the others wait). So each leaves the number of its
heartbeats in RUN/logs/.pulse-N, and one that has been silent for long looks there before it calls it a hang. The thread that watches needs
the interpreter; should something hang without ever giving that back, faulthandler's own thread, which does not, dumps and ends instead.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kineograph.core import distributed, heartbeat
from kineograph.train.rank_log import RankLog

LOOKS = 8  # at the pulse within the time that is allowed …
LOOK_AT_LEAST = 5.0  # … and at least every so many seconds
GRACE = 15.0  # seconds for the others to write their stacks


class Watchdog:
    def __init__(self, seconds: float, log: RankLog, stage: str) -> None:
        """Every process makes one, at the same time."""
        self.seconds, self.log, self.stage = seconds, log, stage
        self.folder = log.path.parent
        self.rank, self.world = distributed.rank(), distributed.world()
        if distributed.is_first():
            for path in (*self.folder.glob(".pulse-*"), *self.folder.glob(".dumped-*")):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        self._life = _agreed_number()  # tells the marks of this life of the run from those that an earlier one left
        self._ended = threading.Event()
        self._published = -1
        self._heard: dict[int, str] = {}
        self._heard_at = time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        heartbeat.beat()
        self._publish()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            for path in (self._pulse_file(self.rank), self._dumped_file(self.rank)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _watch(self) -> None:
        every = min(LOOK_AT_LEAST, self.seconds / LOOKS)
        while not self._ended.wait(every):
            if self.log.file is not None:
                faulthandler.dump_traceback_later(2 * self.seconds, exit=True, file=self.log.file)
            self._publish()
            if heartbeat.seconds_since_last() < self.seconds / 2:
                continue
            self._listen()
            silence = min(heartbeat.seconds_since_last(), time.monotonic() - self._heard_at)
            if (silence > self.seconds or self._others_bark()) and not self._ended.is_set():
                self._bark()

    def _bark(self) -> None:
        """Never comes back."""
        self._say(
            f"watchdog: nothing was done for {self.seconds:g} s (train.watchdog) in stage {self.stage}: rank {self.rank} of {self.world} is at "
            f"{heartbeat.current_activity()!r}. The stacks of all ranks are in {self.folder}; ends here with exit code 1, and the same command goes on from "
            "the last checkpoint"
        )
        with suppress(OSError, ValueError):
            if self.log.file is not None:
                self.log.file.flush()
                faulthandler.dump_traceback(self.log.file, all_threads=True)
        _put(self._dumped_file(self.rank), "")
        until = time.monotonic() + min(GRACE, self.seconds)
        while time.monotonic() < until and not all(self._dumped_file(rank).exists() for rank in range(self.world)):
            time.sleep(0.1)
        os._exit(1)

    def _say(self, line: str) -> None:
        self.log.write(line)
        with suppress(OSError):
            os.write(2, f"\nerror: {line}\n".encode())

    def _publish(self) -> None:
        if self.world > 1 and heartbeat.beats != self._published:
            self._published = heartbeat.beats
            _put(self._pulse_file(self.rank), str(heartbeat.beats))

    def _listen(self) -> None:
        """Whether another process has got something done since the last look."""
        for rank in range(self.world):
            if rank == self.rank:
                continue
            try:
                found = self._pulse_file(rank).read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
            if found and found != self._heard.get(rank):
                if rank in self._heard:
                    self._heard_at = time.monotonic()
                self._heard[rank] = found

    def _others_bark(self) -> bool:
        return any(self._dumped_file(rank).exists() for rank in range(self.world) if rank != self.rank)

    def _pulse_file(self, rank: int) -> Path:
        return self.folder / f".pulse-{self._life}-{rank}"

    def _dumped_file(self, rank: int) -> Path:
        return self.folder / f".dumped-{self._life}-{rank}"


def _agreed_number() -> int:
    """Of this moment, by the clock of the first process."""
    return int(distributed.all_gather_floats([time.time() // 1e-3])[0][0])


def _put(path: Path, text: str) -> None:
    """A mark that cannot be written (a full disk) is missed by others, and ends nothing here."""
    with suppress(OSError):
        path.write_text(text, encoding="utf-8")
