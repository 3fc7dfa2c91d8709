"""Clips and pictures to files and back. The suffix decides the format."""

from __future__ import annotations

import os
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError
from torch import Tensor

from kineograph.core.batch import Sound
from kineograph.core.errors import InputError, Unreadable, explain_oversized_image
from kineograph.core.safe_media import (
    MediaLimits,
    Meter,
    decode_packets,
    is_animation,
    open_image,
    open_video,
    read_gif_delays,
    read_media,
)
from kineograph.media.frames import replace_atomically, to_images
from kineograph.media.gif import GifWriter
from kineograph.media.grids import make_film_strip
from kineograph.media.mp4 import Mp4Writer

CLIP_SUFFIXES = (".gif", ".mp4")
VIDEO_SUFFIXES = frozenset({".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v"})
DEFAULT_FPS = 8.0  # for a video without timestamps and frame rate
_LIMITS = MediaLimits()
_REMEDY = "give a picture (png, jpg, webp) or a clip (gif, mp4, webm, mov)"


def write_clip(path: str | Path, pixels: Tensor, fps: float, sound: Sound | None = None) -> Path:
    """Write T C H W, uint8 or float in [0, 1], as .gif, .mp4 or .png (one frame, or a film strip of several).

    The sound is written as .wav beside it; an .mp4 holds it too. Each file appears complete or not at all.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (*CLIP_SUFFIXES, ".png"):
        raise InputError(f"{path}: {suffix or 'no suffix'} is not a format to write: use .gif, .mp4 or .png")
    with replace_atomically(path) as temporary:
        if suffix == ".png":
            image = to_images(pixels)[0] if len(pixels) == 1 else make_film_strip(pixels)
            image.save(temporary, format="PNG")
        else:
            with open_clip_writer(temporary, fps, sound.rate if sound is not None else None) as clip:
                if isinstance(clip, Mp4Writer):
                    clip.write(pixels, sound.samples if sound is not None else None)
                else:
                    clip.write(pixels)
    if sound is not None:
        write_wav(path.with_suffix(".wav"), sound)
    return path


def choose_format(clip: Tensor, sound: Sound | None = None) -> str:
    """png for a picture, mp4 for a clip with sound, gif for others; T C H W."""
    return "png" if len(clip) == 1 else "gif" if sound is None else "mp4"


def write_wav(path: Path, sound: Sound) -> None:
    """16-bit mono."""
    samples = (sound.samples.detach().float().cpu().clamp(-1, 1) * 32767).round().to(torch.int16)
    with replace_atomically(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sound.rate)
        file.writeframes(samples.numpy().astype("<i2").tobytes())


def open_clip_writer(path: Path, fps: float, sample_rate: int | None = None) -> GifWriter | Mp4Writer:
    """A context manager whose `write` appends frames to a .gif or .mp4 of any length; an .mp4 with `sample_rate` also takes sound.

    The file is complete only when the block ends without an error: use a temporary name, and rename it afterwards.
    """
    if not fps > 0:
        raise InputError(f"fps={fps} is not a speed for {path}: use a number above 0")
    return GifWriter(path, fps) if path.suffix.lower() == ".gif" else Mp4Writer(path, fps, sample_rate)


# Reading ---------------------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    image: Image.Image  # upright
    start: float  # seconds
    kind: str  # GIF, PNG …, or video


def read_frames(path: str | Path) -> Iterator[Frame]:
    """The frames of a picture or clip in playback order, decoded one at a time."""
    path = Path(path)
    if not os.path.isfile(path):  # False for a name that is too long
        raise InputError(f"{path} {'is a folder' if os.path.isdir(path) else 'does not exist'}: {_REMEDY}")
    return _read_video(path) if path.suffix.lower() in VIDEO_SUFFIXES else _read_image(path)


def _read_image(path: Path) -> Iterator[Frame]:
    meter = Meter(_LIMITS)
    try:
        data = read_media(path, _LIMITS)
        with open_image(data) as file:
            if not is_animation(file):
                yield Frame(ImageOps.exif_transpose(file).copy(), 0.0, file.format or "")
                return
            kind = file.format or ""
            frames = (
                len(read_gif_delays(data, meter, truncated=True)) if kind == "GIF" else getattr(file, "n_frames", 1)
            )
            meter.check_animation(frames, *file.size)
            start = 0  # milliseconds
            for frame in ImageSequence.Iterator(file):
                meter.count_frame(*frame.size)
                meter.check_animation(frames, *frame.size)
                image = frame.copy()  # decodes; WebP knows the duration only then
                duration = round(frame.info.get("duration") or 0)
                yield Frame(image, start / 1000, kind)
                start += duration if duration > 10 else 100  # as viewers do
    except UnidentifiedImageError:
        yield from _read_video(path)
    except Image.DecompressionBombError as error:
        raise InputError(f"{path} is {explain_oversized_image(error)}") from None
    except Unreadable as error:
        raise InputError(f"{path} cannot be read ({error.reason}): {_REMEDY}") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({error}): {_REMEDY}") from None


def _read_video(path: Path) -> Iterator[Frame]:
    import av

    start, meter = None, Meter(_LIMITS)
    try:
        with open_video(path, _LIMITS) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the meter counts this thread; each thread would hold frames
            spacing = 1 / float(stream.average_rate or stream.guessed_rate or DEFAULT_FPS)
            for frame in decode_packets(container, stream):
                meter.count_frame(frame.width, frame.height)
                following = 0.0 if start is None else start + spacing
                start = float(frame.time) if frame.time is not None else following
                # Phones store portrait clips sideways, with a rotation tag.
                turns = round(getattr(frame, "rotation", 0) / 90) % 4
                upright = np.rot90(frame.to_ndarray(format="rgb24"), turns)
                yield Frame(Image.fromarray(upright), start, "video")
    except Unreadable as error:
        raise InputError(f"{path} cannot be read ({error.reason}): {_REMEDY}") from None
    except av.FFmpegError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None
    if start is None:
        raise InputError(f"{path} has no readable frames: {_REMEDY}")
