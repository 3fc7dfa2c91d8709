"""Animated GIFs with exactly the frames and the timing that were asked for, written as the frames come.

Pillow compresses and decodes the frames; the few bytes around them are written here, because its own animation writer merges equal
neighbours into one longer frame, and then a clip of 16 frames may come back as 11.
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

SHORTEST = 2  # hundredths of a second; viewers play anything shorter at a tenth of a second
MAX_FPS = 100 // SHORTEST  # frames a second
_PALETTE_SAMPLE = 16_384  # pixels that the shared palette is fitted to: k-means on more is slow and changes nothing
_IN_MEMORY = 1 << 24  # bytes of packed frames that wait for their palette in memory; more of them wait on disk


def frame_durations(frames: int, fps: float, tick: int = 100) -> list[int]:
    """Ticks (hundredths of a second) a frame: differences of rounded times, so that rounding never adds up."""
    ends = [round(tick * (index + 1) / fps) for index in range(frames)]
    return [max(SHORTEST, end - start) for start, end in zip([0, *ends], ends)]


class GifWriter:
    """Frames H W C uint8, C = 1 … 4, one after another; loops for ever. Alpha becomes transparent or not, at one half.

    One palette for all frames, and so the file itself is written at the end: until then the frames wait, packed, in a nameless
    temporary file. A palette of the first frames would not know the colours of a later scene; one a scene would make the seams flicker.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps = path, fps
        self._waiting = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=str(path.parent))  # noqa: SIM115
        self._sizes: list[int] = []
        self._shape: tuple[int, ...] = ()
        self._colours: Palette | None = None

    def __enter__(self) -> GifWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._waiting:
            if kind is None:
                self._finish()

    def write(self, frame: np.ndarray) -> None:
        """H W C."""
        if self._colours is None:
            self._shape = frame.shape
            self._colours = Palette(255 if self._alpha else 256)
        self._colours.add(frame[..., :-1] if self._alpha else frame)
        self._sizes.append(self._waiting.write(zlib.compress(frame.tobytes(), 1)))

    @property
    def _alpha(self) -> bool:
        return self._shape[-1] in (2, 4)

    def _finish(self) -> None:
        if self._colours is None:
            raise ValueError("a clip needs at least one frame")
        palette = self._colours.palette()
        # Transparent frames each start from nothing.
        options: dict[str, Any] = {"transparency": 255, "disposal": 2} if self._alpha else {}
        height, width, _ = self._shape
        self._waiting.seek(0)
        with self.path.open("wb") as file:
            file.write(
                b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0)
            )  # 0xF7: a global table of 256 colours
            file.write(palette.tobytes().ljust(768, b"\0"))
            file.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")  # loop for ever
            for size, ticks in zip(self._sizes, frame_durations(len(self._sizes), self.fps)):
                frame = np.frombuffer(zlib.decompress(self._waiting.read(size)), np.uint8).reshape(self._shape)
                indices = self._colours.index(frame[..., :-1] if self._alpha else frame)
                if self._alpha:
                    indices = np.where(frame[..., -1] < 128, 255, indices).astype(np.uint8)
                file.writelines(GifImagePlugin.getdata(Image.fromarray(indices), duration=ticks * 10, **options))
            file.write(b"\x3b")


class Palette:
    """The colours of frames that come one after another: which there are, while `limit` is enough, and an even sample of them.

    No dithering, which would make still areas flicker.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._seen: np.ndarray | None = np.zeros(0, np.uint32)  # packed, sorted; None: too many
        self._sample: list[np.ndarray] = []  # N 3 each
        self._sampled, self._stride, self._grey = 0, 1, False
        self._palette = np.zeros((0, 3), np.uint8)

    def add(self, frame: np.ndarray) -> None:
        """H W C, C = 1 or 3."""
        self._grey = frame.shape[-1] == 1
        if self._seen is not None:
            seen = np.union1d(self._seen, _packed(frame))
            self._seen = seen if len(seen) <= max(self.limit, 256 if self._grey else 0) else None
        if self._grey:  # 256 levels are all that there are
            return
        # An odd stride does not stay in a few columns; a copy does not keep the frame, and with it a whole scene, alive.
        part = frame.reshape(-1, 3)[:: self._stride | 1].copy()
        self._sample.append(part)
        self._sampled += len(part)
        if self._sampled > 4 * _PALETTE_SAMPLE:  # every frame keeps its share, however many come
            self._stride *= 2
            self._sample = [np.concatenate(self._sample)[::2]]
            self._sampled = len(self._sample[0])

    def palette(self) -> np.ndarray:
        """N 3, N ≤ limit: exact where that is enough."""
        if self._seen is not None:
            if len(self._seen) > self.limit:  # all greys, with alpha taking one index: the two darkest become one
                self._seen = self._seen[1:]
            seen = self._seen
            self._palette = np.stack([seen >> 16, seen >> 8 & 255, seen & 255], axis=1).astype(np.uint8)
        else:
            flat = np.concatenate(self._sample)
            self._palette = _fit(flat[:: -(-len(flat) // _PALETTE_SAMPLE) | 1], self.limit)
        return self._palette

    def index(self, frame: np.ndarray) -> np.ndarray:
        """H W C → H W, places in the palette."""
        if self._seen is not None:
            return np.searchsorted(self._seen, np.maximum(_packed(frame), self._seen[0])).astype(np.uint8)
        carrier = Image.new("P", (1, 1))
        carrier.putpalette(self._palette.tobytes())
        return np.asarray(Image.fromarray(frame).quantize(palette=carrier, dither=Image.Dither.NONE))


def _packed(frame: np.ndarray) -> np.ndarray:
    """Each pixel as one number, 0xRRGGBB."""
    weights = np.array([0x010101] if frame.shape[-1] == 1 else [1 << 16, 1 << 8, 1], dtype=np.uint32)
    return frame.astype(np.uint32) @ weights


def _fit(sample: np.ndarray, limit: int) -> np.ndarray:
    """A palette for pixels N 3: colours that fill an area (a page, a background) exactly, the rest by median cut and k-means."""
    colours, counts = np.unique(sample, axis=0, return_counts=True)
    frequent = np.argsort(counts)[::-1][: limit // 8]
    exact = colours[frequent[counts[frequent] > len(sample) // 200]]
    fitted = Image.fromarray(sample[None]).quantize(limit - len(exact), method=Image.Quantize.MEDIANCUT, kmeans=1)
    rest = np.asarray(fitted.getpalette("RGB"), dtype=np.uint8).reshape(-1, 3)
    return np.concatenate([exact, rest])[:limit]
