"""Faults other than a kill: each must end in a clear message and exit code, or in a correct continuation.

Every scenario gets a folder of its own and the undisturbed run, and returns what it saw; `expect` collects what is not as promised.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture import comparison, processes
from tests.torture.kills import ALONE, STAGES, Layout, train_once
from tests.torture.tiny import CONFIG, write_config


@dataclass
class Outcome:
    """What came of one fault."""

    name: str
    promised: str
    codes: list[int] = field(default_factory=list)
    message: str = ""
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    def ended(self, result: processes.ProcessResult, code: int, *words: str) -> None:
        """With this code, these words in its message, and no traceback."""
        self.codes.append(max(result.codes, key=abs))
        said = [
            line for line in result.text.splitlines() if any(word in line for word in words)
        ] or result.text.splitlines()[-1:]
        self.message = self.message or (said[0][:300] if said else "")
        self.expect(
            set(result.codes) == {code}, f"it ended with {result.codes} instead of {code}: {result.text[-600:]}"
        )
        for word in words:
            self.expect(word in result.text, f"nothing says {word!r}: {result.text[-600:]}")
        self.expect("Traceback" not in result.text, f"a traceback: {result.text[-1500:]}")
        self.expect(not result.hung, "it hung")

    def went_on(self, run: Path, reference: Path, tolerance: float = 0.0) -> None:
        """As if nothing had happened."""
        found, wrong = comparison.read_curve(run)
        expected, _ = comparison.read_curve(reference)
        wrong += comparison.find_differences(found, expected, tolerance)
        wrong += comparison.find_missing(found, expected)
        wrong += comparison.compare_weights(run, reference, STAGES, tolerance)
        self.wrong += wrong[:5]


@dataclass
class Scenario:
    """Where a scenario works, and what it is held against."""

    folder: Path
    config: Path
    reference: Path
    layout: Layout = ALONE

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def train(self, kill: processes.Kill | None = None) -> processes.ProcessResult:
        return train_once(self.config, self.run, self.layout, self.folder / "log", kill)

    def start(self, *more: str, before: Callable[[], None] | None = None) -> list[int]:
        words = ["train", str(self.config), "--run", str(self.run), *self.layout.words, *more]
        (self.folder / "log").unlink(missing_ok=True)
        return [
            processes.start(words, self.folder / "log", self.run, None, env, before)
            for env in self.layout.environment()
        ]

    def wait(self, children: list[int]) -> processes.ProcessResult:
        return processes.wait(children, self.folder / "log")

    def lines(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def until(self, lines: int) -> None:
        deadline = time.monotonic() + processes.TIMEOUT
        while self.lines() < lines and time.monotonic() < deadline:
            time.sleep(0.002)


def sigterm(place: Scenario) -> Outcome:
    """As a scheduler preempts: SIGTERM, then SIGKILL after a grace period."""
    out = Outcome("SIGTERM with a grace period", "saves, ends with 75, goes on")
    for lines in (3, 9, 20):
        children = place.start()
        place.until(min(lines, 28))
        for child in children:
            os.kill(child, signal.SIGTERM)
        result = place.wait(children)
        out.ended(result, 75, "SIGTERM", "run the same command to go on")
        out.expect(result.seconds < 30, f"it took {result.seconds:.0f} s of its grace")
        out.expect((place.run / "stopped").exists(), "there is no `stopped`")
        found, _ = comparison.read_curve(place.run)
        steps = {s: max((k[2] for k in found if k[:2] == (s, "train")), default=0) for s in STAGES}
        saved = comparison.saved_steps(place.run, STAGES)
        out.expect({s: n for s, n in steps.items() if n} == saved, f"steps {steps} were made and {saved} saved")
    out.ended(place.train(), 0)
    out.expect(not (place.run / "stopped").exists(), "`stopped` is still there")
    out.went_on(place.run, place.reference)
    return out


@contextmanager
def mount_small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A file system of its own, where this process may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, capture_output=True)


def full_disk(place: Scenario) -> Outcome:
    out = Outcome("full disk while saving", "ends with 1 and the reason, goes on when there is room")
    with mount_small_disk(place.run, "90k") as mounted:
        if mounted:
            result = place.train()
            out.ended(result, 1, "No space left on device", "run the same command to go on")
            out.expect(bool(comparison.saved_steps(place.run, STAGES)), "no checkpoint was complete before")
            out.expect(not list(place.run.rglob(".writing-*")), "half a checkpoint is left")
            remount(place.run, "size=100m")
        else:
            out.name += " (no file system could be mounted: a limit on the size of files instead)"
            result = place.wait(place.start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))))
            out.ended(result, 1, "File too large", "run the same command to go on")
        out.ended(place.train(), 0)
        out.went_on(place.run, place.reference)
    return out


def read_only(place: Scenario) -> Outcome:
    out = Outcome("read-only run folder", "ends with 2 before anything is made")
    with mount_small_disk(place.run, "1m") as mounted:
        if mounted:
            remount(place.run, "ro")
        elif os.geteuid() == 0:
            out.name += " (not tried: root, and no file system could be mounted)"
            return out
        else:
            place.run.chmod(0o555)
        out.ended(place.train(), 2, "cannot be written to", "--run")
        if not mounted:
            place.run.chmod(0o755)
    return out


def disk_fills_up(place: Scenario) -> Outcome:
    """Between two saves, by what another program writes: it is the log that finds no room."""
    out = Outcome("disk fills up between two saves", "ends with 1 and the reason, goes on when there is room")
    with mount_small_disk(place.run, "1m") as mounted:
        if not mounted:
            out.name += " (not tried: no file system could be mounted)"
            return out
        place.config = write_config(place.folder / "no_snapshots.yaml", train__save_every_samples=None)
        children = place.start("train.steps=100000", "train.save_every=100000", "train.validate_every=0")
        place.until(5)
        with suppress(OSError), open(place.run / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        out.ended(place.wait(children), 1, "cannot write", "No space left on device", "run the same command to go on")
        (place.run / "filler").unlink()
        more = [f"train.{key}={CONFIG['train'][key]}" for key in ("steps", "save_every", "validate_every")]
        out.ended(place.wait(place.start(*more)), 0)
        out.went_on(place.run, place.reference)
    return out


def _resume_after_damage(place: Scenario, name: str, damage: Callable[[Path], None], word: str) -> Outcome:
    out = Outcome(name, "is noticed and said, the one before is used")
    children = place.start()
    place.until(22)
    for child in children:
        os.kill(child, signal.SIGKILL)
    place.wait(children)
    saved = comparison.saved_steps(place.run, STAGES)
    stage = [s for s in STAGES if s in saved][-1]
    newest = place.run / stage / "checkpoints" / f"step-{saved[stage]:08d}"
    damage(sorted(p for p in newest.rglob("*.safetensors"))[-1])
    out.ended(place.train(), 0, newest.name, "is damaged", word)
    out.went_on(place.run, place.reference)
    return out


def flipped_byte(place: Scenario) -> Outcome:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) * 2 // 3] ^= 4
        path.write_bytes(content)

    return _resume_after_damage(place, "flipped byte in a checkpoint", flip, "does not match its checksum")


def missing_shard(place: Scenario) -> Outcome:
    return _resume_after_damage(place, "missing file (or shard) of a checkpoint", Path.unlink, "is missing")


def nan_batch(place: Scenario) -> Outcome:
    out = Outcome("NaN batch", "the update is skipped and counted; many in a row end the run with 1")
    poisoned = {"task": "tests.torture.tiny.Poisoned", "poison": [4]}
    config = write_config(place.folder / "nan.yaml", stages__toy=poisoned)
    whole = Scenario(place.folder, config, place.reference, place.layout)
    out.ended(whole.train(), 0)
    found, _ = comparison.read_curve(place.run)
    after = [found["toy", "train", step] for step in range(5, 13)]
    out.expect(after[0]["loss"] is None and after[0]["skipped"] == 1, f"step 5 is {after[0]}")
    out.expect(all(r["loss"] is not None and r["skipped"] == 1 for r in after[1:]), "steps after it are not finite")
    shutil.rmtree(place.run)
    poisoned["poison"] = list(range(3, 12))
    whole.config = write_config(place.folder / "nan.yaml", stages__toy=poisoned, train__max_nonfinite=4)
    out.ended(whole.train(), 1, "was not finite in 4 steps in a row", "Lower train.lr")
    return out


def corrupt_media(place: Scenario) -> Outcome:
    from PIL import Image

    out = Outcome("corrupt media", "is replaced and listed; too many end the run")
    media = place.folder / "media"
    media.mkdir()
    for i in range(20):
        Image.new("L", (4, 4), i * 12).save(media / f"{i:02d}.png")
    (media / "03.png").write_bytes((media / "03.png").read_bytes()[:40])
    (media / "07.png").write_bytes(b"no picture")
    data = {"data__source": "folder", "data__folder": str(media)}
    broken = Scenario(place.folder, write_config(place.folder / "media.yaml", **data), place.reference, place.layout)
    out.ended(broken.train(), 0)
    listed = (place.run / "skipped.jsonl").read_text() if (place.run / "skipped.jsonl").exists() else ""
    out.expect("03.png" in listed and "07.png" in listed, f"skipped.jsonl holds {listed!r}")
    for i in range(10):
        (media / f"{i:02d}.png").write_bytes(b"no picture")
    broken.folder = place.folder / "again"
    broken.folder.mkdir()
    out.ended(broken.train(), 2, "data.max_unreadable")
    return out


def worker_killed(place: Scenario) -> Outcome:
    out = Outcome("data worker killed", "ends with 1 and the reason, goes on")
    children = place.start("train.workers=1", "train.steps=100000")
    place.until(4)
    workers = _data_workers(children[0])
    out.expect(bool(workers), "no worker was found")
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    out.ended(place.wait(children), 1, "worker", "train.workers")
    out.ended(place.wait(place.start("train.steps=12", "train.workers=0")), 0)
    out.went_on(place.run, place.reference)
    return out


def _data_workers(pid: int) -> list[int]:
    """Processes that read data for this one, and not what starts them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[2]) == pid and int(entry.name) != pid and b"resource_tracker" not in words:  # of its session
                found.append((int(fields[1]), int(entry.name)))
    parents = {parent for parent, _ in found}
    return [child for _, child in found if child not in parents]


