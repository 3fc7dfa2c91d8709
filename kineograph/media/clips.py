"""One clip or picture to a file and back. The suffix decides the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.oversize import too_large
from kineograph.media.frames import replace_atomically, to_arrays, to_images
from kineograph.media.gif import GifWriter, frame_durations
from kineograph.media.grids import make_film_strip
from kineograph.media.mp4 import Mp4Writer

VIDEO_SUFFIXES = frozenset({".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v"})
_WANTED = "give a picture (png, jpg, webp) or a clip (gif, mp4, webm, mov)"
DEFAULT_FPS = 8.0  # of a film whose frames have no times and which states no speed


def write_clip(path: str | Path, pixels: Tensor, fps: float) -> Path:
    """T C H W, uint8 or float in [0, 1] → .gif, .mp4, .webp or .png (one frame, or a film strip of several).

    The file appears complete or not at all.
    """
    path = Path(path)
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise InputError(
            f"{path}: {path.suffix or 'no suffix'} is not a format that is written: use {', '.join(sorted(_WRITERS))}"
        )
    with replace_atomically(path) as temporary:
        writer(temporary, pixels, _speed(fps, path))
    return path


class ClipWriter(Protocol):
    """A clip that is being written."""

    def write(self, pixels: Tensor) -> None:
        """The next frames, T C H W, uint8 or float in [0, 1]; they need not be kept."""


@contextmanager
def open_clip_writer(path: Path, fps: float) -> Iterator[ClipWriter]:
    """Write a .gif or .mp4 of any length as its frames come. It is complete when the block ends without an error, and
    otherwise of no use: give a temporary name, and rename it afterwards."""
    writer = (Mp4Writer if path.suffix.lower() == ".mp4" else GifWriter)(path, _speed(fps, path))
    with writer:
        yield _Frames(writer)


class _Frames:
    def __init__(self, writer: GifWriter | Mp4Writer) -> None:
        self._writer = writer

    def write(self, pixels: Tensor) -> None:
        for frame in to_arrays(pixels):
            self._writer.write(frame)


def _speed(fps: float, path: Path) -> float:
    if not fps > 0:
        raise InputError(f"fps={fps} is not a speed for {path}: use a number above 0")
    return fps


def _write_moving(path: Path, pixels: Tensor, fps: float) -> None:
    with open_clip_writer(path, fps) as clip:
        clip.write(pixels)


def _write_png(path: Path, pixels: Tensor, fps: float) -> None:
    image = to_images(pixels)[0] if len(pixels) == 1 else make_film_strip(pixels)
    image.save(path, format="PNG")


def _write_webp(path: Path, pixels: Tensor, fps: float) -> None:
    first, *rest = to_images(pixels)
    lengths = frame_durations(len(pixels), fps, tick=1000)
    first.save(path, format="WEBP", save_all=True, append_images=rest, duration=lengths, loop=0, lossless=True)


_WRITERS: dict[str, Callable[[Path, Tensor, float], None]] = {
    ".gif": _write_moving,
    ".mp4": _write_moving,
    ".png": _write_png,
    ".webp": _write_webp,
}


# Reading ---------------------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """A frame of a file, upright."""

    image: Image.Image
    start: float  # seconds
    kind: str  # GIF, PNG …, or video


def read_frames(path: str | Path) -> Iterator[Frame]:
    """The frames of a picture or clip in the order shown, decoded as they are asked for."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: {_WANTED}")
    return _video_frames(path) if path.suffix.lower() in VIDEO_SUFFIXES else _image_frames(path)


def _image_frames(path: Path) -> Iterator[Frame]:
    try:
        with Image.open(path) as file:
            # Not the pages of a TIFF, nor the second view that phones keep inside a JPEG.
            if file.format not in ("GIF", "WEBP", "PNG") or not getattr(file, "is_animated", False):
                yield Frame(ImageOps.exif_transpose(file).copy(), 0.0, file.format or "")
                return
            at = 0
            for frame in ImageSequence.Iterator(file):
                image = frame.copy()  # decoded; only then does WebP tell its duration
                length = round(frame.info.get("duration") or 0)
                yield Frame(image, at / 1000, file.format)
                at += length if length > 10 else 100  # as viewers do
    except UnidentifiedImageError:
        yield from _video_frames(path)
    except Image.DecompressionBombError as error:
        raise InputError(f"{path} is {too_large(error)}") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({error}): {_WANTED}") from None


def _video_frames(path: Path) -> Iterator[Frame]:
    import av

    start = None
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise InputError(f"{path} holds no pictures: {_WANTED}")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            spacing = 1 / float(stream.average_rate or stream.guessed_rate or DEFAULT_FPS)
            for frame in container.decode(stream):
                following = 0.0 if start is None else start + spacing
                start = float(frame.time) if frame.time is not None else following
                turns = (
                    round(getattr(frame, "rotation", 0) / 90) % 4
                )  # phones store portrait clips lying down, with a note
                upright = np.rot90(frame.to_ndarray(format="rgb24"), turns)
                yield Frame(Image.fromarray(upright), start, "video")
    except av.FFmpegError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {_WANTED}") from None
    if start is None:
        raise InputError(f"{path} holds no frames that can be read: {_WANTED}")
