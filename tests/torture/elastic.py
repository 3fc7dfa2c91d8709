"""torchrun with restarts: of a job whose processes are killed, the launcher starts all again, and the run goes on by itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.subprocesses import free_port, python_path
from tests.torture import processes
from tests.torture.faults import Outcome, Scenario

ROOT = Path(__file__).parents[2]
_RUNNER = "from tests.torture import processes; processes.limit_work(); from kineograph.cli import main; main()"


def elastic(place: Scenario, kills: int, rng: random.Random) -> Outcome:
    """Kill a random worker of `torchrun --max-restarts`, several times."""
    out = Outcome(
        f"torchrun --max-restarts={kills}: {kills} workers killed", "starts all again, goes on by itself, ends with 0"
    )
    script = place.folder / "runner.py"
    script.write_text(_RUNNER)
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(kills), "--monitor-interval", "0.1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--", str(script), "train", str(place.config), "--run", str(place.run),
        *place.layout.words,
    ]  # fmt: skip
    log = place.folder / "log"
    with open(log, "w") as file:
        # A script does not look for modules where it is started.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        job = subprocess.Popen(words, stdout=file, stderr=file, env=env, start_new_session=True)
        done = 0
        for _ in range(kills):
            target = place.lines() + rng.randint(1, 6)
            deadline = time.monotonic() + processes.TIMEOUT
            while place.lines() < target and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            workers = _workers(job.pid, script)
            if job.poll() is None and workers:
                os.kill(rng.choice(workers), signal.SIGKILL)
                done += 1
        try:
            code = job.wait(2 * processes.TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            code = job.wait()
            out.wrong.append("it hung")
    text = log.read_text()
    out.codes.append(code)
    out.message = f"{done} kills; " + next(
        (line for line in text.splitlines() if "from step" in line), "no restart resumed from a checkpoint"
    )
    out.expect(code == 0, f"it ended with {code}: {text[-1500:]}")
    out.expect(done == kills, f"{done} of {kills} workers were killed: the run was too short")
    out.went_on(place.run, place.reference)
    return out


def _workers(launcher: int, script: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == launcher and str(script).encode() in words:
                found.append(int(entry.name))
    return found