def clock_jump(place: Scenario) -> Outcome:
    out = Outcome("clock jumps by days, forth and back", "changes nothing")

    def jump() -> None:
        true, asked = time.time, [0]

        def time_() -> float:
            asked[0] += 1
            return true() + (-1) ** asked[0] * 864_000

        time.time = time_

    out.ended(place.wait(place.start(before=jump)), 0)
    out.went_on(place.run, place.reference)
    return out


def two_on_one(place: Scenario) -> Outcome:
    out = Outcome("two processes on one run folder", "the second ends with 3, the first is not disturbed")
    first = place.start()
    place.until(2)
    second = processes.start(["train", str(place.config), "--run", str(place.run)], place.folder / "second", place.run)
    out.ended(processes.wait([second], place.folder / "second"), 3, "is in use by", str(first[0]))
    out.ended(place.wait(first), 0)
    out.went_on(place.run, place.reference)
    return out


EVERYWHERE = (sigterm, full_disk, flipped_byte, missing_shard, clock_jump, nan_batch, two_on_one)
ALONE_ONLY = (read_only, disk_fills_up, corrupt_media, worker_killed)


def run_faults(faults: tuple[Callable[[Scenario], Outcome], ...], folder: Path, config: Path, reference: Path, layout: Layout,
         tell: Callable[[str], None]) -> list[Outcome]:  # fmt: skip
    """Each in a folder of its own."""
    found = []
    for fault in faults:
        place = Scenario(folder / fault.__name__, config, reference, layout)
        shutil.rmtree(place.folder, ignore_errors=True)
        place.folder.mkdir(parents=True)
        try:
            outcome = fault(place)
        except Exception as error:  # of the scenario itself: it counts as failed
            outcome = Outcome(fault.__name__, "", wrong=[f"{type(error).__name__}: {error}"])
        tell(f"{layout.name}: {outcome.name}: {'as promised' if not outcome.wrong else outcome.wrong}")
        found.append(outcome)
    return found
