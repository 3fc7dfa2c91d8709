"""Video files → frames: seek to the keyframe before a random start, decode from there, convert only the frames that are used."""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from kineograph.core.errors import Unreadable
from kineograph.core.safe_media import MediaLimits, Meter, decode_packets, open_video
from kineograph.data.buckets import MediaInfo
from kineograph.data.decode import Clip, LoadedMedia
from kineograph.data.media_config import DecodeOptions
from kineograph.data.picture import MODES, pixel_aspect, quarter_turns, to_channels
from kineograph.data.transforms import TOLERANCE, ResizeCrop
from kineograph.data.trim import UNTRIMMED

if TYPE_CHECKING:
    import av

_UNINDEXED = ("mpegts", "mpeg")
_NO_FRAMES = "a video without frames"
_REORDERED = 32  # packets: none is stored further from its place in presentation order
_COUNTED = 1024  # frames; the number in a longer video follows from its rate


def decode_video(file: Path | io.BytesIO, options: DecodeOptions, rng: np.random.Generator) -> Clip:
    """Frames on screen at s, s + 1/fps …, by timestamps; consecutive frames if no fps is set."""
    meter = Meter(options.limits)
    with open_video(file, options.limits) as container:
        stream = _video_stream(container)
        options = _resolve_trim(file, container, stream, options, meter)
        begin = options.span[0] if options.span else 0.0
        timing = _find_timing(file, container, stream, options, meter)
        if begin >= timing.end - TOLERANCE:
            raise Unreadable("", f"its clip begins at {begin:g} s, but it lasts {timing.end:.3g} s")
        start = begin + float(rng.random()) * max(timing.latest - begin, 0.0)
        state = rng.bit_generator.state  # a second attempt, and a mask, must get the same crop
        shown_at, frames = _decode_frames(container, stream, start, timing, options, rng, meter)
        if not frames and start > begin:  # the packets there are damaged
            rng.bit_generator.state = state
            shown_at, frames = _decode_frames(container, stream, begin, timing, options, rng, meter)
        if not frames:
            raise Unreadable("", _NO_FRAMES)
        origin = timing.first * float(stream.time_base)
        return Clip(np.stack(frames), options.fps or timing.rate, state, shown_at, origin)


def _resolve_trim(
    file: Path | io.BytesIO, container: Any, stream: Any, options: DecodeOptions, meter: Meter
) -> DecodeOptions:
    """The options with the span that data.start, data.end and data.skip_frames leave. Raises Unreadable."""
    if not options.trim:
        return options
    whole = _find_timing(file, container, stream, replace(options, span=None, trim=UNTRIMMED), meter)
    return options.apply_trim(whole.end, whole.rate)


def _decode_frames(
    container: Any,
    stream: Any,
    start: float,
    timing: Timing,
    options: DecodeOptions,
    rng: np.random.Generator,
    meter: Meter,
) -> tuple[float, list[np.ndarray]]:
    """Frames from the one on screen at `start`, and when that one appears; fewer if the file ends."""
    decoded = _iterate_frames(container, stream, start, timing, options.truncated, meter)
    frames = _stop_at(timing.end, decoded)
    shown: av.VideoFrame | None = None
    shown_at = 0.0
    for at, frame in frames:  # find the frame on screen at `start`
        if shown is not None and at > start + TOLERANCE:
            break
        shown, shown_at = frame, at
    else:
        at, frame = math.inf, None
    if shown is None:
        return 0.0, []
    transform = options.resize_crop.draw(shown.width, shown.height, rng, quarter_turns(shown), pixel_aspect(stream))
    converter = FrameConverter(options)

    def convert(frame: av.VideoFrame) -> np.ndarray:
        return transform.apply(converter.to_image(frame))

    result = [convert(shown)]
    if options.fps is None:
        while frame is not None and len(result) < options.frames:
            result.append(convert(frame))
            frame = next(frames, (0.0, None))[1]
        return shown_at, result
    pixels: np.ndarray | None = result[0]
    first = shown_at
    while len(result) < options.frames:
        due = first + len(result) / options.fps
        while frame is not None and at <= due + TOLERANCE:
            shown, pixels = frame, None
            at, frame = next(frames, (math.inf, None))
        if frame is None and due >= timing.end - TOLERANCE:
            break
        pixels = convert(shown) if pixels is None else pixels
        result.append(pixels)
    return first, result


