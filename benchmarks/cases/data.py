"""Data: how fast one worker process makes samples. Multiply by the workers, and compare with what a step eats."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import cast

import numpy as np
import torch

from benchmarks.case import Case, Sizes, Work
from kineograph.core.batch import Batch
from kineograph.core.seams import Source


def _loading(source: Source, sizes: Sizes) -> Work:
    """A few batches a call from a loader that runs on between calls, so that starting the worker costs nothing here."""
    from kineograph.data.loader import Loader

    loader = Loader(source, seed=0, batch_size=sizes["batch"], workers=sizes["workers"])
    batches = cast(Generator[list[Batch], None, None], loader.steps(0, 1_000_000))

    def call() -> None:
        for _ in range(sizes["batches"]):
            next(batches)

    where = f"{sizes['workers']} worker process" if sizes["workers"] else "no worker process"
    return Work(call, samples=sizes["batch"] * sizes["batches"], notes=[f"{where}, on the CPU"], close=batches.close)


def digits(sizes: Sizes, device: torch.device) -> Work:
    from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig

    config = MovingDigitsConfig(size=sizes["pixels"], frames=sizes["frames"])
    return _loading(MovingDigits.open(config, "train"), sizes)


def folder(sizes: Sizes, device: torch.device) -> Work:
    from kineograph.data.folder import Folder, FolderConfig

    kept = tempfile.TemporaryDirectory()
    _write_pictures(Path(kept.name), sizes["files"], sizes["file_pixels"])
    config = FolderConfig(folder=kept.name, size=sizes["pixels"], frames=1, validation=0)
    work = _loading(Folder.open(config, "train", seed=0), sizes)
    stop = work.close

    def close() -> None:
        stop()
        kept.cleanup()

    work.close = close
    return work


def _write_pictures(root: Path, count: int, size: tuple[int, int]) -> None:
    """JPEGs with the detail of a photograph, neither flat nor noise: coarse noise enlarged, fine noise on top."""
    from PIL import Image

    random = np.random.default_rng(0)
    height, width = size
    for index in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        grain = random.normal(0, 8, (height, width, 1))
        pixels = np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"{index:04}.jpg", quality=90)
        (root / f"{index:04}.txt").write_text(f"picture {index}\n", encoding="utf-8")


CASES = (
    Case(
        name="data-digits",
        about="moving digits, 16 frames of 64 px, one worker",
        sizes={"pixels": 64, "frames": 16, "batch": 32, "batches": 4, "workers": 1},
        small={"pixels": 32, "frames": 4, "batch": 2, "batches": 1, "workers": 0},
        ours=digits,
        warmup=3,
        repeat=10,
    ),
    Case(
        name="data-folder",
        about="a folder of 640 × 480 JPEGs with captions beside, resized and cropped to 256 px, one worker",
        sizes={"pixels": 256, "files": 64, "file_pixels": (480, 640), "batch": 16, "batches": 4, "workers": 1},
        small={"pixels": 32, "files": 4, "file_pixels": (48, 64), "batch": 2, "batches": 1, "workers": 0},
        ours=folder,
        warmup=3,
        repeat=10,
    ),
)
