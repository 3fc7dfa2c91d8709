"""Clips as sheets of frames: one picture that a page can play in step with others, or embed in a report."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageSequence, UnidentifiedImageError

from kineograph.core.errors import Unreadable
from kineograph.core.safe_media import MediaLimits, Meter, decode_packets, is_animation, open_image, open_video
from kineograph.data.picture import make_upright, pixel_aspect, quarter_turns, to_channels
from kineograph.studio.run_files import OutsideRun, open_file

LIMITS = MediaLimits(pixels=2**26, bytes=2**26, frames=2_000, seconds=20)
FRAMES = 64  # played; of a longer clip an even share
SIDE = 320  # the longer side of a frame of a sheet, at most
SHEET_PIXELS = 2**24  # of all frames together
TOLERANCE = 0.011  # seconds: GIF rounds times to 10 ms


@dataclass(frozen=True)
class Sheet:
    """Frames of equal size in one picture, row by row."""

    data: bytes  # WebP
    frames: int
    columns: int
    width: int  # of a frame
    height: int
    fps: float


def make_thumbnail(run: Path, files: Sequence[str], side: int = 56) -> bytes:
    """The middle frames of some pictures or clips, side by side, as WebP; files that cannot be read are left out."""
    found = []
    for file in files:
        with suppress(OutsideRun, Unreadable, OSError), open_file(run, file) as opened:
            frames, _ = decode_frames(opened.read(LIMITS.bytes), file, 4 * side if len(files) == 1 else side, 16)
            frame = frames[len(frames) // 2]
            if len(files) == 1 and frame.width > frame.height:  # a sheet of its own
                return _encode(frame.resize((round(frame.width * side / frame.height), side)))
            found.append(_enlarge(scale_down(frame, side), side))
    strip = Image.new("RGBA", (max(1, len(found)) * (side + 4) - 4, side))
    for number, frame in enumerate(found):
        strip.paste(frame, (number * (side + 4) + (side - frame.width) // 2, (side - frame.height) // 2))
    return _encode(strip)


def _encode(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "WEBP", quality=85, method=2)
    return out.getvalue()


def make_sheet(run: Path, relative: str, side: int = SIDE, most: int = FRAMES, quality: int = 80) -> Sheet:
    """Decode a picture or clip of a run. Raises OutsideRun, or Unreadable with the reason."""
    with open_file(run, relative) as file:
        data = file.read(LIMITS.bytes + 1)
    if len(data) > LIMITS.bytes:
        raise Unreadable(relative, f"larger than {LIMITS.bytes:,} bytes")
    frames, fps = decode_frames(data, relative, side, most)
    return arrange_sheet(frames, fps, quality)


def arrange_sheet(frames: list[Image.Image], fps: float, quality: int = 80) -> Sheet:
    """Put frames of equal size into one picture; of too many every second, fourth …"""
    width, height = frames[0].size
    while width * height * len(frames) > SHEET_PIXELS and len(frames) > 1:
        frames = frames[::2]
    columns = max(1, min(len(frames), 4_096 // max(1, width)))
    rows = -(-len(frames) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height))
    for number, frame in enumerate(frames):
        sheet.paste(frame, (number % columns * width, number // columns * height))
    out = io.BytesIO()
    # Small pictures without loss: blocks of compression would be seen when they are enlarged.
    sheet.save(out, "WEBP", lossless=width * height <= 128 * 128, quality=quality, method=2)
    return Sheet(out.getvalue(), len(frames), columns, width, height, fps)


def decode_frames(
    data: bytes, name: str, side: int = SIDE, most: int = FRAMES, span: tuple[float, float | None] | None = None
) -> tuple[list[Image.Image], float]:
    """The frames of a picture or clip, scaled down to `side`, and how many of them are shown a second.

    Of a clip with more than `most` frames every second, fourth … one is kept. `span`: only those between two seconds.
    """
    frames: list[Image.Image] = []
    first, end = span or (0.0, None)
    number, now, seconds, stride = 0, 0.0, 0.0, 1
    try:
        for frame, duration in _read(data):
            now += duration
            if now <= first + TOLERANCE:
                continue
            if end is not None and now - duration >= end - TOLERANCE:
                break
            seconds += duration
            if number % stride == 0:
                frames.append(scale_down(frame, side))
            number += 1
            if len(frames) > most:
                frames, stride = frames[::2], 2 * stride
    except Unreadable as error:
        raise Unreadable(name, error.reason) from None
    except Exception as error:  # decoders raise almost anything on damaged files
        raise Unreadable(name, f"cannot be decoded ({error})") from None
    if not frames:
        raise Unreadable(name, "has no frames")
    return frames, min(60.0, max(0.5, len(frames) / seconds)) if seconds > 0 and len(frames) > 1 else 8.0


def _read(data: bytes) -> Iterator[tuple[Image.Image, float]]:
    """Frames with the seconds that each is shown."""
    meter = Meter(LIMITS)
    try:
        picture = open_image(data)
    except UnidentifiedImageError:
        yield from _read_video(data, meter)
        return
    with picture:
        moves = is_animation(picture)
        for frame in ImageSequence.Iterator(picture) if moves else [picture]:
            meter.count_frame(*frame.size)
            frame.load()  # WebP knows the duration only then
            image = to_channels(frame if moves else make_upright(frame), 3)
            milliseconds = frame.info.get("duration") or 0
            yield image, (milliseconds if milliseconds > 10 else 100) / 1000  # as viewers do


def _read_video(data: bytes, meter: Meter) -> Iterator[tuple[Image.Image, float]]:
    import av

    try:
        with open_video(io.BytesIO(data), LIMITS) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the meter counts this thread
            spacing = 1 / float(stream.average_rate or stream.guessed_rate or 8)
            for frame in decode_packets(container, stream):
                meter.count_frame(frame.width, frame.height)
                image = frame.to_image()
                aspect, turns = pixel_aspect(stream), quarter_turns(frame)
                if aspect != 1:
                    image = image.resize((max(1, round(image.width * aspect)), image.height))
                yield image.rotate(90 * turns, expand=True) if turns else image, spacing
    except av.FFmpegError as error:
        raise Unreadable("", f"cannot be decoded ({error.strerror})") from None


def _enlarge(image: Image.Image, side: int) -> Image.Image:
    """A small picture with its pixels as squares."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST) if scale > 1 else image


def scale_down(image: Image.Image, side: int) -> Image.Image:
    scale = side / max(image.size)
    if scale >= 1:
        return image.copy()
    width, height = (max(1, round(length * scale)) for length in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)
