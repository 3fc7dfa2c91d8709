"""Embedded colour profiles (ICC): phones store Display P3, cameras Adobe RGB, printers CMYK; models are trained on sRGB."""

from __future__ import annotations

import io
import warnings
from functools import lru_cache
from typing import Any

from PIL import Image, ImageCms

_OUTPUT = {"RGB": "RGB", "RGBA": "RGBA", "CMYK": "RGB", "L": "RGB"}  # mode → mode after conversion


def convert_to_srgb(image: Image.Image) -> Image.Image:
    """Convert an image with a colour profile to sRGB; one without, or whose profile cannot be used, stays as it is."""
    profile = image.info.get("icc_profile")
    if not profile:
        return image
    if image.mode == "P" or "transparency" in image.info:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if image.mode not in _OUTPUT:  # 16 bits, float, gray with alpha: Pillow converts none of these
        return image
    try:
        transform = _build_transform(profile, image.mode)
        converted = image if transform is None else ImageCms.applyTransform(image, transform)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        warnings.warn(
            "a picture has a colour profile (ICC) that cannot be used, and is read as sRGB; kineo data check counts these",
            stacklevel=2,
        )
        return image
    assert converted is not None
    return converted


def has_usable_profile(image: Image.Image) -> bool:
    """Whether the image has no profile, or one that fits it. Reads the header only."""
    mode = "RGB" if image.mode == "P" else image.mode
    profile = image.info.get("icc_profile")
    if not profile or mode not in _OUTPUT:
        return True
    try:
        _build_transform(profile, mode)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return False
    return True


@lru_cache(maxsize=64)  # the pictures of one camera share their profile
def _build_transform(profile: bytes, mode: str) -> Any:
    """A transform to sRGB; None if the profile is sRGB."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if mode.startswith("RGB") and "srgb" in (source.profile.profile_description or "").lower():
        return None
    return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, _OUTPUT[mode])
