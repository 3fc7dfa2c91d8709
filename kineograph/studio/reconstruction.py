"""One item of a dataset through a trained codec, for the process that draws."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kineograph.core.batch import Batch, Sample
from kineograph.core.capabilities import SupportsReconstruction
from kineograph.core.errors import InputError
from kineograph.core.noise import numpy_rng
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.data.array_layout import FPS
from kineograph.data.decode import decode_media
from kineograph.data.media_config import MediaConfig
from kineograph.data.transforms import pad_frames, pick_window, resize_frames
from kineograph.evaluate.similarity import psnr
from kineograph.media.clips import write_clip
from kineograph.media.filenames import slugify
from kineograph.stage.spec import read_stage
from kineograph.studio.dataset import DatasetItem
from kineograph.studio.item_frames import read_array_item, read_item
from kineograph.studio.run_files import find_file


def reconstruct_item(
    task: Task, run: RunFolder, stage: str, step: int, folder: Path, item: DatasetItem, out: Path
) -> tuple[Path, str]:
    """Write an item as the stage reads it, beside the stage's reconstruction. → the path, and how close they are"""
    if not isinstance(task, SupportsReconstruction) or not task.can_reconstruct():
        raise InputError(f"{stage} does not rebuild pictures: choose a tokenizer or autoencoder")
    data = read_stage(run.config(), stage).data
    # A stage that was trained on other sources reads the item at its own size, length, speed and channels.
    shape = {name: getattr(data, name) for name in ("size", "frames", "fps", "channels")}
    config = data if isinstance(data, MediaConfig) else MediaConfig(**shape)
    clip, fps = _read_clip(folder, item, config)
    pixels, mask = pad_frames(clip, config.frames)
    sample = Sample(pixels=pixels, frame_mask=mask, fps=fps or config.shape.fps)
    batch = Batch.collate([sample], [0]).to(next(task.parameters()).device)
    with torch.inference_mode():
        rebuilt = task.reconstruct(batch)[0].float().cpu().clamp(0, 1)[mask]  # T C H W
    real = batch.video[0].cpu()[mask]
    changed = find_file(folder, item.file).stat().st_mtime_ns
    digest = hashlib.sha256(f"{folder}\0{item.key}\0{changed}\0{stage}\0{step}".encode("utf-8", "surrogateescape"))
    suffix = ".png" if len(real) == 1 else ".gif"
    out.mkdir(exist_ok=True)
    if out.is_symlink():
        raise InputError(f"{out} is a link: remove it")
    path = write_clip(
        out / f"{slugify(item.name)[:40]}-{digest.hexdigest()[:12]}{suffix}",
        torch.cat([real, rebuilt], dim=3),
        sample.fps or 8.0,
    )
    return path, f"PSNR {float(psnr(real, rebuilt).mean()):.1f} dB"


def _read_clip(folder: Path, item: DatasetItem, config: MediaConfig) -> tuple[np.ndarray, float | None]:
    """T H W C, as the source reads them for validation, and their frame rate."""
    rng = numpy_rng(0, "reconstruct")
    if item.is_array:
        frames = read_array_item(folder, item)
        frames = frames[pick_window(len(frames), config.frames, rng)]
        return resize_frames(frames, config.size, config.channels), FPS
    options, suffix = config.decode_options("validation"), Path(item.member).suffix
    if item.start is not None:
        options = replace(options, span=(item.start, math.inf if item.end is None else item.end))
    file = find_file(folder, item.name) if item.place is None else read_item(folder, item)
    clip = decode_media(file, suffix, item.name, options, rng)
    return clip.pixels, clip.fps
