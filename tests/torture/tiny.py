"""The smallest run that still has everything: two stages, two players, averages, dropout, validation, snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.utils.data import Dataset

from kineograph.core.batch import Batch
from kineograph.core.noise import Noise
from tests.train.toy_tasks import Toy, ToyConfig

CONFIG: dict[str, Any] = {
    "seed": 5,
    "data": {"source": "tests.torture.tiny.Squares", "size": 4, "frames": 1, "channels": 1, "validation": 0.15},
    "train": {
        "steps": 12, "batch_size": 8, "log_every": 1, "save_every": 2, "validate_every": 3, "validation_samples": 8, "keep_last": 2,
        "save_every_samples": 40, "sample_every": 0, "workers": 0, "warmup": 2, "accumulate": 2, "ema": {"decay": 0.9},
        "trackers": [], "device": "cpu", "timeout": 60,
    },
    "stages": {
        "duel": {"task": "tests.train.toy_tasks.Duel"},
        "toy": {"task": "tests.train.toy_tasks.Toy", "dropout": 0.1},
    },
}  # fmt: skip


def write_config(path: Path, **changes: Any) -> Path:
    """CONFIG with some keys changed (`train__steps=4`)."""
    from kineograph.core.config import merge, nest

    tree = CONFIG
    for key, value in changes.items():
        tree = merge(tree, nest(key.replace("__", "."), value))
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


class Squares(Dataset):
    """Noise by number; 96 of them."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pixels = np.random.default_rng(index).integers(0, 256, (1, 4, 4), dtype=np.uint8)
        return {"image": torch.from_numpy(pixels)}


class PoisonedConfig(ToyConfig):
    poison: tuple[int, ...] = ()
    """Steps (by their number) whose batches turn into NaN."""


class Poisoned(Toy):
    """Meets batches that are not numbers."""

    Config = PoisonedConfig

    @classmethod
    def build(cls, config: PoisonedConfig, context: Any) -> Poisoned:
        task = super().build(config, context)
        task.poison = config.poison
        return task  # type: ignore[return-value]

    def forward(self, batch: Batch, noise: Noise) -> Any:
        found, wanted, weights = super().forward(batch, noise)
        bad = self.training and noise.step in self.poison
        return found * float("nan") if bad else found, wanted, weights
