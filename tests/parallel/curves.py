"""Loss curves of small tasks under a layout, with the same batches and noise on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kineograph.codec.vqgan import VQGAN, VQGANConfig
from kineograph.core import distributed
from kineograph.core.batch import Batch, Sample, Shape
from kineograph.core.config import merge, parse
from kineograph.core.task import BuildContext, Task, freeze
from kineograph.family.cogvideox import CogVideoX, CogVideoXConfig
from kineograph.run.launch import process_group
from kineograph.train import checkpoint
from kineograph.train.config import TrainConfig
from kineograph.train.stepper import Stepper
from tests.family.cogvideox.conftest import CAPTIONS, TINY, ToyCodec, enlivened
from tests.train.gathered import gather_state
from tests.train.toy_tasks import Duel, Toy, ToyConfig

TRAIN = {"lr": 1e-2, "batch_size": 8, "steps": 20, "warmup": 0, "clip": 0.05, "ema": {"decay": 0.5}, "timeout": 60}


def toy() -> Task:
    return Toy(12, ToyConfig(task="toy"))


def duel() -> Task:
    return Duel(12, ToyConfig(task="duel"), critic_start=1)


def cogvideox(**keys: Any) -> Task:
    tiny = merge(TINY, {"heads": 4, "head_width": 16, "text": {"dropout": 0}, **keys})
    config = parse(CogVideoXConfig, {"task": "cogvideox", **tiny})
    context = BuildContext(
        shape=Shape(9, 8, 8, 1, 8.0), stage=lambda name: freeze(ToyCodec()), captions=lambda: CAPTIONS, note=len
    )
    return enlivened(CogVideoX.build(config, context))


def gan() -> Task:
    """Two players, an adaptive weight, and an EMA codebook that restarts dead codes."""
    keys = {
        "width": 8, "multipliers": [1, 2], "perceptual": {"weight": 0}, "quantizer": {"kind": "vq", "codes": 32, "dim": 4},
        "adversarial": {"width": 8, "levels": 2, "start": 1, "adaptive": True},
    }  # fmt: skip
    return VQGAN.build(parse(VQGANConfig, keys), BuildContext(Shape(1, 16, 16, 3, 8.0), note=len))


TASKS: dict[str, tuple[Callable[[], Task], tuple[int, ...]]] = {
    "toy": (toy, (1, 3, 2, 2)),
    "duel": (duel, (1, 3, 2, 2)),
    "cogvideox": (cogvideox, (9, 1, 8, 8)),
    "gan": (gan, (1, 3, 16, 16)),
    "cogvideox-3-heads": (lambda: cogvideox(heads=3), (9, 1, 8, 8)),
    "cogvideox-lora": (lambda: cogvideox(tune="lora", init="base"), (9, 1, 8, 8)),
}


def make_batch(shape: tuple[int, ...], step: int, slots: np.ndarray) -> Batch:
    """A sample depends on step and slot alone. Captions of different lengths give ranks different counts."""
    samples = []
    for slot in slots.tolist():
        numbers = torch.Generator().manual_seed(1000 * step + slot)
        pixels = torch.randint(0, 256, shape, generator=numbers, dtype=torch.uint8)
        samples.append(Sample(pixels=pixels, caption="a red one"[: slot % 8 + 1], fps=8.0))
    return Batch.collate(samples, slots.tolist())


def build_stepper(case: dict[str, Any]) -> Stepper:
    torch.manual_seed(0)
    return Stepper(TASKS[case["task"]][0](), TrainConfig(**merge(TRAIN, case.get("train", {}))), seed=3)


def take_steps(stepper: Stepper, case: dict[str, Any], start: int, stop: int) -> list[dict[str, float]]:
    config, shape = stepper.config, TASKS[case["task"]][1]
    rank, world = config.parallel.data_rank_of(distributed.rank(), distributed.world())
    found = []
    for step in range(start, stop):
        rows = case.get("rows", config.batch_size)
        micro = [
            make_batch(shape, step, np.array_split(part, world)[rank])
            for part in np.array_split(np.arange(rows), config.accumulate)
        ]
        if step == case.get("poison"):
            for one in micro if rank == world - 1 else []:
                _poison_next_output(stepper.task, one)
        found.append({name: float(value) for name, value in stepper.step(step, micro).items()})
    return found


def _poison_next_output(task: Task, one: Batch) -> None:
    """Make the next forward pass of this rank return NaN, once."""

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        handle.remove()
        return output * torch.nan

    handle = next(module for module in task.modules() if isinstance(module, torch.nn.Linear)).register_forward_hook(
        spoil
    )


def validation_loss(stepper: Stepper, case: dict[str, Any]) -> float:
    """The mean over all ranks with averaged weights; ranks have different numbers of items."""
    from kineograph.core.noise import Noise

    rank, world = stepper.config.parallel.data_rank_of(distributed.rank(), distributed.world())
    total = torch.zeros(2, dtype=torch.float64)
    with stepper.eval_mode() as task:
        for one in np.array_split(np.arange(7), world)[rank].tolist() if case["task"] != "gan" else []:
            items = make_batch(TASKS[case["task"]][1], 99, np.array([one]))
            mean = task.validate(items, Noise(5, 0, items.slots))["loss"]
            total += torch.tensor([float(mean.sum), float(mean.count)], dtype=torch.float64)
    both = distributed.all_reduce_(total)
    return float(both[0] / both[1])


def train_curve(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train, validate, and leave a checkpoint in `out`."""
    stepper = build_stepper(case)
    steps = take_steps(stepper, case, 0, case.get("steps", 4))
    tensors, state = gather_state(stepper), stepper.state()
    if distributed.is_first():
        checkpoint.save(out / case["name"], len(steps), tensors, {"stepper": state})
    parts = sum(p.numel() for optimizer in stepper.optimizers.values() for p in optimizer.parts.values())
    return {
        "steps": steps,
        "validation": validation_loss(stepper, case),
        "parts": parts,
        "skipped": float(stepper.skipped),
    }


def resume_curve(case: dict[str, Any], before: Path) -> dict[str, Any]:
    """Resume from the checkpoint that `train_curve` of case["after"] left in `before`."""
    stepper = build_stepper(case)
    stepper.load(checkpoint.checkpoint_at(before / case["after"], case["from"]))
    return {"steps": take_steps(stepper, case, case["from"], case["steps"])}


def run_cases(cases: list[dict[str, Any]], out: str, before: str = "") -> dict[str, Any]:
    """Run all cases, one after another, in this process group."""
    with process_group():
        return {
            case["name"]: resume_curve(case, Path(before)) if "after" in case else train_curve(case, Path(out))
            for case in cases
        }
