"""One clip or picture to a file and back. The suffix decides the format."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence, UnidentifiedImageError
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.media.frames import atomically, over_black, to_arrays, to_images, to_pixels
from kineograph.media.gif import durations, rate, write_gif
from kineograph.media.grids import film_strip

VIDEO_SUFFIXES = frozenset({".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v"})
STILL_FPS = 8.0  # what a picture without time answers


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
    if not fps > 0:
        raise InputError(f"fps={fps} is not a speed for {path}: use a number above 0")
    with atomically(path) as temporary:
        writer(temporary, pixels, fps)
    return path


def _write_gif(path: Path, pixels: Tensor, fps: float) -> None:
    write_gif(path, to_arrays(pixels), fps)


def _write_png(path: Path, pixels: Tensor, fps: float) -> None:
    image = to_images(pixels)[0] if len(pixels) == 1 else film_strip(pixels)
    image.save(path, format="PNG")


def _write_webp(path: Path, pixels: Tensor, fps: float) -> None:
    first, *rest = to_images(pixels)
    lengths = durations(len(pixels), fps, tick=1000)
    first.save(path, format="WEBP", save_all=True, append_images=rest, duration=lengths, loop=0, lossless=True)


def _write_mp4(path: Path, pixels: Tensor, fps: float) -> None:
    """H.264 in yuv420p, which every player reads; it wants even sizes, so the last row or column is repeated."""
    import av

    frames = np.stack([np.asarray(over_black(image).convert("RGB")) for image in to_images(pixels)])  # T H W 3
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    speed = Fraction(fps).limit_denominator(1001)  # 30000/1001 is the oddest rate in use
    try:
        container = av.open(str(path), "w", options={"movflags": "+faststart"})
        stream = container.add_stream("libx264", rate=speed, options={"crf": "12", "preset": "medium"})
    except (av.FFmpegError, ValueError) as error:
        raise InputError(
            f"{path.suffix} needs an H.264 encoder and this PyAV has none ({error}): write .gif or .webp"
        ) from None
    with container:
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


_WRITERS: dict[str, Callable[[Path, Tensor, float], None]] = {
    ".gif": _write_gif,
    ".mp4": _write_mp4,
    ".png": _write_png,
    ".webp": _write_webp,
}


# Reading ---------------------------------------------------------------------------------------------------------


def read_clip(path: str | Path, channels: int | None = None) -> tuple[Tensor, float]:
    """A picture or clip → pixels T C H W, uint8, and its frames a second; `channels` as asked for, or as the file has."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a picture (png, jpg, webp) or a clip (gif, mp4, webm, mov)")
    images, fps = _read_video(path) if path.suffix.lower() in VIDEO_SUFFIXES else _read_image(path)
    return to_pixels(images, channels), fps


def _read_image(path: Path) -> tuple[list[Image.Image], float]:
    try:
        with Image.open(path) as file:
            kind, images, lengths = file.format, [], []
            for frame in ImageSequence.Iterator(file):
                images.append(frame.copy())
                lengths.append(round(frame.info.get("duration") or 0))  # milliseconds
    except UnidentifiedImageError:
        return _read_video(path)
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if len(images) == 1 or not sum(lengths):
        return images, STILL_FPS
    if kind == "GIF":
        return images, rate([round(length / 10) for length in lengths])
    return images, rate(lengths, tick=1000)


def _read_video(path: Path) -> tuple[list[Image.Image], float]:
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise InputError(
                    f"{path} holds no pictures: give a picture (png, jpg, webp) or a clip (gif, mp4, webm, mov)"
                )
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            images = [Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
            speed = stream.average_rate or stream.guessed_rate
    except av.FFmpegError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not images:
        raise InputError(f"{path} holds no frames that can be read")
    return images, float(speed) if speed else STILL_FPS
