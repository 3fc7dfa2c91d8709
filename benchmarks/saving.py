"""How long training stands still for a checkpoint: `python -m benchmarks.saving [--device cuda] [--millions 100] [--seconds 60] [--out DIR]`

The real path: a Task stepped by the Stepper, with moments and moving averages, saved by the Saver. Three ways take turns: no saves, saves in
the background, and saves that are waited for. What a save costs is the difference to the first, divided by the number of saves: the copy to
the host, and what writing in the background takes away from the steps beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.measure import matmul_ceiling
from kineograph.core.batch import Batch
from kineograph.core.config import StageConfig
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Mean, Task
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


def measure(device: torch.device, millions: float, seconds: float, repeat: int, folder: Path) -> dict[str, float]:
    """Seconds of standstill a save, in the background and waited for."""
    depth = max(1, round(millions * 1e6 / (WIDTH * WIDTH + WIDTH)))
    stepper = Stepper(Stack(depth), TrainConfig(steps=1_000_000, batch_size=1, compile=False), device=device)
    batch = Batch(slots=torch.arange(1), latents=torch.randn(1, ROWS * (16 if device.type == "cuda" else 1), WIDTH))
    done = 0

    def train(steps: int, after: Callable[[int], None] = lambda step: None) -> float:
        nonlocal done
        _finish(device)
        began = time.monotonic()
        for number in range(1, steps + 1):
            stepper.step(done, [batch])
            done += 1
            after(number)
        _finish(device)
        return time.monotonic() - began

    train(3)
    one = train(5) / 5
    saver = Saver(folder)
    began = time.monotonic()
    saver.save(0, stepper.held(), {"stepper": stepper.state()})
    first = saver.stalled  # makes the buffers; later ones find them
    saver.wait()
    written = time.monotonic() - began
    size = sum(path.stat().st_size for path in (folder / "step-00000000").iterdir())
    shutil.rmtree(folder / "step-00000000")
    steps = max(4, round(max(seconds, 3 * written) / one))  # so long that the write ends within it
    costs: dict[str, list[float]] = {"background": [], "waited": []}
    copies = []
    for _ in range(repeat):
        alone = train(steps)
        for way in costs:
            before = saver.stalled

            def save(number: int, way: str = way) -> None:
                if number == 1:
                    saver.save(done, stepper.held(), {"stepper": stepper.state()})
                    if way == "waited":
                        saver.wait()

            costs[way].append(train(steps, save) - alone)
            copies += [saver.stalled - before] if way == "background" else []
            saver.wait()
            shutil.rmtree(folder / f"step-{done - steps + 1:08d}")
    with saver:
        pass
    found = {way: statistics.median(values) for way, values in costs.items()}
    return {
        "millions": sum(p.numel() for p in stepper.task.parameters()) / 1e6,
        "checkpoint_mb": size / 1e6,
        "step_ms": one * 1000,
        "steps_between": steps,
        "first_copy_s": first,
        "copy_s": statistics.median(copies),
        "write_s": written - first,
        "background_s": found["background"],
        "waited_s": found["waited"],
        "interval_for_5_percent_s": max(0.0, found["background"]) / SHARE,
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    wanted = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    wanted.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    wanted.add_argument("--millions", type=float, default=20, help="weights (20)")
    wanted.add_argument("--seconds", type=float, default=10, help="of training around each save (10)")
    wanted.add_argument("--repeat", type=int, default=3)
    wanted.add_argument("--folder", type=Path, help="where checkpoints go: the disk that is measured (a temporary one)")
    wanted.add_argument("--out", type=Path, help="where the JSON goes (nowhere)")
    asked = wanted.parse_args()
    device = torch.device(asked.device)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = measure(device, asked.millions, asked.seconds, asked.repeat, Path(folder))
    for name, value in found.items():
        print(f"{name:26} {value:10.3f}")
    if asked.out is not None:
        facts = dataclasses.asdict(machine.describe(device, matmul_ceiling(device, True)))
        path = asked.out / f"{datetime.now(UTC):%Y-%m-%d}-{machine.slug(device)}-saving.json"
        path.write_text(json.dumps({"machine": facts, "saving": found}, indent=2) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
