"""How data loading and DDP scale with processes on a CPU: `python -m benchmarks.scaling [--processes 1 2] [--seconds 20] [--out DIR]`

Each world size runs on its own, with one thread per process. *Data*: moving digits from each process's loader, 32 samples per process.
*Train*: optimizer steps of a small Muse network under DDP, 32 samples per process, so that perfect scaling doubles the samples per second.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SAMPLES = 32  # per process and step


def main(words: list[str]) -> None:
    options = _build_parser().parse_args(words)
    if options.worker:
        _run_worker(options.seconds)
        return
    rows = [_measure_world(processes, options.seconds) for processes in options.processes]
    first = rows[0]
    print(f"{'processes':>9} {'data/s':>10} {'× per process':>14} {'train/s':>10} {'× per process':>14}")
    for row in rows:
        shares = [row[kind] / first[kind] * first["processes"] / row["processes"] for kind in ("data", "train")]
        print(f"{row['processes']:>9} {row['data']:>10.1f} {shares[0]:>14.2f} {row['train']:>10.1f} {shares[1]:>14.2f}")
    import torch

    from benchmarks.report import write_results

    print(f"written: {write_results(options.out, 'scaling', words, torch.device('cpu'), rows=rows)}")


def _measure_world(processes: int, seconds: float) -> dict[str, Any]:
    """Samples per second over all processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scaling", "--worker", "--seconds", str(seconds)],
            env={**os.environ, **{key: str(value) for key, value in environment.items()}, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in workers]
    if any(process.returncode for process in workers):
        sys.exit("a worker process failed; see its error above")
    return {"processes": processes, **json.loads(outputs[0].splitlines()[-1])}


def _run_worker(seconds: float) -> None:
    import torch

    from kineograph.core import distributed
    from kineograph.data.loader import Loader
    from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
    from kineograph.run.launch import process_group

    torch.set_num_threads(1)
    with process_group():
        source = MovingDigits.open(MovingDigitsConfig(size=(64, 64), frames=16), "train")
        size = SAMPLES * distributed.world()
        loader = Loader(source, seed=0, batch_size=size, rank=distributed.rank(), world=distributed.world())
        batches = loader.steps(0, 1_000_000)
        data = _measure_rate(lambda: next(batches), size, seconds)
        train = _measure_rate(_build_training_step(size), size, seconds)
        if distributed.is_first():
            print(json.dumps({"data": data, "train": train}))


def _build_training_step(size: int) -> Any:
    from itertools import count

    import torch

    from kineograph.core import distributed
    from kineograph.core.batch import Batch
    from kineograph.run import layers
    from kineograph.run.plan import make_plan
    from kineograph.stage.build import PlanBuilder
    from kineograph.train.stepper import Stepper

    words = ["muse-tiny", f"train.batch_size={size}", "stages.generator.text={kind: given, width: 32, length: 8}"]
    plan = make_plan(layers.read_config(words))
    torch.manual_seed(0)
    task = PlanBuilder(plan, {}, lambda line: None).build("generator", torch.device("cpu"))
    stepper = Stepper(task.train(), plan.stages[1].train)
    grid = task.stages["codec"].shape_for(*(plan.stages[1].spec.data.frames, *plan.stages[1].spec.data.size))  # type: ignore[operator]
    rows = size // distributed.world()
    batch = Batch(
        slots=torch.arange(rows) + rows * distributed.rank(),
        tokens=torch.randint(0, 100, (rows, *grid)),
        text_embeds=torch.randn(rows, 8, 32),
        text_mask=torch.ones(rows, 8, dtype=torch.bool),
    )
    steps = count()
    return lambda: stepper.step(next(steps), [batch])


def _measure_rate(call: Any, samples: int, seconds: float) -> float:
    """Samples per second. All processes make the same number of calls: as many as fit into `seconds` on the first one."""
    from kineograph.core import distributed

    for _ in range(3):
        call()
    distributed.barrier()
    start = time.perf_counter()
    call()
    calls = max(3, int(seconds / max(1e-3, distributed.broadcast_object(time.perf_counter() - start))))
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    distributed.barrier()
    return samples * calls / (time.perf_counter() - start)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
