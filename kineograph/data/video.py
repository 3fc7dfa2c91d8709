"""Video files → frames: seek to the keyframe before a random start, decode from there, convert only the frames that are used."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from kineograph.core.errors import Unreadable
from kineograph.core.media_file import MediaLimits, Meter, open_video
from kineograph.data.buckets import MediaInfo
from kineograph.data.decode import MODES, Clip, DecodeOptions, to_channels
from kineograph.data.transforms import TOLERANCE, ImageTransform

if TYPE_CHECKING:
    import av

_UNINDEXED = ("mpegts", "mpeg")
_NO_FRAMES = "a video without frames"


def decode_video(file: Path | io.BytesIO, options: DecodeOptions, rng: np.random.Generator) -> Clip:
    """Frames on screen at s, s + 1/fps …, by timestamps; consecutive frames if no fps is set."""
    meter = Meter(options.limits)
    with open_video(file, options.limits) as container:
        stream = _video_stream(container)
        rate = frame_rate(stream)
        length = (options.frames - 1) * (1 / (options.fps or rate))
        begin, end = options.span or (0.0, math.inf)
        duration = min(_stated_duration(container, stream) or _measure_duration(container, stream, meter), end)
        start = begin + float(rng.random()) * max(duration - length - TOLERANCE - begin, 0.0)
        state = rng.bit_generator.state  # a second attempt must draw the same crop
        frames = _decode_frames(container, stream, start, options, rng, meter)
        if not frames and start > begin:  # the stated duration was wrong, or the tail is missing
            latest = min(_measure_duration(container, stream, meter), end) - length - TOLERANCE
            for retry in (max(min(start, latest), begin), begin):
                rng.bit_generator.state = state
                frames = frames or _decode_frames(container, stream, retry, options, rng, meter)
        if not frames and begin > 0:
            seconds = _measure_duration(container, stream, meter)
            raise Unreadable("", f"its clip begins at {begin:g} s, but it lasts {seconds:.3g} s")
        if not frames:
            raise Unreadable("", _NO_FRAMES)
        return Clip(np.stack(frames), options.fps or rate)


def _decode_frames(
    container: Any, stream: Any, start: float, options: DecodeOptions, rng: np.random.Generator, meter: Meter
) -> list[np.ndarray]:
    """Frames from the one on screen at `start`; fewer if the file ends."""
    begin, end = options.span or (0.0, math.inf)
    decoded = _iterate_frames(container, stream, start, options.truncated, meter)
    frames = _stop_at(end, decoded)
    shown: av.VideoFrame | None = None
    shown_at = 0.0
    for at, frame in frames:  # find the frame on screen at `start`
        if shown is not None and at > start + TOLERANCE:
            break
        shown, shown_at = frame, at
    else:
        at, frame = math.inf, None
    if shown is None or (begin and shown_at + _frame_duration(shown, stream) <= begin + TOLERANCE):
        return []  # no frame, or only frames before the span
    transform = options.resize_crop.draw(shown.width, shown.height, rng, turned=_quarter_turns(shown))
    convert = FrameConverter(options, transform)
    result = [convert(shown)]
    if options.fps is None:
        while frame is not None and len(result) < options.frames:
            result.append(convert(frame))
            frame = next(frames, (0.0, None))[1]
        return result
    first = shown_at
    pixels: np.ndarray | None = result[0]
    while len(result) < options.frames:
        due = first + len(result) / options.fps
        while frame is not None and at <= due + TOLERANCE:
            shown, shown_at, pixels = frame, at, None
            at, frame = next(frames, (math.inf, None))
        if frame is None and due >= min(shown_at + _frame_duration(shown, stream), end) - TOLERANCE:
            break
        pixels = convert(shown) if pixels is None else pixels
        result.append(pixels)
    return result


def _stop_at(end: float, frames: Iterator[tuple[float, av.VideoFrame]]) -> Iterator[tuple[float, av.VideoFrame]]:
    for at, frame in frames:
        if at >= end - TOLERANCE:
            return
        yield at, frame


def _iterate_frames(
    container: Any, stream: Any, start: float, truncated: bool, meter: Meter
) -> Iterator[tuple[float, av.VideoFrame]]:
    """(seconds, frame) from the keyframe at or before `start`, in presentation order."""
    import av

    origin, clock = stream.start_time or 0, float(stream.time_base)
    # Streams without an index: their demuxers land up to a group of pictures too late.
    early = 1.0 if container.format.name in _UNINDEXED else 0.0
    container.seek(origin + int((start - early) / clock), stream=stream, backward=True)
    first = True
    last = -1 / frame_rate(stream)
    try:
        for frame in container.decode(stream):
            meter.count_frame(frame.width, frame.height)
            at = (frame.pts - origin) * clock if frame.pts is not None else last + 1 / frame_rate(stream)
            # The container's index is wrong: restart at the beginning.
            if first and start > 0 and at > start + TOLERANCE:
                yield from _iterate_frames(container, stream, 0.0, truncated, meter)
                return
            first, last = False, at
            yield at, frame
    except av.FFmpegError:
        if not truncated or first:
            where = "no frame can be decoded" if first else f"nothing can be decoded after {last:.3g} s"
            raise Unreadable("", f"damaged or cut off: {where}") from None


class FrameConverter:
    """Decoded frames of one clip → H W C, uint8, with one transform."""

    def __init__(self, options: DecodeOptions, transform: ImageTransform) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        self.options, self.transform = options, transform
        self._reformatter = VideoReformatter()  # reused: creating one costs ten conversions
        self._arguments = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}

    def __call__(self, frame: Any) -> np.ndarray:
        channels = self.options.channels
        has_alpha = any(part.is_alpha for part in frame.format.components)
        layout = "rgba" if has_alpha else "gray" if channels == 1 else "rgb24"
        # FFmpeg follows the frame's own colour matrix and range
        image = Image.fromarray(self._reformatter.reformat(frame, format=layout, **self._arguments).to_ndarray())
        if image.mode != MODES[channels]:
            image = to_channels(image, channels, self.options.background)
        return self.transform.apply(image)


def _quarter_turns(frame: Any) -> int:
    """Anticlockwise turns that set a frame upright: phones store portrait clips rotated, with a display matrix."""
    return round(getattr(frame, "rotation", 0) / 90) % 4


def _upright_size(frame: Any) -> tuple[int, int]:
    return (frame.width, frame.height) if _quarter_turns(frame) % 2 == 0 else (frame.height, frame.width)


def frame_rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 25)


def _frame_duration(frame: Any, stream: Any) -> float:
    return float(frame.duration * stream.time_base) if frame.duration else 1 / frame_rate(stream)


def _stated_duration(container: Any, stream: Any) -> float | None:
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return container.duration / 1e6 if container.duration else None


def _measure_duration(container: Any, stream: Any, meter: Meter) -> float:
    """From the packets, without decoding: for files that were never closed, such as recordings of a stream."""
    origin, clock = stream.start_time or 0, float(stream.time_base)
    container.seek(origin, stream=stream, backward=True)
    longest = -math.inf
    for packet in container.demux(stream):
        meter.check_time()
        if packet.pts is not None:
            longest = max(longest, (packet.pts + (packet.duration or 0) - origin) * clock)
    if longest == -math.inf:
        raise Unreadable("", _NO_FRAMES)
    return longest


def _video_stream(container: Any) -> Any:
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # worker processes are the parallelism
    return stream


def probe_video(file: Path | io.BytesIO, decode_all: bool, limits: MediaLimits) -> MediaInfo:
    """As the container states it, with one frame decoded; or by decoding all frames."""
    meter = Meter(limits)
    with open_video(file, limits) as container:
        stream = _video_stream(container)
        if not decode_all:
            seconds = _stated_duration(container, stream) or _measure_duration(container, stream, meter)
            count = stream.frames or max(1, round(seconds * frame_rate(stream)))
            for _, frame in _iterate_frames(container, stream, 0.0, False, meter):
                return MediaInfo(*_upright_size(frame), count, seconds)
            raise Unreadable("", _NO_FRAMES)
        count, end, size = 0, 0.0, (0, 0)
        for at, frame in _iterate_frames(container, stream, 0.0, False, meter):
            size = size if count else _upright_size(frame)
            count, end = count + 1, at + _frame_duration(frame, stream)
        if not count:
            raise Unreadable("", _NO_FRAMES)
        return MediaInfo(*size, count, end)
