"""Opens untrusted images and videos: allow-lists of formats, and limits on pixels, frames, bytes and seconds."""

from __future__ import annotations

import io
import os
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from PIL import Image, features
from pydantic import Field

from kineograph.core.config import Config
from kineograph.core.errors import Unreadable

# Meter names the limit of pixels, and the files beyond it.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Pillow's other decoders start programs (EPS), read further files (FITS, WMF) or are rarely tested.
IMAGE_FORMATS: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "TIFF", "GIF")
# dav1d and OpenJPEG, which browsers run on untrusted files too; Pillow may be built without them.
if "avif" in features.modules and features.check_module("avif"):
    IMAGE_FORMATS += ("AVIF",)
if features.check_codec("jpg_2000"):
    IMAGE_FORMATS += ("JPEG2000",)
# Containers. FFmpeg's playlists and scripts (hls, concat …) would open further files and URLs.
_SOUND_FORMATS = "wav,"
_VIDEO_FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif"
_PILLOW_PIXELS = 2 * 89_478_485  # Pillow refuses more


class MediaLimits(Config):
    """Limits for one item; a larger one is unreadable."""

    pixels: int = Field(_PILLOW_PIXELS, ge=1, le=_PILLOW_PIXELS)
    """Pixels of a frame."""
    frames: int = Field(100_000, ge=1, lt=2**31)
    """Frames decoded to reach those that are used."""
    animation_pixels: int = Field(2**31, ge=1, lt=2**48)
    """Pixels of all frames of a GIF, WebP or APNG: these are decoded from the first frame on."""
    bytes: int = Field(2**30, ge=1, lt=2**63)
    """Bytes of an image, an animation or a member of a tar: these are read into memory."""
    seconds: float = Field(120.0, gt=0, le=86_400)
    """Seconds to decode it; waiting for a core or the disk does not count."""


class Stopwatch:
    """CPU seconds of the thread that makes it, in which decoders work.

    Waiting for a core of a busy machine or for a slow disk does not count, nor does the work of other threads: none is a fault of the file.
    """

    def __init__(self) -> None:
        self._began = time.thread_time()

    def seconds(self) -> float:
        return time.thread_time() - self._began


class Meter:
    """Counts what decoding one item takes, and raises Unreadable beyond the limits."""

    def __init__(self, limits: MediaLimits) -> None:
        self.limits, self.frames = limits, 0
        self._stopwatch = Stopwatch()

    def check_time(self) -> None:
        if self._stopwatch.seconds() > self.limits.seconds:
            raise Unreadable("", f"takes more than {self.limits.seconds:g} s to decode (data.limits.seconds)")

    def check_count(self, frames: int) -> None:
        if frames > self.limits.frames:
            raise Unreadable("", f"more than {self.limits.frames:,} frames (data.limits.frames)")

    def check_size(self, width: int, height: int) -> None:
        if width * height > self.limits.pixels:
            reason = f"too large: {width} × {height} pixels, and no more than {self.limits.pixels:,} are decoded"
            raise Unreadable("", f"{reason} (data.limits.pixels); scale it down first")

    def check_animation(self, frames: int, width: int, height: int) -> None:
        """Before it is decoded, and again as it is: the canvas of a GIF may grow."""
        self.check_count(frames)
        if frames * width * height > self.limits.animation_pixels:
            reason = f"too large: {frames:,} frames of {width} × {height} pixels, and no more than {self.limits.animation_pixels:,}"
            raise Unreadable(
                "", f"{reason} pixels in all are decoded (data.limits.animation_pixels); scale it down or cut it"
            )

    def count_frame(self, width: int, height: int) -> None:
        """Before or after each decoded frame."""
        self.frames += 1
        self.check_time()
        self.check_count(self.frames)
        self.check_size(width, height)


def read_media(path: Path, limits: MediaLimits) -> bytes:
    """Read a file into memory."""
    size = _check_regular(path)
    check_bytes(size, limits)
    with open(path, "rb") as file:
        data = file.read(limits.bytes + 1)  # it may grow
    check_bytes(len(data), limits)
    return data


