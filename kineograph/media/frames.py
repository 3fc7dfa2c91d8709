"""Pixels T C H W ⇄ arrays and Pillow images, of 1 to 4 channels."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from kineograph.core.errors import InputError


def to_uint8(pixels: Tensor) -> Tensor:
    """T C H W, uint8 or float in [0, 1] → uint8 on the CPU. Values out of range are clamped; NaN becomes black."""
    if pixels.ndim != 4 or not 1 <= pixels.shape[1] <= 4 or 0 in pixels.shape:
        raise ValueError(f"pixels have shape {tuple(pixels.shape)}: give T C H W with 1 to 4 channels")
    pixels = pixels.detach().cpu()
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.is_floating_point():
        raise ValueError(f"pixels have type {pixels.dtype}: give uint8, or float in [0, 1]")
    return pixels.float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)


def to_arrays(pixels: Tensor) -> np.ndarray:
    """T C H W → T H W C, uint8."""
    return rearrange(to_uint8(pixels), "t c h w -> t h w c").contiguous().numpy()


def to_images(pixels: Tensor) -> list[Image.Image]:
    """One Pillow image per frame, in the mode of its channels: L, LA, RGB, RGBA."""
    return [to_image(frame) for frame in to_arrays(pixels)]


def to_image(frame: np.ndarray) -> Image.Image:
    """H W C → L, LA, RGB or RGBA."""
    return Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)


def to_pixels(images: list[Image.Image]) -> Tensor:
    """RGB images of one size → T C H W, uint8."""
    frames = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return rearrange(frames, "t h w c -> t c h w").contiguous()


def blend_over_black(image: Image.Image) -> Image.Image:
    """Remove alpha: LA → L, RGBA → RGB."""
    if image.mode not in ("LA", "RGBA"):
        return image
    opaque = image.mode.removesuffix("A")
    return Image.composite(image.convert(opaque), Image.new(opaque, image.size), image.getchannel("A"))


def save_picture(image: Image.Image, path: Path) -> None:
    """Write a .png that appears complete or not at all, and in place of a link, not where it leads."""
    with replace_atomically(path) as temporary:
        image.save(temporary, format="PNG")


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end, or is deleted on an error. Creates the parent folders."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the folder {path.parent}: {error.strerror}; use another") from None
    # A short name: that of a long caption may be near the limit already.
    temporary = path.with_name(f".{secrets.token_hex(4)}.part{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
