"""Pixels T C H W ⇄ Pillow images: the one place where channel counts, ranges and modes are dealt with."""

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

CHANNELS = (1, 2, 3, 4)  # gray, with alpha, RGB, with alpha


def to_uint8(pixels: Tensor) -> Tensor:
    """T C H W, uint8 or float in [0, 1] → uint8 on the CPU. What is out of range is clamped, what is not a number is black."""
    if pixels.ndim != 4 or pixels.shape[1] not in CHANNELS or 0 in pixels.shape:
        raise ValueError(f"pixels are T C H W with 1 to 4 channels, not {tuple(pixels.shape)}")
    pixels = pixels.detach().cpu()
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.is_floating_point():
        raise ValueError(f"pixels are uint8 or float in [0, 1], not {pixels.dtype}")
    return pixels.float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)


def to_arrays(pixels: Tensor) -> np.ndarray:
    """T C H W → T H W C, uint8."""
    return rearrange(to_uint8(pixels), "t c h w -> t h w c").contiguous().numpy()


def to_images(pixels: Tensor) -> list[Image.Image]:
    """One Pillow image a frame, in the mode of its channels: L, LA, RGB, RGBA."""
    return [_image(frame) for frame in to_arrays(pixels)]


def _image(frame: np.ndarray) -> Image.Image:
    return Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)


def to_pixels(images: list[Image.Image]) -> Tensor:
    """RGB images of one size → T C H W, uint8."""
    return rearrange(
        torch.from_numpy(np.stack([np.asarray(image) for image in images])), "t h w c -> t c h w"
    ).contiguous()


def blend_over_black(image: Image.Image) -> Image.Image:
    """Without alpha: blended over black, in L or RGB."""
    if image.mode not in ("LA", "RGBA"):
        return image
    opaque = image.mode.removesuffix("A")
    return Image.composite(image.convert(opaque), Image.new(opaque, image.size), image.getchannel("A"))


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that becomes `path` at the end, or vanishes on an error. Makes the parent folders."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent} cannot be made to write {path.name} in: {error.strerror}") from None
    temporary = path.with_name(
        f".{secrets.token_hex(4)}.part{path.suffix}"
    )  # short: a caption's name may be near the limit
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
