"""MP4, written as the frames come: H.264 in yuv420p, which every player reads."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image

from kineograph.core.errors import InputError
from kineograph.media.frames import blend_over_black


class Mp4Writer:
    """Frames H W C uint8, C = 1 … 4, one after another. H.264 wants even sizes, so the last row or column is repeated."""

    def __init__(self, path: Path, fps: float) -> None:
        import av

        speed = Fraction(fps).limit_denominator(1001)  # 30000/1001 is the oddest rate in use
        try:
            self._container: Any = av.open(str(path), "w", options={"movflags": "+faststart"})
        except av.FFmpegError as error:
            raise InputError(f"{path} cannot be written: {error}") from None
        try:
            self._stream: Any = self._container.add_stream(
                "libx264", rate=speed, options={"crf": "12", "preset": "medium"}
            )
        except (av.FFmpegError, ValueError) as error:
            raise InputError(
                f"{path.suffix} needs an H.264 encoder and this PyAV has none ({error}): write .gif or .webp"
            ) from None
        self._empty = True

    def __enter__(self) -> Mp4Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._empty:
                    raise ValueError("a clip needs at least one frame")
                self._container.mux(self._stream.encode(None))
        finally:
            if not self._empty:  # a stream without a size cannot be closed, only dropped
                self._container.close()

    def write(self, frame: np.ndarray) -> None:
        """H W C."""
        import av

        image = Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)
        colours = np.asarray(blend_over_black(image).convert("RGB"))  # H W 3
        height, width = colours.shape[:2]
        colours = np.pad(colours, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self._empty:
            self._stream.width, self._stream.height, self._stream.pix_fmt = (
                colours.shape[1],
                colours.shape[0],
                "yuv420p",
            )
            self._empty = False
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(colours, format="rgb24")))