def check_bytes(size: int, limits: MediaLimits) -> None:
    if size > limits.bytes:
        raise Unreadable("", f"{size:,} bytes, and no more than {limits.bytes:,} are read (data.limits.bytes)")


def _check_regular(path: Path) -> int:
    """→ its size. A pipe or device would block, or never end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable("", "not a regular file")
    return status.st_size


def open_image(data: bytes) -> Image.Image:
    """Open an image by its content, whatever its name."""
    if not data:
        raise Unreadable("", "empty file (0 bytes)")
    return Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)


def is_animation(image: Image.Image) -> bool:
    """False for the pages of a TIFF, which Pillow would count one by one, and for the second view that phones store inside a JPEG (MPO)."""
    return image.format in ("GIF", "WEBP", "PNG") and getattr(image, "is_animated", False)


def read_gif_delays(data: bytes, meter: Meter, truncated: bool = False) -> list[float]:
    """Each frame's delay in seconds, read from the control blocks without decoding pixels."""
    delays: list[float] = []
    delay = 0.0
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)  # header, global palette
    try:
        while at < len(data) and data[at] in (0x21, 0x2C):
            if data[at] == 0x21:  # an extension; F9 is the graphic control
                if data[at + 1] == 0xF9:
                    delay = int.from_bytes(data[at + 4 : at + 6], "little") / 100
                at = _skip_blocks(data, at + 2)
            else:  # an image: descriptor, local palette, LZW code size, blocks
                flags = data[at + 9]
                at = _skip_blocks(data, at + 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0))
                delays.append(delay)
                meter.check_count(len(delays))
                delay = 0.0
    except IndexError:
        if not truncated or not delays:
            raise Unreadable("", f"truncated GIF: it ends inside frame {len(delays) + 1}") from None
    if not delays:
        raise Unreadable("", "a GIF without frames")
    return delays


def _skip_blocks(data: bytes, at: int) -> int:
    while data[at]:
        at += data[at] + 1
    return at + 1


def open_video(file: Path | io.BytesIO, limits: MediaLimits) -> AbstractContextManager[Any]:
    """Open a video with PyAV. → its container; raises Unreadable without a stream of pictures."""
    container = _open_container(file, _VIDEO_FORMATS, "video")
    if not container.streams.video:
        container.close()
        raise Unreadable("", "no video stream in it (audio only?)")
    stream = container.streams.video[0]
    try:
        if stream.codec_context is None:
            raise Unreadable("", "a video of a codec that cannot be decoded: convert it")
        Meter(limits).check_size(stream.codec_context.width, stream.codec_context.height)
    except Unreadable:
        container.close()
        raise
    stream.codec_context.options = {"max_pixels": str(limits.pixels)}  # frames may be larger than their stream says
    return container


def decode_packets(container: Any, stream: Any) -> Iterator[Any]:
    """Decoded frames, from the current position. FFmpeg's decoders refuse the empty packets by which Theora repeats a picture."""
    for packet in container.demux(stream):
        if packet.size or packet.dts is None:  # the last packet has neither, and flushes the decoder
            yield from packet.decode()


def open_sound(file: Path) -> AbstractContextManager[Any]:
    """Open a WAV file, or a video for its sound track, with PyAV. → its container"""
    return _open_container(file, _SOUND_FORMATS + _VIDEO_FORMATS, "sound or video")


def _open_container(file: Path | io.BytesIO, formats: str, kind: str) -> Any:
    import av

    if not (_check_regular(file) if isinstance(file, Path) else file.getbuffer().nbytes):
        raise Unreadable("", "empty file (0 bytes)")
    # `file:` because FFmpeg takes a name like "10:30 lecture.mp4" for a URL.
    name: Any = f"file:{file}" if isinstance(file, Path) else file
    options = {"format_whitelist": formats, "protocol_whitelist": "file"}
    try:
        return av.open(name, container_options=options)
    except (av.InvalidDataError, av.ArgumentError):
        reason = f"not a {kind} in any format that is read, or cut off before its index was written"
        raise Unreadable("", reason) from None
