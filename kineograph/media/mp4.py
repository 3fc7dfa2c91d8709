"""MP4 writer, frame by frame: H.264 in yuv420p and AAC at 48 kHz, which every player supports."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.media.frames import blend_over_black, to_images

AAC_RATE = 48_000
AAC_BITS = 96_000  # a second


class Mp4Writer:
    """H.264 needs even sizes, so the last row or column is repeated where needed.

    With a `sample_rate` every frame is written with its sound.
    """

    def __init__(self, path: Path, fps: float, sample_rate: int | None = None) -> None:
        import av

        rate = Fraction(fps).limit_denominator(1001)  # 30000/1001 is the largest denominator in use
        try:
            self._container: Any = av.open(f"file:{path}", "w", options={"movflags": "+faststart"})
        except av.FFmpegError as error:
            raise InputError(f"cannot write {path}: {error}") from None
        try:
            # x264's macroblock tree reads uninitialised memory at some sizes: without it equal pixels give equal bytes.
            options = {"crf": "12", "preset": "medium", "x264-params": "mbtree=0"}
            self._stream: Any = self._container.add_stream("libx264", rate=rate, options=options)
        except (av.FFmpegError, ValueError) as error:
            raise InputError(f".mp4 needs an H.264 encoder and this PyAV has none ({error}): use .gif") from None
        self._rate, self._samples = sample_rate or 0, 0
        self._sound: Any = None
        if sample_rate is not None:
            self._sound = self._container.add_stream("aac", rate=AAC_RATE, layout="mono", bit_rate=AAC_BITS)
        self._empty = True

    def __enter__(self) -> Mp4Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._empty:
                    raise ValueError("a clip needs at least one frame")
                self._container.mux(self._stream.encode(None))
                if self._sound is not None:
                    self._container.mux(self._sound.encode(None))
        finally:
            if not self._empty:  # a stream without a size cannot be closed
                self._container.close()

    def write(self, pixels: Tensor, sound: Tensor | None = None) -> None:
        """Append frames T C H W, uint8 or float in [0, 1], with their sound T S in [−1, 1]."""
        import av

        for image in to_images(pixels):
            frame = np.asarray(blend_over_black(image).convert("RGB"))  # H W 3
            frame = np.pad(frame, ((0, image.height % 2), (0, image.width % 2), (0, 0)), mode="edge")
            if self._empty:
                self._stream.height, self._stream.width, _ = frame.shape
                self._stream.pix_fmt = "yuv420p"
                self._empty = False
            self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        if self._sound is not None and sound is not None:
            samples = sound.detach().float().cpu().clamp(-1, 1).reshape(1, -1).contiguous().numpy()
            part = av.AudioFrame.from_ndarray(samples, format="flt", layout="mono")
            part.sample_rate, part.pts, part.time_base = self._rate, self._samples, Fraction(1, self._rate)
            self._samples += samples.shape[1]
            self._container.mux(self._sound.encode(part))
