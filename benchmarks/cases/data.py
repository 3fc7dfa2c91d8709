"""Data: samples per second of one worker process. Multiply by the number of workers and compare with the training step."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.case import Case, Peer, Sizes, Workload
from kineograph.core.batch import Batch
from kineograph.core.protocols import Source


def _build_loading(source: Source, sizes: Sizes) -> Workload:
    """Some batches per call from one running loader, so that the start of the worker is not timed."""
    from kineograph.data.loader import Loader

    loader = Loader(source, seed=0, batch_size=sizes["batch"], workers=sizes["workers"])
    batches = cast(Generator[list[Batch], None, None], loader.steps(0, 1_000_000))

    def call() -> None:
        for _ in range(sizes["batches"]):
            next(batches)

    where = f"{sizes['workers']} worker process" if sizes["workers"] else "no worker process"
    return Workload(
        call, samples=sizes["batch"] * sizes["batches"], notes=[f"{where}, on the CPU"], close=batches.close
    )


def build_digits(sizes: Sizes, device: torch.device) -> Workload:
    from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig

    config = MovingDigitsConfig(size=sizes["pixels"], frames=sizes["frames"])
    return _build_loading(MovingDigits.open(config, "train"), sizes)


def build_folder(sizes: Sizes, device: torch.device) -> Workload:
    from kineograph.data.folder import Folder, FolderConfig

    folder = tempfile.TemporaryDirectory()
    _write_pictures(Path(folder.name), sizes["files"], sizes["file_pixels"])
    config = FolderConfig(folder=folder.name, size=sizes["pixels"], frames=1, validation=0)
    return _delete_on_close(_build_loading(Folder.open(config, "train", seed=0), sizes), folder)


def build_webdataset(sizes: Sizes, device: torch.device) -> Workload:
    from kineograph.data.webdataset import WebDataset, WebDatasetConfig

    folder = _write_shards(sizes)
    config = WebDatasetConfig(shards=folder.name, size=sizes["pixels"], frames=1, validation=0)
    workload = _build_loading(WebDataset.open(config, "train", seed=0), sizes)
    return _delete_on_close(workload, folder)


def build_plain_webdataset(sizes: Sizes, device: torch.device) -> Workload:
    """The pipeline of webdataset's documentation: decoded by Pillow, resized by torchvision (or Pillow), batched in a DataLoader."""
    import webdataset
    from torch.utils.data import DataLoader

    folder = _write_shards(sizes)
    urls = sorted(str(path) for path in Path(folder.name).glob("*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).repeat().shuffle(100).decode("pil")
    dataset = dataset.to_tuple("jpg", "txt").map_tuple(_Resize(sizes["pixels"]), str).batched(sizes["batch"])
    batches = iter(
        DataLoader(
            dataset, batch_size=None, num_workers=sizes["workers"], prefetch_factor=None if not sizes["workers"] else 4
        )
    )

    def call() -> None:
        for _ in range(sizes["batches"]):
            next(batches)

    library = "torchvision" if importlib.util.find_spec("torchvision") else "Pillow"
    return _delete_on_close(
        Workload(
            call,
            samples=sizes["batch"] * sizes["batches"],
            precision="uint8",
            notes=[f"resized by {library}, on the CPU"],
        ),
        folder,
    )


class _Resize:
    """Shorter side to `size` (bicubic, antialiased), centre crop, C H W uint8."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.transform: Callable[[Any], Any] | None = None

    def __call__(self, image: Any) -> torch.Tensor:
        if self.transform is None:
            self.transform = self._torchvision() if importlib.util.find_spec("torchvision") else self._pillow
        return self.transform(image.convert("RGB"))

    def _torchvision(self) -> Callable[[Any], Any]:
        from torchvision import transforms  # type: ignore[import-not-found]

        bicubic = transforms.InterpolationMode.BICUBIC
        steps = [transforms.Resize(self.size, bicubic), transforms.CenterCrop(self.size), transforms.PILToTensor()]
        return transforms.Compose(steps)

    def _pillow(self, image: Any) -> torch.Tensor:
        from PIL import Image, ImageOps

        pixels = ImageOps.fit(image, (self.size, self.size), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()


def _write_shards(sizes: Sizes) -> tempfile.TemporaryDirectory:
    """Write the pictures of `_write_pictures` as four tars."""
    from kineograph.data.shard_writer import ShardWriter

    folder = tempfile.TemporaryDirectory()
    with tempfile.TemporaryDirectory() as pictures, ShardWriter(Path(folder.name), -(-sizes["files"] // 4)) as writer:
        _write_pictures(Path(pictures), sizes["files"], sizes["file_pixels"])
        for path in sorted(Path(pictures).glob("*.jpg")):
            writer.add(path.read_bytes(), "jpg", path.with_suffix(".txt").read_text(encoding="utf-8"), {})
    return folder


def _delete_on_close(workload: Workload, folder: tempfile.TemporaryDirectory) -> Workload:
    """Delete the folder when the workload is closed."""
    stop = workload.close

    def close() -> None:
        stop()
        folder.cleanup()

    workload.close = close
    return workload


def _write_pictures(root: Path, count: int, size: tuple[int, int]) -> None:
    """Write JPEGs with about the detail of a photograph: enlarged coarse noise with fine noise on top."""
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
        ours=build_digits,
        warmup=3,
        repeat=10,
    ),
    Case(
        name="data-folder",
        about="a folder of 640 × 480 JPEGs with captions, resized and cropped to 256 px, one worker",
        sizes={"pixels": 256, "files": 64, "file_pixels": (480, 640), "batch": 16, "batches": 4, "workers": 1},
        small={"pixels": 32, "files": 4, "file_pixels": (48, 64), "batch": 2, "batches": 1, "workers": 0},
        ours=build_folder,
        warmup=3,
        repeat=10,
    ),
    Case(
        name="data-webdataset",
        about="tar shards of 256 px JPEGs with captions, resized to 64 px, one worker; the peer is plain webdataset",
        sizes={"pixels": 64, "files": 512, "file_pixels": (256, 256), "batch": 64, "batches": 8, "workers": 1},
        small={"pixels": 32, "files": 8, "file_pixels": (48, 48), "batch": 2, "batches": 1, "workers": 0},
        ours=build_webdataset,
        peer=Peer("webdataset", "1.0.2", "webdataset", build_plain_webdataset, needs=(), precisions=("fp32",)),
        warmup=3,
        repeat=10,
    ),
)
