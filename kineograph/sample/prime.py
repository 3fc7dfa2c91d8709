"""`--prime` and `--mask`: frames to continue, or a picture to enlarge or inpaint, in the run's size, colours and frame rate.

A clip is continued from its last frame; the frames before it are taken 1/fps apart. A clip shorter than a window is continued from all its
frames (as many as fit the codec), a longer one from the default overlap.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from kineograph.core.capabilities import can_inpaint
from kineograph.core.config import Config
from kineograph.core.errors import InputError
from kineograph.core.noise import numpy_rng
from kineograph.data.media_config import MediaConfig
from kineograph.data.open_source import DataConfig
from kineograph.data.picture import to_channels
from kineograph.data.transforms import GIF_TOLERANCE, TOLERANCE, ResizeCrop, resize_frames
from kineograph.media.clips import Frame, read_frames
from kineograph.sample.limits import ClipLimits, format_lengths

_MAX_KEPT = 2**29  # pixels of the frames to continue, as they are stored: 2 GiB
Size = tuple[int, int]


@dataclass(frozen=True)
class Prime:
    frames: Tensor  # K C H W, float in [0, 1]
    record: dict[str, Any]  # for the sidecar
    fps: float | None = None  # of the clip to continue, where the run has no frame rate of its own


@dataclass(frozen=True)
class Mask:
    inpaint: Tensor  # H W, bool: True where the picture is drawn anew
    record: dict[str, Any]  # for the sidecar


def read_prime(
    source: str | Path | Tensor,
    limits: ClipLimits,
    data: DataConfig,
    frames: int,
    size: Size | None,
    options: Config | None,
    note: Callable[[str], None],
    masked: bool = False,
) -> Prime:
    """Read the frames that a clip of `frames` frames begins with, or the picture to enlarge or (`masked`) inpaint."""
    height_width = size or (limits.shape.height, limits.shape.width)
    if masked:
        return _read_picture(source, data, height_width, note, "inpainted")
    if limits.enlarges:
        return _read_picture(source, data, limits.prime_size(options) or height_width, note, "enlarged")
    if can_inpaint(limits.task):
        raise InputError(f"--prime: {limits.name} inpaints a part of the picture: name the part with --mask")
    limits.check_continues("--prime")
    lengths = limits.valid_lengths(limits.max_prime(frames), size)
    if not lengths:
        raise InputError(f"--prime: {limits.explain_too_short(frames)}")
    window = limits.max_prime(frames) + 1
    fps: float | None = None
    if isinstance(source, Tensor):
        available = len(source)
        clip = fit_tensor(check_clip(source)[-window:], data, height_width)
    else:
        images, available, fps = _read_last_images(source, data.fps, window)
        clip = fit_images(images, data, height_width)
    most = limits.default_overlap(frames, options) if available >= window else available
    used = max((length for length in lengths if length <= most), default=lengths[0])
    if used > available:
        raise InputError(
            f"--prime {'' if isinstance(source, Tensor) else source} holds {available} frames: "
            f"{limits.name} continues {format_lengths(lengths)}"
        )
    if used < available:
        name = "prime" if isinstance(source, Tensor) else source
        note(f"{name}: continuing the last {used} of {available} frames")
    return Prime(clip[-used:], {**identify(source), "frames": used, "of": available}, fps)


def _read_picture(
    source: str | Path | Tensor, data: DataConfig, size: Size, note: Callable[[str], None], use: str
) -> Prime:
    if isinstance(source, Tensor):
        return Prime(fit_tensor(check_clip(source)[:1], data, size), identify(source))
    frames = list(itertools.islice(read_frames(source), 2))
    if len(frames) > 1:
        note(f"--prime: the first frame is {use}")
    return Prime(fit_images([frames[0].image], data, size), identify(source))


def read_mask(source: str | Path | Tensor, limits: ClipLimits, size: Size) -> Mask:
    """Read H W bool, or a picture whose light half is inpainted."""
    if not can_inpaint(limits.task):
        raise InputError(f"--mask: {limits.name} cannot inpaint; use a run (or with --stage a stage) of dalle2")
    if isinstance(source, Tensor):
        if source.dtype != torch.bool or tuple(source.shape) != size:
            raise InputError(f"mask has shape {tuple(source.shape)} and type {source.dtype}: give H W = {size} as bool")
        inpaint, record = source.cpu(), {}
    else:
        image = next(read_frames(source)).image.convert("L").convert("RGB")
        grey = ResizeCrop(size).draw(*image.size, numpy_rng(0)).apply(image)[..., 0]  # framed as the picture is
        inpaint, record = torch.from_numpy(np.ascontiguousarray(grey)) >= 128, identify(source)
    if not inpaint.any():
        name = "" if isinstance(source, Tensor) else f" {source}"
        raise InputError(f"--mask{name} is all black: make the part to inpaint white")
    return Mask(inpaint, {**record, "share": round(float(inpaint.float().mean()), 4)})


def _read_last_images(path: str | Path, fps: float | None, most: int) -> tuple[list[Image.Image], int, float | None]:
    """→ at most `most` frames up to the last one, the number that the clip has, and without a `data.fps` the clip's own rate.

    Frames are chosen as in training: by timestamps at `fps`, or all of them without one. Only these are kept in memory.
    """
    kept: deque[Frame] = deque()
    count, first, tolerance = 0, 0.0, TOLERANCE
    span = (most - 1) / fps if fps is not None else 0.0
    for count, frame in enumerate(read_frames(path), 1):
        if count == 1:
            first, tolerance = frame.start, GIF_TOLERANCE if frame.kind == "GIF" else TOLERANCE
        kept.append(frame)
        while len(kept) > most if fps is None else len(kept) > 1 and kept[1].start <= frame.start - span + tolerance:
            kept.popleft()
        if len(kept) * frame.image.width * frame.image.height > _MAX_KEPT:
            raise InputError(
                f"--prime {path}: {len(kept)} frames of {frame.image.width} × {frame.image.height} pixels, of which the last {most} are "
                f"continued, and no more than {_MAX_KEPT:,} pixels are kept: scale it down first"
            )
    if fps is None:
        seconds = kept[-1].start - first
        return [frame.image for frame in kept], count, (count - 1) / seconds if seconds > 0 else None
    last = kept[-1].start
    available = int((last - first + tolerance) * fps) + 1
    times = last - np.arange(min(most, available))[::-1] / fps
    starts = np.array([frame.start for frame in kept])
    indices = np.searchsorted(starts, times + tolerance, side="right") - 1
    return [kept[max(0, index)].image for index in indices], available, None


# Size and colours ------------------------------------------------------------------------------------------------


def fit_images(images: list[Image.Image], data: DataConfig, size: Size) -> Tensor:
    """Resize, crop and colour as training data are. → T C H W in [0, 1]."""
    background = data.background if isinstance(data, MediaConfig) else "black"
    place = _framing(data, size).draw(*images[0].size, numpy_rng(0))  # centred: no randomness is used
    frames = [place.apply(to_channels(image, data.channels, background)) for image in images]
    return rearrange(torch.from_numpy(np.stack(frames)), "t h w c -> t c h w").float() / 255


def fit_tensor(clip: Tensor, data: DataConfig, size: Size) -> Tensor:
    if clip.shape[1:] == (data.channels, *size):
        return clip
    frames = rearrange(clip.clamp(0, 1) * 255, "t c h w -> t h w c").round().to(torch.uint8).numpy()
    resized = resize_frames(frames, size, data.channels, _framing(data, size))
    return rearrange(torch.from_numpy(resized), "t h w c -> t c h w").float() / 255


def _framing(data: DataConfig, size: Size) -> ResizeCrop:
    """As for validation items; sources that read no files have no framing of their own."""
    return replace(data.resize_crop.deterministic, size=size) if isinstance(data, MediaConfig) else ResizeCrop(size)


def check_clip(clip: Tensor, name: str = "prime") -> Tensor:
    """Check a given T C H W, uint8 or float in [0, 1]. → float on the CPU."""
    if clip.ndim != 4 or not clip.numel() or clip.shape[1] > 4:
        raise InputError(f"{name} has shape {tuple(clip.shape)}: give frames as T C H W, of 1 to 4 channels")
    clip = (clip if clip.is_floating_point() else clip.float() / 255).float().cpu()
    low, high = clip.aminmax()
    if not (low >= 0 and high <= 1):  # also refuses nan
        raise InputError(f"{name} has values from {low:g} to {high:g}: give uint8, or float in [0, 1]")
    return clip


def identify(source: str | Path | Tensor) -> dict[str, Any]:
    """The sidecar's record of an input: its file, if any, and sha256."""
    if isinstance(source, Tensor):
        return {"sha256": hashlib.sha256(source.detach().cpu().float().contiguous().numpy().tobytes()).hexdigest()}
    with open(source, "rb") as file:
        return {"file": str(source), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
