"""Images of any colour mode → 1 to 4 channels of 8 bits, in sRGB."""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image

from kineograph.core.errors import Unreadable
from kineograph.data.colour_profile import convert_to_srgb

MODES: dict[int, Literal["L", "LA", "RGB", "RGBA"]] = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


def to_channels(image: Image.Image, channels: int, background: str = "white") -> Image.Image:
    """Any mode → L, LA, RGB or RGBA in sRGB. If alpha is dropped, the image is composited over `background`."""
    mode = MODES[channels]
    image = convert_to_srgb(image)
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode.startswith(("I", "F")):
        image = _to_eight_bits(image)
    elif image.mode in ("CMYK", "YCbCr", "HSV"):
        image = image.convert("RGB")
    if not image.has_transparency_data:
        return image.convert(mode)
    layered = image.convert("RGBA")
    if channels in (2, 4):
        return layered.convert(mode)
    return Image.alpha_composite(Image.new("RGBA", image.size, background), layered).convert(mode)


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """16-bit gray (Pillow's I;16 and I): 0 … 65535 → 0 … 255. Float gray (F): 0 … 1 → 0 … 255."""
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    top = 1.0 if image.mode == "F" else 65535.0
    if not 0 <= low <= high <= top:  # also refuses nan
        kind = "float" if top == 1 else "16-bit"
        raise Unreadable("", f"values from {low:g} to {high:g} in a {kind} image: 0 to {top:g} is expected")
    return Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8))
