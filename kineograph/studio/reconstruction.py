"""One picture or clip of a dataset through a trained codec, for the process that draws."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from kineograph.core.batch import Batch, Sample
from kineograph.core.capabilities import SupportsReconstruction
from kineograph.core.errors import InputError
from kineograph.core.noise import numpy_rng
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.data.decode import decode_media
from kineograph.data.media_config import MediaConfig
from kineograph.data.transforms import pad_frames
from kineograph.evaluate.similarity import psnr
from kineograph.media.clips import write_clip
from kineograph.media.filenames import slugify
from kineograph.stage.spec import read_stage


def reconstruct_file(task: Task, run: RunFolder, stage: str, step: int, file: Path, out: Path) -> tuple[Path, str]:
    """Write a file as the stage reads it, beside the stage's reconstruction. → the path, and how close they are"""
    if not isinstance(task, SupportsReconstruction) or not task.can_reconstruct():
        raise InputError(f"{stage} does not rebuild pictures: choose a tokenizer or autoencoder")
    data = read_stage(run.config(), stage).data
    # A stage that was trained on other sources reads the file at its own size, length, speed and channels.
    shape = {name: getattr(data, name) for name in ("size", "frames", "fps", "channels")}
    config = data if isinstance(data, MediaConfig) else MediaConfig(**shape)
    clip = decode_media(file, file.suffix, file.name, config.decode_options("validation"), numpy_rng(0, "reconstruct"))
    pixels, mask = pad_frames(clip.pixels, config.frames)
    sample = Sample(pixels=pixels, frame_mask=mask, fps=clip.fps or config.shape.fps)
    batch = Batch.collate([sample], [0]).to(next(task.parameters()).device)
    with torch.inference_mode():
        rebuilt = task.reconstruct(batch)[0].float().cpu().clamp(0, 1)[mask]  # T C H W
    real = batch.video[0].cpu()[mask]
    digest = hashlib.sha256(f"{file}\0{file.stat().st_mtime_ns}\0{stage}\0{step}".encode("utf-8", "surrogateescape"))
    suffix = ".png" if len(real) == 1 else ".gif"
    out.mkdir(exist_ok=True)
    if out.is_symlink():
        raise InputError(f"{out} is a link: remove it")
    path = write_clip(
        out / f"{slugify(file.stem)[:40]}-{digest.hexdigest()[:12]}{suffix}",
        torch.cat([real, rebuilt], dim=3),
        sample.fps or 8.0,
    )
    return path, f"PSNR {float(psnr(real, rebuilt).mean()):.1f} dB"