def load_video(file: Path, options: DecodeOptions, limit: int) -> LoadedMedia:
    """Decode all frames, or those of the span. Raises Unreadable, also if they take more than `limit` bytes."""
    meter = Meter(options.limits)
    with open_video(file, options.limits) as container:
        stream = _video_stream(container)
        options = _resolve_trim(file, container, stream, options, meter)
        begin = options.span[0] if options.span else 0.0
        timing = _find_timing(file, container, stream, options, meter)
        decoded = _stop_at(timing.end, _iterate_frames(container, stream, begin, timing, options.truncated, meter))
        frames = _skip_to(begin, decoded)
        at, shown = next(frames, (0.0, None))
        if shown is None or begin >= timing.end - TOLERANCE:
            raise Unreadable("", _NO_FRAMES)
        times = [at]
        converter = FrameConverter(options)

        def convert() -> Iterator[Image.Image]:
            yield converter.to_image(shown)
            for at, frame in frames:
                times.append(at)
                yield converter.to_image(frame)

        size, pick = (shown.width, shown.height), partial(_pick_shown, times, timing, begin)
        rate, turned = options.fps or timing.rate, quarter_turns(shown)
        media = LoadedMedia.of(convert(), limit, size, options, pick, rate, turned, pixel_aspect(stream))
        if times != sorted(times):
            raise Unreadable("", "its frames have no order in time")
        return media


def _skip_to(begin: float, frames: Iterator[tuple[float, av.VideoFrame]]) -> Iterator[tuple[float, av.VideoFrame]]:
    """Frames from the one on screen at `begin`."""
    shown: tuple[float, av.VideoFrame] | None = None
    for at, frame in frames:
        if shown is not None and at > begin + TOLERANCE:
            yield shown
        shown = at, frame
    if shown is not None:
        yield shown


def _pick_shown(
    times: list[float], timing: Timing, begin: float, options: DecodeOptions, rng: np.random.Generator
) -> list[int]:
    """The frames that `decode_video` takes."""

    def shown_at(time: float) -> int:
        return max(bisect_right(times, time + TOLERANCE) - 1, 0)

    first = shown_at(begin + float(rng.random()) * max(timing.latest - begin, 0.0))
    if options.fps is None:
        return list(range(first, min(first + options.frames, len(times))))
    chosen = [first]
    while len(chosen) < options.frames:
        due = times[first] + len(chosen) / options.fps
        index = shown_at(due)
        if index == len(times) - 1 and due >= timing.end - TOLERANCE:
            break
        chosen.append(index)
    return chosen


def _stop_at(end: float, frames: Iterator[tuple[float, av.VideoFrame]]) -> Iterator[tuple[float, av.VideoFrame]]:
    for at, frame in frames:
        if at >= end - TOLERANCE:
            return
        yield at, frame


def _iterate_frames(
    container: Any, stream: Any, start: float, timing: Timing, truncated: bool, meter: Meter, primed: bool = False
) -> Iterator[tuple[float, av.VideoFrame]]:
    """(seconds, frame) from the keyframe at or before `start`, in presentation order.

    `primed`: the decoder has seen the first picture.
    """
    import av

    clock = float(stream.time_base)
    _seek(container, stream, timing.first, start)
    first = True
    last = -1 / timing.rate
    try:
        for frame in decode_packets(container, stream):
            meter.count_frame(frame.width, frame.height)
            at = (frame.pts - timing.first) * clock if frame.pts is not None else last + 1 / timing.rate
            # The container's index is wrong: restart at the beginning.
            if first and start > 0 and at > start + TOLERANCE:
                yield from _iterate_frames(container, stream, 0.0, timing, truncated, meter)
                return
            # The version of x264, which decides how its older 4:4:4 is decoded, stands in the first picture only.
            if first and start > 0 and frame.is_corrupt and not primed:
                _seek(container, stream, timing.first, 0.0)
                next(decode_packets(container, stream), None)
                yield from _iterate_frames(container, stream, start, timing, truncated, meter, primed=True)
                return
            first, last = False, at
            yield at, frame
    except av.FFmpegError:
        if not truncated or first:
            where = "no frame can be decoded" if first else f"nothing can be decoded after {last:.3g} s"
            raise Unreadable("", f"damaged or cut off: {where}") from None


