"""How long training stands still for a checkpoint: `python -m benchmarks.saving [--device cuda] [--millions 100] [--saves 8] [--out DIR]`

The real path: a Task stepped by the Stepper, with moments and moving averages, saved by the Saver. A save costs the copy to the host, for which
training waits, and what writing takes away from the steps beside it: how much longer these take than their neighbours, by medians, times how
many they are. Where a save is waited for it costs the copy and the write.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.measure import matmul_ceiling
from benchmarks.report import File, command_of, run_of
from kineograph.core.batch import Batch
from kineograph.core.config import StageConfig
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Mean, Task
from kineograph.train import checkpoint
from kineograph.train.config import TrainConfig
from kineograph.train.saver import Saver
from kineograph.train.stepper import Stepper

SHARE = 0.05  # of the time that training may stand still
WIDTH = 1024
ROWS = 64


class Stack(Task):
    """Square layers, one after another: as many weights as asked for, and work in proportion."""

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
    """What a save costs, in seconds."""
    depth = max(1, round(millions * 1e6 / (WIDTH * WIDTH + WIDTH)))
    stepper = Stepper(Stack(depth), TrainConfig(steps=1_000_000, batch_size=1, compile=False), device=device)
    batch = Batch(slots=torch.arange(1), latents=torch.randn(1, ROWS * (16 if device.type == "cuda" else 1), WIDTH))
    saver = Saver(folder)
    done = 0

    def step() -> float:
        nonlocal done
        began = time.monotonic()
        stepper.step(done, [batch])
        _finish(device)
        done += 1
        return time.monotonic() - began

    def save() -> float:
        began = time.monotonic()
        saver.save(done, stepper.local_state(), {"stepper": stepper.state()})
        _finish(device)
        return time.monotonic() - began

    for _ in range(3):
        step()
    first = save()  # makes the buffers; later ones find them
    began = time.monotonic()
    saver.wait()
    write = time.monotonic() - began
    size = sum(path.stat().st_size for path in checkpoint.checkpoint_at(folder, done).path.iterdir())
    copies, beside, apart, counts = [], [], [], []
    for _ in range(saves):
        checkpoint.prune(folder, 1, done)
        copies.append(save())
        found = []
        while not saver.is_idle():
            found.append(step())
        beside += found[:-1]  # the write ended within the last
        counts.append(max(0.0, len(found) - 0.5))
        apart += [step() for _ in range(len(found) + 1)]
    with saver:
        pass
    usual = statistics.median(apart)
    slowed = max(0.0, statistics.median(beside) - usual) if beside else 0.0
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


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(words: list[str]) -> None:
    wanted = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    wanted.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    wanted.add_argument("--millions", type=float, default=20, help="weights (20)")
    wanted.add_argument("--saves", type=int, default=8, help="how many are measured (8)")
    wanted.add_argument("--folder", type=Path, help="where checkpoints go: the disk that is measured (a temporary one)")
    wanted.add_argument("--out", type=Path, help="where the JSON goes (nowhere)")
    asked = wanted.parse_args(words)
    device = torch.device(asked.device)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = measure(device, asked.millions, asked.saves, Path(folder))
    for name, value in found.items():
        print(f"{name:26} {value:10.3f}")
    if asked.out is not None:
        facts = machine.describe(device, matmul_ceiling(device, True))
        run = run_of(facts, command_of("benchmarks.saving", words), saving=found)
        print(f"written: {File(asked.out, f'saving-{machine.slug(device)}').write(run)}")


if __name__ == "__main__":
    main(sys.argv[1:])
