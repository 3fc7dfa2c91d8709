"""GIF writer, frame by frame, with exact frames and timing.

Pillow compresses the frames. Its own animation writer merges equal neighbours into one longer frame, so that a clip of 16 frames may come
back as 11; therefore the container is written here.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from PIL import GifImagePlugin, Image
from torch import Tensor

from kineograph.media.frames import to_arrays

MIN_TICKS = 2  # hundredths of a second per frame; viewers play shorter ones at a tenth of a second
MAX_FPS = 100 // MIN_TICKS
_PALETTE_SAMPLE = 16_384  # pixels that the palette is fitted to: k-means on more is slow and changes nothing
_IN_MEMORY = 1 << 24  # bytes of compressed frames kept in memory until the palette is known; more go to disk


def frame_durations(frames: int, fps: float) -> list[int]:
    """Ticks (hundredths of a second) per frame: differences of rounded times, so that rounding errors do not add up."""
    ends = [round(100 * (index + 1) / fps) for index in range(frames)]
    return [max(MIN_TICKS, end - start) for start, end in zip([0, *ends], ends)]


class GifWriter:
    """A looping GIF. Alpha is thresholded at one half.

    All frames share one palette, so the file is written at the end; until then they are kept, compressed, in a temporary file. A palette of
    the first frames would lack the colours of later scenes; one per scene would make the cuts flicker.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps = path, fps
        self._frames = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=str(path.parent))  # noqa: SIM115
        self._sizes: list[int] = []
        self._shape: tuple[int, ...] = ()
        self._palette: Palette | None = None

    def __enter__(self) -> GifWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._frames:
            if kind is None:
                self._finish()

    def write(self, pixels: Tensor) -> None:
        """Append frames T C H W, uint8 or float in [0, 1]."""
        for frame in to_arrays(pixels):
            if self._palette is None:
                self._shape = frame.shape
                self._palette = Palette(255 if self._has_alpha else 256)
            self._palette.add(self._colours(frame))
            self._sizes.append(self._frames.write(zlib.compress(frame.tobytes(), 1)))

    @property
    def _has_alpha(self) -> bool:
        return self._shape[-1] in (2, 4)

    def _colours(self, frame: np.ndarray) -> np.ndarray:
        return frame[..., :-1] if self._has_alpha else frame

    def _finish(self) -> None:
        if self._palette is None:
            raise ValueError("a clip needs at least one frame")
        colours = self._palette.fit()
        # disposal 2: clear the canvas before the next frame.
        options: dict[str, Any] = {"transparency": 255, "disposal": 2} if self._has_alpha else {}
        height, width, _ = self._shape
        self._frames.seek(0)
        with self.path.open("wb") as file:
            # 0xF7: a global table of 256 colours
            file.write(b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0))
            file.write(colours.tobytes().ljust(768, b"\0"))
            file.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")  # loop forever
            for size, ticks in zip(self._sizes, frame_durations(len(self._sizes), self.fps)):
                frame = np.frombuffer(zlib.decompress(self._frames.read(size)), np.uint8).reshape(self._shape)
                indices = self._palette.index(self._colours(frame))
                if self._has_alpha:
                    indices = np.where(frame[..., -1] < 128, 255, indices).astype(np.uint8)
                file.writelines(GifImagePlugin.getdata(Image.fromarray(indices), duration=ticks * 10, **options))
            file.write(b"\x3b")


class Palette:
    """Up to `limit` colours for a sequence of frames: exact where they suffice, else fitted to an even sample of the pixels.

    No dithering: it would make still areas flicker.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._seen: np.ndarray | None = np.zeros(0, np.uint32)  # 0xRRGGBB, sorted; None: too many
        self._sample: list[np.ndarray] = []  # N 3 each
        self._sampled, self._stride, self._grey = 0, 1, False
        self._colours = np.zeros((0, 3), np.uint8)

    def add(self, frame: np.ndarray) -> None:
        """H W C, C = 1 or 3."""
        self._grey = frame.shape[-1] == 1
        if self._seen is not None:
            seen = np.union1d(self._seen, _pack(frame))
            self._seen = seen if len(seen) <= max(self.limit, 256 if self._grey else 0) else None
        if self._grey:  # at most 256 levels: always exact
            return
        # An odd stride visits all columns; a view instead of a copy would keep the whole scene in memory.
        part = frame.reshape(-1, 3)[:: self._stride | 1].copy()
        self._sample.append(part)
        self._sampled += len(part)
        if self._sampled > 4 * _PALETTE_SAMPLE:  # halve it: every frame keeps an equal share
            self._stride *= 2
            self._sample = [np.concatenate(self._sample)[::2]]
            self._sampled = len(self._sample[0])

    def fit(self) -> np.ndarray:
        """→ the colours, N 3, N ≤ limit."""
        if self._seen is not None:
            if len(self._seen) > self.limit:  # 256 greys and a transparent index: merge the two darkest
                self._seen = self._seen[1:]
            seen = self._seen
            self._colours = np.stack([seen >> 16, seen >> 8 & 255, seen & 255], axis=1).astype(np.uint8)
        else:
            flat = np.concatenate(self._sample)
            self._colours = _fit(flat[:: -(-len(flat) // _PALETTE_SAMPLE) | 1], self.limit)
        return self._colours

    def index(self, frame: np.ndarray) -> np.ndarray:
        """H W C → H W, indices into the palette."""
        if self._seen is not None:
            return np.searchsorted(self._seen, np.maximum(_pack(frame), self._seen[0])).astype(np.uint8)
        carrier = Image.new("P", (1, 1))
        carrier.putpalette(self._colours.tobytes())
        return np.asarray(Image.fromarray(frame).quantize(palette=carrier, dither=Image.Dither.NONE))


def _pack(frame: np.ndarray) -> np.ndarray:
    """H W C → H W, 0xRRGGBB."""
    weights = np.array([0x010101] if frame.shape[-1] == 1 else [1 << 16, 1 << 8, 1], dtype=np.uint32)
    return frame.astype(np.uint32) @ weights


def _fit(sample: np.ndarray, limit: int) -> np.ndarray:
    """A palette for pixels N 3: frequent colours (a background) exactly, the rest by median cut and k-means."""
    colours, counts = np.unique(sample, axis=0, return_counts=True)
    frequent = np.argsort(counts)[::-1][: limit // 8]
    exact = colours[frequent[counts[frequent] > len(sample) // 200]]
    fitted = Image.fromarray(sample[None]).quantize(limit - len(exact), method=Image.Quantize.MEDIANCUT, kmeans=1)
    rest = np.asarray(fitted.getpalette("RGB"), dtype=np.uint8).reshape(-1, 3)
    return np.concatenate([exact, rest])[:limit]