def _seek(container: Any, stream: Any, first: int, seconds: float) -> None:
    """Seek to the keyframe at or before this time; `first` is the first picture's time in the stream's clock."""
    # Streams without an index: their demuxers land up to a group of pictures too late.
    early = 1.0 if container.format.name in _UNINDEXED else 0.0
    _seek_to(container, first + int((seconds - early) / float(stream.time_base)), stream=stream, backward=True)


def _seek_to(container: Any, place: int, **options: Any) -> None:
    import av

    try:
        container.seek(place, **options)
    except av.FFmpegError:  # EPERM, a PermissionError, of a Matroska file without packets
        raise Unreadable("", "damaged or cut off: no frame can be found") from None


class FrameConverter:
    """Decoded frames of one clip → images in the channels of the options."""

    def __init__(self, options: DecodeOptions) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        self.options = options
        self._reformatter = VideoReformatter()  # reused: creating one costs ten conversions
        self._arguments = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}

    def to_image(self, frame: Any) -> Image.Image:
        """The whole frame, as it is stored."""
        channels = self.options.channels
        has_alpha = any(part.is_alpha for part in frame.format.components)
        layout = "rgba" if has_alpha else "gray" if channels == 1 else "rgb24"
        # FFmpeg follows the frame's own colour matrix and range
        image = Image.fromarray(self._reformatter.reformat(frame, format=layout, **self._arguments).to_ndarray())
        if image.mode != MODES[channels]:
            image = to_channels(image, channels, self.options.background)
        return image


def _upright_size(frame: Any, stream: Any) -> tuple[int, int]:
    """Width and height as shown."""
    width = max(1, round(frame.width * pixel_aspect(stream)))
    return (width, frame.height) if quarter_turns(frame) % 2 == 0 else (frame.height, width)


# Timing -----------------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """When the pictures of a video are shown. By their packets: the container states the longest track's duration, or a wrong one."""

    first: int  # the first picture's time, in the stream's clock
    rate: float  # frames a second
    end: float  # seconds from the first picture to the end of the last, or of the span
    latest: float = 0.0  # the latest start of a clip, in seconds


class _Packet(NamedTuple):
    at: int  # in the stream's clock
    duration: int


_timings: dict[tuple, Timing] = {}  # of files; workers inherit what the start-up check has found
_MAX_TIMINGS = 100_000


def _find_timing(file: Path | io.BytesIO, container: Any, stream: Any, options: DecodeOptions, meter: Meter) -> Timing:
    """Measure a video, or remember it."""
    if not isinstance(file, Path):
        return _measure_timing(container, stream, options, meter)
    status = file.stat()
    stop = options.span and options.span[1]
    key = (str(file), status.st_size, status.st_mtime_ns, options.frames, options.fps, stop, options.truncated)
    timing = _timings.get(key)
    if timing is None:
        timing = _measure_timing(container, stream, options, meter)
        if len(_timings) >= _MAX_TIMINGS:
            _timings.clear()
        _timings[key] = timing
    return timing


def _measure_timing(container: Any, stream: Any, options: DecodeOptions, meter: Meter) -> Timing:
    """From the first packets and the last ones, or those before the end of the span, without decoding."""
    clock = float(stream.time_base)
    first = _find_first(container, stream, meter)
    stop = options.span[1] if options.span else math.inf
    needed = options.frames if options.fps is None else 1
    packets = _read_tail(container, stream, first, stop, needed, options.truncated, meter)
    times = [(packet.at - first) * clock for packet in packets]
    rate = _frame_rate(stream, times)
    end = min(times[-1] + (packets[-1].duration * clock or 1 / rate), stop)
    if options.fps is not None:
        return Timing(first, rate, end, end - (options.frames - 1) / options.fps - TOLERANCE)
    if len(times) < options.frames:
        return Timing(first, rate, end)
    after_first = end if options.frames == 1 else times[1 - options.frames]  # of the last window of this many frames
    return Timing(first, rate, end, after_first - TOLERANCE)


