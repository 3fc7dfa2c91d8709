"""The axes of an array of clips or pictures, and its items as 8-bit frames. Without torch: `kineo studio` shows them too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from einops import rearrange

from kineograph.core.errors import InputError, Unreadable

if TYPE_CHECKING:  # imports torch
    from kineograph.data.arrays import Array

FPS = 8.0  # an array does not state its frame rate
Layout = Literal["TNHW", "NTHW", "NTCHW", "NTHWC", "NHW", "NHWC", "NCHW"]
_CHANNELS = (1, 2, 3, 4)
_MAX_ITEMS = 20_000_000  # they are listed by name
_SAMPLE = 64  # items whose values tell the range of 16-bit integers


def infer_layout(shape: tuple[int, ...], counts: set[int]) -> Layout:
    """`counts`: how many labels or captions there are, where known. Refuses what may be read in two ways."""
    if len(shape) == 5:
        before, after = shape[2] in _CHANNELS, shape[4] in _CHANNELS
        if before and after:
            raise InputError(
                f"an array of shape {shape} may be N T C H W or N T H W C: set data.layout=NTCHW or data.layout=NTHWC"
            )
        if not (before or after):
            raise InputError(
                f"an array of shape {shape} has no axis of 1 to 4 channels as N T C H W or N T H W C: transpose it"
            )
        return "NTCHW" if before else "NTHWC"
    if len(shape) == 3 and shape[2] not in _CHANNELS:
        return "NHW"
    if len(shape) != 4:
        raise InputError(
            f"an array of shape {shape} is none of T N H W, N T H W, N T C H W, N T H W C (clips), N H W, N H W C and N C H W (pictures)"
        )
    first, second = shape[:2]
    if shape[3] in _CHANNELS:
        if second in _CHANNELS:
            raise InputError(
                f"an array of shape {shape} has two axes that may be channels: set data.layout=NHWC or data.layout=NCHW"
            )
        return "NHWC"
    if second == 3:
        raise InputError(
            f"an array of shape {shape} may be {first} pictures of {second} channels or {first} gray clips of {second} frames: "
            "set data.layout=NCHW or data.layout=NTHW"
        )
    if first != second:
        if first in counts:
            return "NTHW"
        if second in counts:
            return "TNHW"
        if max(first, second) >= 8 * min(first, second):  # thousands of clips of tens of frames
            return "NTHW" if first > second else "TNHW"
    raise InputError(
        f"an array of shape {shape} may be {first} clips of {second} frames or {second} of {first}: set data.layout=NTHW or data.layout=TNHW"
    )


def describe_layout(shape: tuple[int, ...], layout: Layout) -> str:
    """As "1,000 clips of 16 frames, 64 × 64, 3 channels"."""
    sizes = dict(zip(layout, shape, strict=True))
    items = f"{sizes['N']:,} clips of {sizes['T']} frames" if "T" in sizes else f"{sizes['N']:,} pictures"
    channels = sizes.get("C", 1)
    return (
        f"{items}, {sizes['H']} × {sizes['W']}, {channels} channel{'s' if channels > 1 else ''} (data.layout={layout})"
    )


def check_values(array: Array, layout: Layout) -> None:
    """Refuse arrays without pixels or with too many items, types that are no pixels, and 16-bit integers that do not use their range."""
    count = array.shape[layout.index("N")]
    if 0 in array.shape:
        raise InputError(f"{array.path} has the shape {array.shape}: there are no pixels in it")
    if count > _MAX_ITEMS:
        raise InputError(f"{array.path} has {count:,} items, and no more than {_MAX_ITEMS:,} are read: use tar shards")
    if array.dtype.kind not in "bf" and array.dtype not in (np.uint8, np.uint16):
        raise InputError(f"{array.path} holds {array.dtype}: use uint8, uint16, bool or floats in [0, 1]")
    if array.dtype != np.uint16:
        return
    sample = sorted({int(index) for index in np.linspace(0, count - 1, min(count, _SAMPLE))})
    highest = max((int(np.take(array.values, index, layout.index("N")).max()) for index in sample), default=0)
    if highest < 2**14:
        factor = 65535 // max(highest, 1)
        raise InputError(
            f"{array.path} holds uint16 with values up to {highest} in {len(sample)} items, where 65535 is white: "
            f"save it as uint8, or multiply it by {factor}"
        )


def read_frames(values: np.ndarray, layout: str, item: int, window: slice) -> np.ndarray:
    """Frames of one item: T H W C, as stored."""
    at: dict[str, int | slice] = {"N": item, "T": window}
    frames = np.asarray(values[tuple(at.get(axis, slice(None)) for axis in layout)])
    axes = layout.replace("N", "")
    missing = [axis for axis in "TC" if axis not in axes]
    pattern = f"{' '.join(axes)} -> {' '.join('1' if axis in missing else axis for axis in 'THWC')}"
    return rearrange(frames, pattern.lower())


def to_uint8(frames: np.ndarray, name: str) -> np.ndarray:
    if frames.dtype == np.uint8:
        return frames
    if frames.dtype.kind == "f" and not (frames.min() >= 0 and frames.max() <= 1):  # also refuses nan
        raise Unreadable(name, f"values from {frames.min():g} to {frames.max():g}: floats must lie in [0, 1]")
    white = 65535 if frames.dtype == np.uint16 else 1
    return np.rint(frames.astype(np.float32) * (255 / white)).astype(np.uint8)
