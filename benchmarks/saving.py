"""How long a checkpoint stops training: `python -m benchmarks.saving [--device cuda] [--millions 100] [--saves 8] [--out DIR]`

The real code path: a Task stepped by the Stepper, with moments and EMA, saved by the Saver. A save in the background costs the copy
to the host, for which training waits, and the slowdown of the steps during the write (their median against that of other steps, times
their number). A save in the foreground costs the copy and the write.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.measure import synchronise
from benchmarks.report import write_results
from kineograph.core.batch import Batch
from kineograph.core.config import StageConfig
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Mean, Task
from kineograph.train import checkpoint
from kineograph.train.config import TrainConfig
from kineograph.train.saver import Saver
from kineograph.train.stepper import Stepper

SHARE = 0.05  # of training time that saving may take
WIDTH = 1024
ROWS = 64


class Stack(Task):
    """A stack of square layers: weights and work in proportion to the depth."""

    Config = StageConfig

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def trainable(self, player: str) -> list[nn.Module]:
        return [self]

    def forward(self, batch: Batch, noise: Noise) -> Tensor:
        assert batch.latents is not None
        x = batch.latents.flatten(0, 1)  # (B N) D
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean(1)

    def loss(self, player: str, shared: Tensor) -> Loss:
        return Loss(Mean(shared.sum(), float(len(shared))))


def measure(device: torch.device, millions: float, saves: int, folder: Path) -> dict[str, float]:
    """Cost of a save, in seconds."""
    depth = max(1, round(millions * 1e6 / (WIDTH * WIDTH + WIDTH)))
    stepper = Stepper(Stack(depth), TrainConfig(steps=1_000_000, batch_size=1, compile=False), device=device)
    batch = Batch(slots=torch.arange(1), latents=torch.randn(1, ROWS * (16 if device.type == "cuda" else 1), WIDTH))
    saver = Saver(folder)
    done = 0

    def step() -> float:
        nonlocal done
        start = time.monotonic()
        stepper.step(done, [batch])
        synchronise(device)
        done += 1
        return time.monotonic() - start

    def save() -> float:
        start = time.monotonic()
        saver.save(done, stepper.local_state(), {"stepper": stepper.state()})
        synchronise(device)
        return time.monotonic() - start

    for _ in range(3):
        step()
    first = save()  # allocates the buffers for later ones
    start = time.monotonic()
    saver.wait()
    write = time.monotonic() - start
    size = sum(path.stat().st_size for path in checkpoint.checkpoint_at(folder, done).path.iterdir())
    copies, during_write, other, counts = [], [], [], []
    for _ in range(saves):
        checkpoint.prune(folder, 1, done)
        copies.append(save())
        written = threading.Event()
        saver.then(written.set)
        steps = []
        while not written.is_set():
            saver.check()
            steps.append(step())
        during_write += steps[:-1]  # the write ended during the last one
        counts.append(max(0.0, len(steps) - 0.5))
        other += [step() for _ in range(len(steps) + 1)]
    with saver:
        pass
    usual = statistics.median(other)
    slowed = max(0.0, statistics.median(during_write) - usual) if during_write else 0.0
    cost = statistics.median(copies) + slowed * statistics.mean(counts)
    return {
        "millions": sum(p.numel() for p in stepper.task.parameters()) / 1e6,
        "checkpoint_mb": size / 1e6,
        "step_ms": usual * 1000,
        "step_beside_a_write_ms": (usual + slowed) * 1000,
        "steps_beside_a_write": statistics.mean(counts),
        "first_copy_s": first,
        "copy_s": statistics.median(copies),
        "write_s": write,
        "background_s": cost,
        "waited_s": statistics.median(copies) + write,
        "interval_for_5_percent_s": cost / SHARE,
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--millions", type=float, default=20, help="million weights (20)")
    parser.add_argument("--saves", type=int, default=8, help="saves to measure (8)")
    parser.add_argument(
        "--folder", type=Path, help="folder of the checkpoints, on the disk to measure (a temporary one)"
    )
    parser.add_argument("--out", type=Path, help="folder of the JSON (none is written)")
    options = parser.parse_args(words)
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measure(device, options.millions, options.saves, Path(folder))
    for name, value in results.items():
        print(f"{name:26} {value:10.3f}")
    if options.out is not None:
        print(f"written: {write_results(options.out, 'saving', words, device, saving=results)}")


if __name__ == "__main__":
    main(sys.argv[1:])