def _find_first(container: Any, stream: Any, meter: Meter) -> int:
    """The first picture's time: of the first keyframe, as nothing before it can be decoded, unless an edit list hides it."""
    shown: list[int] = []
    has_key = False
    for packet in _iterate_packets(container, stream, meter):
        has_key = has_key or packet.is_keyframe
        if not packet.is_discard:
            if packet.is_keyframe and not shown:
                return _packet_time(packet)
            if has_key:
                shown.append(_packet_time(packet))
        if len(shown) == _REORDERED:
            break
    if not shown:  # no packet is marked as a keyframe
        _seek_to(container, 0)
        shown = [_packet_time(packet) for packet in islice(_iterate_packets(container, stream, meter), _REORDERED)]
    if not shown:
        raise Unreadable("", _NO_FRAMES)
    return min(shown)


def _read_tail(
    container: Any, stream: Any, first: int, stop: float, needed: int, truncated: bool, meter: Meter
) -> list[_Packet]:
    """At least `needed` packets before `stop` seconds (or the end), or all; in presentation order."""
    clock = float(stream.time_base)
    stated = max(
        ((stream.start_time or 0) + (stream.duration or 0) - first) * clock,
        ((container.start_time or 0) + (container.duration or 0)) / 1e6 - first * clock,
    )
    end = min(stop, stated)
    window = (needed + _REORDERED) / _frame_rate(stream, []) + 1.0
    limit = first + stop / clock
    while True:
        whole = window >= end
        _seek(container, stream, first, 0.0 if whole else end - window)
        found, behind = [], 0
        try:
            for packet in _iterate_packets(container, stream, meter):
                at = _packet_time(packet)
                if at >= limit - TOLERANCE / clock:
                    behind += 1
                    if behind == _REORDERED:
                        break
                elif at >= first and not packet.is_discard:
                    found.append(_Packet(at, packet.duration or 0))
        except Unreadable:
            if not truncated:
                raise
        if len(found) >= needed + (0 if whole else _REORDERED) or whole:
            if not found:
                raise Unreadable("", _NO_FRAMES)
            return sorted(found)
        window *= 4


def _iterate_packets(container: Any, stream: Any, meter: Meter) -> Iterator[Any]:
    """Packets of pictures, from the current position."""
    import av

    try:
        for packet in container.demux(stream):
            meter.check_time()
            if packet.size and (packet.pts is not None or packet.dts is not None):
                yield packet
    except av.FFmpegError:
        raise Unreadable("", "damaged or cut off: its end cannot be read") from None


def _packet_time(packet: Any) -> int:
    return packet.pts if packet.pts is not None else packet.dts


def _frame_rate(stream: Any, times: Sequence[float]) -> float:
    """As the container states it, or by these times; MPEG's own guess may be the rate of fields."""
    if stream.average_rate:
        return float(stream.average_rate)
    if len(times) > 1 and times[-1] > times[0]:
        return (len(times) - 1) / (times[-1] - times[0])
    return float(stream.guessed_rate or 25)


def _video_stream(container: Any) -> Any:
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # worker processes are the parallelism
    return stream


def probe_video(file: Path | io.BytesIO, decode_all: bool, limits: MediaLimits) -> MediaInfo:
    """By its packets, with one frame decoded; or by decoding all frames."""
    meter = Meter(limits)
    options = DecodeOptions(ResizeCrop((1, 1)), limits=limits)
    with open_video(file, limits) as container:
        stream = _video_stream(container)
        timing = _find_timing(file, container, stream, options, meter)
        if not decode_all:
            _seek(container, stream, timing.first, 0.0)
            packets = (packet for packet in _iterate_packets(container, stream, meter) if not packet.is_discard)
            count = sum(1 for packet in islice(packets, _COUNTED) if _packet_time(packet) >= timing.first)
            if count == _COUNTED:
                count = max(count, round(timing.end * timing.rate))
            for _, frame in _iterate_frames(container, stream, 0.0, timing, False, meter):
                return MediaInfo(*_upright_size(frame, stream), count, timing.end)
            raise Unreadable("", _NO_FRAMES)
        count, end, size = 0, 0.0, (0, 0)
        for at, frame in _iterate_frames(container, stream, 0.0, timing, False, meter):
            size = size if count else _upright_size(frame, stream)
            count, end = count + 1, at
        if not count:
            raise Unreadable("", _NO_FRAMES)
        return MediaInfo(*size, count, max(timing.end, end))
